"""What a run shows and writes for people while it goes."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from train.config import FitConfig
from train.loop import EpochState
from train.metrics import CsvLog, EpochRow, Progress, StepRow, around_progress, format_row
from train.monitor import GpuReading, open_monitor, slow_decline
from train.run import Say, train_crop_size
from train.score import Scores
from train.world import World


class Journal:
    """Lines, progress, `log.csv`, `steps.csv`, TensorBoard and the watch over the GPU of a run.

    Only rank 0 shows and writes; the others keep a journal that does nothing.

    Args:
        config: Options.
        out: Run folder; must be there.
        num_steps: Steps of one epoch.
        say: Takes a line.
        world: Place among the ranks.
        device: Of the training.

    Raises:
        ValueError: --tensorboard without its package.
    """

    def __init__(
        self,
        config: FitConfig,
        out: Path,
        num_steps: int,
        say: Say,
        world: World,
        device: torch.device,
    ) -> None:
        self._config, self._out, self._num_steps = config, out, num_steps
        self._say, self._world = say, world
        self._looked = _Look()
        self._readings: list[GpuReading] = []
        self._rates: dict[int, list[float]] = {}
        self._warned = False
        self._board: Any = None
        self._progress: Progress | None = None
        if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                '--tensorboard needs its package: pip install "shardlane[tensorboard]"'
            )
        self._monitor = open_monitor(device, self._say_beside) if world.is_main else None

    def start(self, epoch: int, step: int) -> None:
        """Open the logs where a run begins or continues; rows of steps to come are dropped."""
        if not self._world.is_main:
            return
        done = epoch * self._num_steps + step
        self._log = CsvLog(self._out / "log.csv", EpochRow, lambda row: int(row["epoch"]) <= epoch)
        self._steps = CsvLog(self._out / "steps.csv", StepRow, lambda row: int(row["step"]) <= done)
        if self._config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._close_board()
            self._board = SummaryWriter(str(self._out / "tensorboard"), purge_step=done + 1)

    def begin_epoch(self, state: EpochState, loss: float) -> None:
        """Begin, or continue, an epoch whose mean loss so far is `loss`."""
        self._looked = _Look.at(state, loss)
        self._read_gpu()  # what came before, an evaluation perhaps, is not of these steps
        self._readings = []
        title = f"epoch {state.epoch + 1}/{self._config.epochs}"
        shown = self._world.is_main
        self._progress = Progress(title, self._num_steps, state.step, shown=shown)

    def step(self, state: EpochState) -> None:
        """Move the progress on."""
        if self._progress is not None:
            self._progress.update(state.step)

    def look(self, state: EpochState, loss: float, lr: float) -> None:
        """Note what came since the last look; `loss` is the epoch's mean so far."""
        if not self._world.is_main:
            return
        reading = self._read_gpu()
        before, now = self._looked, _Look.at(state, loss)
        self._looked = now
        num_images, seconds = now.num_images - before.num_images, now.seconds - before.seconds
        if not num_images:
            return
        row = StepRow(
            epoch=state.epoch + 1,
            step=state.epoch * self._num_steps + state.step,
            lr=lr,
            loss=(loss * now.num_images - before.loss * before.num_images) / num_images,
            grad_norm=None if state.grad_norm is None else state.grad_norm.item(),
            img_per_s=num_images * self._world.world_size / seconds,
            data_wait_pct=100 * (now.data_wait_s - before.data_wait_s) / seconds,
            **_gpu_columns([reading] if reading else []),
        )
        self._steps.append(row)
        self._draw("step", row, row.step)
        if self._progress is not None:
            self._progress.note(
                f"loss {row.loss:.3f}, lr {lr:.3g}, {row.img_per_s:.0f} img/s, "
                f"data wait {row.data_wait_pct:.1f} %"
            )

    def end_steps(self) -> None:
        """Take the progress away: the epoch's steps are over, or were left."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def row(
        self,
        state: EpochState,
        scores: list[Scores],
        *,
        train_loss: float,
        val_seconds: float,
        lr: float,
        totals: tuple[int, int],
    ) -> EpochRow:
        """Give the row of a finished epoch.

        Args:
            state: Of the epoch on this rank.
            scores: Of the raw weights, then of the averaged ones where there are some.
            train_loss: Mean over the epoch's images.
            val_seconds: Time of the evaluation.
            lr: Rate of the last step.
            totals: Images trained on and samples stepped over, over all ranks.
        """
        num_images, num_damaged = totals
        seconds = max(state.seconds, 1e-9)
        raw, ema = scores[0], scores[1] if len(scores) > 1 else None
        return EpochRow(
            epoch=state.epoch + 1,
            step=(state.epoch + 1) * self._num_steps,
            lr=lr,
            train_loss=train_loss,
            val_loss=raw.loss,
            top1_pct=raw.top1_pct,
            top5_pct=raw.top5_pct,
            ema_val_loss=None if ema is None else ema.loss,
            ema_top1_pct=None if ema is None else ema.top1_pct,
            ema_top5_pct=None if ema is None else ema.top5_pct,
            crop_size=train_crop_size(self._config, state.epoch),
            seconds=state.seconds + val_seconds,
            img_per_s=num_images / seconds,
            data_wait_pct=100 * state.data_wait_s / seconds,
            num_damaged=num_damaged,
            **_gpu_columns(self._readings),
        )

    def end_epoch(self, row: EpochRow) -> None:
        """Note a finished epoch."""
        if not self._world.is_main:
            return
        self._log.append(row)
        self._draw("epoch", row, row.step)
        self._say(format_row(row, self._config.epochs))
        self._say_scaling(row.img_per_s)
        self._say_decline(row)

    def close(self) -> None:
        """End the watch and the files."""
        self.end_steps()
        self._close_board()
        if self._monitor is not None:
            self._monitor.take()  # says what it has not said yet
            self._monitor.close()

    def _read_gpu(self) -> GpuReading | None:
        reading = None if self._monitor is None else self._monitor.take()
        if reading is not None:
            self._readings.append(reading)
        return reading

    def _say_beside(self, line: str) -> None:
        """Print a line while the progress is shown, without tearing it."""
        with around_progress():
            self._say(line)

    def _say_scaling(self, img_per_s: float) -> None:
        alone, ranks = self._config.one_card_img_per_s, self._world.world_size
        if alone is not None and ranks > 1:
            times = img_per_s / alone
            self._say(
                f"scaling: {ranks} ranks give {times:.2f} times one card ({100 * times / ranks:.0f}"
                " % efficiency)"
            )

    def _say_decline(self, row: EpochRow) -> None:
        rates = self._rates.setdefault(row.crop_size, [])
        rates.append(row.img_per_s)
        warning = slow_decline(rates)
        if warning is not None and not self._warned:
            self._warned = True
            self._say(warning)

    def _draw(self, group: str, row: EpochRow | StepRow, step: int) -> None:
        if self._board is None:
            return
        for name, value in asdict(row).items():
            if value is not None and name not in ("epoch", "step"):
                self._board.add_scalar(f"{group}/{name}", value, step)

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None


@dataclass(frozen=True, slots=True)
class _Look:
    """Sums of an epoch at the moment of a look."""

    num_images: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    data_wait_s: float = 0.0

    @staticmethod
    def at(state: EpochState, loss: float) -> _Look:
        """Take the sums as they are."""
        return _Look(state.num_images, loss, state.seconds, state.data_wait_s)


def _gpu_columns(readings: list[GpuReading]) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for name in ("temp_c", "power_w", "clock_mhz"):
        values = [v for v in (getattr(reading, name) for reading in readings) if v is not None]
        columns[f"gpu_{name}"] = sum(values) / len(values) if values else None
    return columns
