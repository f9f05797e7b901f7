"""One training run from its first step, or from where it was left, to its last."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from prep.files import local_path, shown
from train import resume
from train.checkpoint import Checkpoint, save_checkpoint
from train.config import FitConfig
from train.loop import (
    BatchSource,
    EpochState,
    evaluate,
    mean_loss,
    refuse_nonfinite,
    train_epoch,
)
from train.metrics import EpochLog, Progress, format_row
from train.model import build_model, refuse_softmax
from train.run import (
    Say,
    choose_precision,
    describe,
    epoch_row,
    identify,
    list_raw,
    new_learner,
    open_train,
    open_val,
    refuse_sources,
    resolve,
    write_record,
)
from train.stop import Interrupted, StopSignal
from train.world import (
    World,
    gather_from_ranks,
    joined,
    pick_device,
    read_world,
    share_buffers,
    sum_over_ranks,
)

LOOK_EVERY_STEPS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How a run ended."""

    num_epochs_done: int
    finished: bool
    """False after --stop-after-steps."""
    best_top1_pct: float
    num_steps: int
    """Steps made by this start."""


def fit(config: FitConfig, say: Say) -> FitResult:
    """Train as `config` says; open everything, and close it whatever happens.

    Args:
        config: Options.
        say: Takes the lines of the result; only called on rank 0.

    Raises:
        ValueError: Something that the user can mend.
        Interrupted: SIGTERM or Ctrl+C came; `last.pt` is saved.
    """
    world = read_world()
    device = pick_device(config.device, world)
    sizes = (config.val_crop_size, config.val_resize_size)
    raw = list_raw(config)
    with (
        joined(world, device),
        closing(open_train(config, world, raw)) as train,
        closing(open_val(config, world, raw, *sizes)) as val,
    ):
        return fit_sources(config, train, val, say, world=world, device=device)


def fit_sources(
    config: FitConfig,
    train: BatchSource,
    val: BatchSource,
    say: Say,
    *,
    model: nn.Module | None = None,
    world: World | None = None,
    device: torch.device | None = None,
) -> FitResult:
    """Train from two open sources, whatever they are.

    Args:
        model: Trained in place of the one that `config` names.
        world: This process alone without it.
        device: The CPU without it.
    """
    device = device or torch.device("cpu")
    run = _Run(config, train, val, say, world or World(), device)
    run.prepare(model)
    with StopSignal() as stop:
        return run.train(stop)


