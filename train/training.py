"""One training run: its state in memory, from the first step or a checkpoint to the last."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import nn

from prep.files import local_path, shown
from train import resume
from train.checkpoint import Checkpoint, best_of, load_checkpoint, save_checkpoint
from train.config import FitConfig
from train.feed import BatchSource
from train.journal import Journal
from train.learner import new_learner, new_model, place_model
from train.loop import (
    DivergedError,
    EpochState,
    mean_loss,
    num_steps_of,
    refuse_broken_weights,
    refuse_nonfinite,
    train_epoch,
)
from train.metrics import EpochRow
from train.precision import choose_precision, set_fast_math
from train.run import FitResult, Say, describe, identify, refuse_sources, resolve, write_record
from train.score import evaluate
from train.stop import Interrupted, StopSignal
from train.world import World, gather_from_ranks, share_buffers, sum_over_ranks

ROLLBACK_LR_FACTOR: Final = 0.5


class Run:
    """State of a run in memory.

    Args:
        config: Options.
        train: Batches to learn from.
        val: Batches to score on.
        say: Takes lines; called on rank 0 only.
        world: Place among the ranks.
        device: Where to compute.

    Raises:
        ValueError: Sources and options do not go together.
    """

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
        self._num_steps = num_steps_of(train, config.grad_accum)
        self._best_top1_pct = -1.0
        self._kept: dict[str, float] = {}
        self._num_rollbacks = 0
        self._steps_here = 0
        self._stop_agreed = False
        self._identity = identify(config, train)
        self._state = self._new_state(0)
        self._journal = Journal(config, self._out, self._num_steps, self._say, world, device)

    def prepare(self, model: nn.Module | None) -> None:
        """Build the model and its optimizer, continue from a checkpoint, start the records."""
        config, world, num_classes = self._config, self._world, self._train.num_classes
        set_fast_math()
        checkpoint = resume.find_checkpoint(config)
        same = checkpoint is None or resume.is_same_run(
            checkpoint,
            self._resolved,
            self._train.wnids,
            self._identity,
            anyway=self._say if config.resume_anyway else None,
        )
        if model is None:
            weights = None if checkpoint else config.weights
            wnids = self._train.wnids
            model = new_model(config, num_classes, self._precision, weights=weights, wnids=wnids)
        else:
            model = place_model(config, model, self._precision)
        torch.manual_seed(config.seed + world.rank)  # mixing and dropout differ between ranks
        self._model = model
        self._learner = new_learner(
            config,
            model,
            self._precision,
            world,
            num_steps=self._num_steps,
            num_classes=num_classes,
        )
        if checkpoint is not None:
            self._restore(checkpoint, same_run=same)
        self._start_records(checkpoint)
        if config.on_nan == "rollback":
            self._save("last.pt")  # something to go back to

    def train(self, stop: StopSignal) -> FitResult:
        """Run epochs to the last, or until told to stop."""
        epochs = self._config.epochs
        if self._state.epoch >= epochs:
            self._say(
                f"{shown(self._out)}: finished already, {epochs} epochs, "
                f"best top-1 {self._best_top1_pct:.2f} %"
            )
        while self._state.epoch < epochs:
            try:
                complete = self._run_epoch(stop)
            except DivergedError as error:
                self._roll_back(error)
                continue
            if not complete:
                return self._leave(stop)
        return self._result(finished=True)

    def close(self) -> None:
        """End the journal."""
        self._journal.close()

    def _run_epoch(self, stop: StopSignal) -> bool:
        state = self._state
        self._journal.begin_epoch(state, mean_loss(state, self._world))
        try:
            train_epoch(self._learner, self._train, state, lambda s: self._after_step(s, stop))
        finally:
            self._journal.end_steps()
        train_loss = mean_loss(state, self._world)
        self._save("last.pt")  # the epoch is safe before it is scored
        self._agree(stop)
        if self._must_stop(stop):
            return False
        self._finish_epoch(train_loss)
        self._agree(stop)
        return not (self._must_stop(stop) and self._state.epoch < self._config.epochs)

    def _after_step(self, state: EpochState, stop: StopSignal) -> bool:
        self._steps_here += 1
        if state.step % self._config.log_every_steps == 0 or state.step == self._num_steps:
            loss = mean_loss(state, self._world)
            self._journal.look(state, loss, self._lr_of(state.step - 1))
            self._agree(stop)
        self._journal.step(state)
        every = self._config.checkpoint_every_steps
        if every and state.step % every == 0 and state.step < self._num_steps:
            mean_loss(state, self._world)
            self._save("last.pt")
        return self._must_stop(stop)

    def _lr_of(self, step: int) -> float:
        """Give the rate of a step of the running epoch."""
        return self._learner.lr(self._state.epoch * self._num_steps + step)

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
        row = self._score(train_loss)
        self._state = self._new_state(self._state.epoch + 1)
        self._keep(row)
        self._journal.end_epoch(row)
        self._save("last.pt")

    def _score(self, train_loss: float) -> EpochRow:
        state, world, ema = self._state, self._world, self._learner.ema
        started = time.perf_counter()
        models = [self._model] if ema is None else [self._model, ema.module]
        for model in models:
            share_buffers(model, world)
        scores = evaluate(models, self._val, self._precision, world, flip=self._config.val_flip)
        refuse_nonfinite(scores[0].loss, f"val loss after epoch {state.epoch + 1}")
        counts = torch.tensor([state.num_images, state.num_damaged], device=state.loss_sum.device)
        num_images, num_damaged = sum_over_ranks(counts, world).tolist()
        return self._journal.row(
            state,
            scores,
            train_loss=train_loss,
            val_seconds=time.perf_counter() - started,
            lr=self._lr_of(self._num_steps - 1),
            totals=(num_images, num_damaged),
        )

    def _keep(self, row: EpochRow) -> None:
        """Save the epoch as the best, or as one of the best; drop the one it puts out."""
        top1_pct = row.judged_top1_pct
        if top1_pct > self._best_top1_pct:
            self._best_top1_pct = top1_pct
            self._save("best.pt")
        if self._config.keep == 1:
            return
        name = f"epoch-{row.epoch:04d}.pt"
        self._kept, dropped = best_of(self._kept | {name: top1_pct}, self._config.keep)
        if name in self._kept:
            self._save(name)
        for gone in dropped if self._world.is_main else ():
            (self._out / gone).unlink(missing_ok=True)

    def _roll_back(self, error: DivergedError) -> None:
        """Go back to `last.pt` with half the rate, on every rank alike."""
        self._num_rollbacks += 1
        config = self._config
        if config.on_nan == "stop" or self._num_rollbacks > config.max_rollbacks:
            raise error
        self._restore(load_checkpoint(self._out / "last.pt"), same_run=True)
        self._learner.lr_factor *= ROLLBACK_LR_FACTOR
        self._journal.start(self._state.epoch, self._state.step)
        self._save("last.pt")
        reason = str(error).partition(":")[0]
        self._say(
            f"{reason}: back to epoch {self._state.epoch + 1}, step {self._state.step}, with "
            f"{self._learner.lr_factor:g} of the rate "
            f"(rollback {self._num_rollbacks} of {config.max_rollbacks})"
        )

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
        refuse_broken_weights(self._model, self._world)
        own = self._state.to_dict() | resume.random_states(self._precision.device)
        ranks = gather_from_ranks(own, self._world)
        if not self._world.is_main:
            return
        checkpoint = Checkpoint(
            epoch=self._state.epoch,
            step=self._state.step,
            **resume.learner_state(self._learner, self._model),
            num_rollbacks=self._num_rollbacks,
            best_top1_pct=self._best_top1_pct,
            kept=self._kept,
            ranks=ranks,
            config=self._resolved,
            wnids=list(self._train.wnids),
            class_names=list(self._train.class_names),
            data=self._identity,
        )
        save_checkpoint(self._out / name, checkpoint)

    def _restore(self, checkpoint: Checkpoint, *, same_run: bool) -> None:
        resume.restore_learner(self._learner, self._model, checkpoint)
        self._state = self._new_state(checkpoint.epoch)
        if same_run:
            resume.restore_epoch(self._state, checkpoint, self._world.rank)
        self._best_top1_pct = checkpoint.best_top1_pct
        self._kept = dict(checkpoint.kept)
        self._num_rollbacks = max(self._num_rollbacks, checkpoint.num_rollbacks)

    def _start_records(self, checkpoint: Checkpoint | None) -> None:
        state, device = self._state, self._precision.device
        if self._world.is_main:
            self._out.mkdir(parents=True, exist_ok=True)
            if checkpoint is None:
                for name in ("last.pt", "best.pt"):
                    (self._out / name).unlink(missing_ok=True)
            write_record(self._out / "config.json", self._resolved, device)
        self._journal.start(state.epoch, state.step)
        place = f"epoch {state.epoch + 1}, step {state.step}" if checkpoint else None
        self._say(describe(self._resolved, self._train, self._val, device, place))