class _Run:
    """State of a run in memory."""

    def __init__(
        self,
        config: FitConfig,
        train: BatchSource,
        val: BatchSource,
        say: Say,
        world: World,
        device: torch.device,
    ) -> None:
        refuse_sources(config, train, val, world)
        self._config, self._train, self._val, self._world = config, train, val, world
        self._out = local_path(config.out)
        self._say = say if world.is_main else lambda _line: None
        self._precision = choose_precision(config, device)
        self._resolved = resolve(config, train, world, self._precision)
        self._num_steps = train.steps_per_epoch
        self._best_top1_pct = -1.0
        self._steps_here = 0
        self._stop_agreed = False
        self._identity = identify(config, train)
        self._state = self._new_state(0)

    def prepare(self, model: nn.Module | None) -> None:
        """Build the model and its optimizer, continue from a checkpoint, start the records."""
        config, device = self._config, self._precision.device
        checkpoint = resume.find_checkpoint(config)
        if checkpoint is not None:
            resume.refuse_changes(checkpoint, self._resolved, self._train.wnids, self._identity)
        torch.manual_seed(config.seed)
        torch.backends.cudnn.benchmark = True
        if model is None:
            weights = None if checkpoint else config.weights
            model = build_model(config.model, self._train.num_classes, weights)
        refuse_softmax(model, config.train_crop_size)
        self._model = model.to(device, memory_format=self._precision.memory_format)  # type: ignore[call-overload]
        self._learner = new_learner(
            config, self._model, self._precision, self._world, self._num_steps
        )
        if checkpoint is not None:
            resume.restore_learner(self._learner, self._model, checkpoint)
            resume.restore_epoch(self._state, checkpoint, self._world.rank)
            self._best_top1_pct = checkpoint.best_top1_pct
        if self._world.is_main:
            self._start_records(checkpoint)

    def train(self, stop: StopSignal) -> FitResult:
        """Run epochs to the last, or until told to stop."""
        epochs = self._config.epochs
        if self._state.epoch >= epochs:
            self._say(
                f"{shown(self._out)}: finished already, {epochs} epochs, "
                f"best top-1 {self._best_top1_pct:.2f} %"
            )
        while self._state.epoch < epochs:
            if not self._run_epoch(stop):
                return self._leave(stop)
        return self._result(finished=True)

    def _run_epoch(self, stop: StopSignal) -> bool:
        state, main = self._state, self._world.is_main
        title = f"epoch {state.epoch + 1}/{self._config.epochs}"
        progress = Progress(title, self._num_steps, state.step, shown=main)
        try:
            train_epoch(
                self._learner, self._train, state, lambda s: self._after_step(s, progress, stop)
            )
        finally:
            progress.close()
        train_loss = mean_loss(state, self._world)
        self._save("last.pt")  # the epoch is safe before it is scored
        self._agree(stop)
        if self._must_stop(stop):
            return False
        self._finish_epoch(train_loss)
        self._agree(stop)
        return not (self._must_stop(stop) and self._state.epoch < self._config.epochs)

    def _after_step(self, state: EpochState, progress: Progress, stop: StopSignal) -> bool:
        self._steps_here += 1
        note = ""
        if state.step % LOOK_EVERY_STEPS == 0:
            note = self._look(state, stop)
        progress.update(state.step, note)
        every = self._config.checkpoint_every_steps
        if every and state.step % every == 0 and state.step < self._num_steps:
            mean_loss(state, self._world)
            self._save("last.pt")
        return self._must_stop(stop)

    def _look(self, state: EpochState, stop: StopSignal) -> str:
        """Read the loss, agree on signals over the ranks, give the progress note."""
        loss = mean_loss(state, self._world)
        self._agree(stop)
        img_per_s = state.num_images * self._world.world_size / state.seconds
        wait_pct = 100 * state.data_wait_s / state.seconds
        return f"loss {loss:.3f}, {img_per_s:.0f} img/s, data wait {wait_pct:.1f} %"

    def _agree(self, stop: StopSignal) -> None:
        """Stop all ranks at the same step when one got a signal; every rank must come here."""
        noted = torch.tensor([float(stop.name is not None)], device=self._precision.device)
        self._stop_agreed = bool(sum_over_ranks(noted, self._world).item())

    def _must_stop(self, stop: StopSignal) -> bool:
        limit = self._config.stop_after_steps
        if limit is not None and self._steps_here >= limit:
            return True
        return self._stop_agreed if self._world.world_size > 1 else stop.name is not None

    def _finish_epoch(self, train_loss: float) -> None:
        """Score, save and log the epoch, and step to the next."""
        state = self._state
        started = time.perf_counter()
        share_buffers(self._model, self._world)
        scores = evaluate(self._model, self._val, self._precision, self._world)
        refuse_nonfinite(scores.loss, f"val loss after epoch {state.epoch + 1}")
        row = epoch_row(
            state,
            scores,
            train_loss=train_loss,
            val_seconds=time.perf_counter() - started,
            lr=self._learner.lr_at((state.epoch + 1) * self._num_steps - 1),
            num_steps=self._num_steps,
            world=self._world,
        )
        self._state = self._new_state(state.epoch + 1)
        if scores.top1_pct > self._best_top1_pct:
            self._best_top1_pct = scores.top1_pct
            self._save("best.pt")
        if self._world.is_main:
            self._log.append(row)
        self._save("last.pt")
        self._say(format_row(row, self._config.epochs))

    def _leave(self, stop: StopSignal) -> FitResult:
        where = f"epoch {self._state.epoch + 1}, step {self._state.step}/{self._num_steps}"
        text = f"saved {shown(self._out / 'last.pt')} at {where}; the same command continues"
        if stop.name is not None or self._stop_agreed:
            raise Interrupted(f"{stop.name or 'another rank was stopped'}: {text}")
        self._say(f"--stop-after-steps {self._config.stop_after_steps}: {text}")
        return self._result(finished=False)

    def _result(self, *, finished: bool) -> FitResult:
        return FitResult(
            num_epochs_done=self._state.epoch,
            finished=finished,
            best_top1_pct=self._best_top1_pct,
            num_steps=self._steps_here,
        )

    def _new_state(self, epoch: int) -> EpochState:
        zero = torch.zeros((), dtype=torch.float64, device=self._precision.device)
        return EpochState(epoch=epoch, loss_sum=zero)

    def _save(self, name: str) -> None:
        """Write a checkpoint of this moment; every rank must come here."""
        own = self._state.to_dict() | resume.random_states(self._precision.device)
        ranks = gather_from_ranks(own, self._world)
        if not self._world.is_main:
            return
        checkpoint = Checkpoint(
            epoch=self._state.epoch,
            step=self._state.step,
            model=self._model.state_dict(),
            optimizer=self._learner.optimizer.state_dict(),
            scaler=self._learner.scaler.state_dict(),
            best_top1_pct=self._best_top1_pct,
            ranks=ranks,
            config=self._resolved,
            wnids=list(self._train.wnids),
            data=self._identity,
        )
        save_checkpoint(self._out / name, checkpoint)

    def _start_records(self, checkpoint: Checkpoint | None) -> None:
        out, device = self._out, self._precision.device
        out.mkdir(parents=True, exist_ok=True)
        if checkpoint is None:
            for name in ("last.pt", "best.pt"):
                (out / name).unlink(missing_ok=True)
        self._log = EpochLog(out / "log.csv", self._state.epoch)
        write_record(out / "config.json", self._resolved, device)
        place = f"epoch {self._state.epoch + 1}, step {self._state.step}" if checkpoint else None
        self._say(describe(self._resolved, self._train, self._val, device, place))
