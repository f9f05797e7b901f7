"""What a run shows: hits, the CSV logs and the progress of an epoch."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from prep.files import shown, write_text_whole

PLAIN_INTERVAL_S = 30.0


def top_k_hits(logits: Tensor, labels: Tensor, ks: tuple[int, ...] = (1, 5)) -> Tensor:
    """Count the samples whose label is among their k best scores.

    Counts rather than rates, so that ranks with unequal shares can add theirs.

    Args:
        logits: `(N, C)`, any float dtype.
        labels: `(N,)` int64 in `0..C-1`.
        ks: Ranks to count at, ascending.

    Returns:
        `(len(ks),)` int64, on the device of `logits`.

    Raises:
        ValueError: A k lies outside `1..C`.
    """
    num_classes = logits.shape[1]
    if any(not 1 <= k <= num_classes for k in ks):
        raise ValueError(f"every k must lie in 1..{num_classes}, got {ks!r}")
    best = logits.topk(max(ks), dim=1).indices
    hits = best == labels.unsqueeze(1)
    return torch.stack([hits[:, :k].sum() for k in ks])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One finished epoch: a line of `log.csv` and of stdout. Figures are over all ranks."""

    epoch: int
    """Epochs finished, counted from 1."""
    step: int
    """Steps of the run so far."""
    lr: float
    """Rate of the epoch's last step."""
    train_loss: float
    """Mean over the epoch's images while training, label smoothing and mixing included."""
    val_loss: float
    """Mean cross entropy over the val split, without smoothing."""
    top1_pct: float
    top5_pct: float
    ema_val_loss: float | None = None
    """Of the averaged weights; None without --ema-decay, as the next two."""
    ema_top1_pct: float | None = None
    ema_top5_pct: float | None = None
    crop_size: int
    """Side of the training crop, in pixels."""
    seconds: float
    """Wall time of training and evaluation."""
    img_per_s: float
    """Training images per wall second, waiting included, evaluation not."""
    data_wait_pct: float
    """Share of the training time in which rank 0 stood idle for a batch."""
    num_damaged: int
    """Training samples stepped over in this epoch."""
    gpu_temp_c: float | None = None
    """Mean over rank 0's card; None without one, as the next two."""
    gpu_power_w: float | None = None
    gpu_clock_mhz: float | None = None

    @property
    def judged_top1_pct(self) -> float:
        """Top-1 that decides which epoch is best: of the averaged weights, where there are some."""
        return self.top1_pct if self.ema_top1_pct is None else self.ema_top1_pct


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A line of `steps.csv`: what came since the line before, or since the start or resume."""

    epoch: int
    """The running one, counted from 1."""
    step: int
    """Steps of the run so far."""
    lr: float
    """Rate of this step."""
    loss: float
    """Mean over the images since the last line, over all ranks."""
    grad_norm: float | None = None
    """Of this step's gradient before clipping; None without --clip-norm."""
    img_per_s: float
    data_wait_pct: float
    gpu_temp_c: float | None = None
    gpu_power_w: float | None = None
    gpu_clock_mhz: float | None = None


def format_row(row: EpochRow, num_epochs: int) -> str:
    """Give the line of one epoch for people."""
    average = "" if row.ema_top1_pct is None else f"  EMA top-1 {row.ema_top1_pct:.2f} %"
    heat = "" if row.gpu_temp_c is None else f"  GPU {row.gpu_temp_c:.0f} C"
    damaged = f"  damaged {row.num_damaged}" if row.num_damaged else ""
    return (
        f"epoch {row.epoch}/{num_epochs}  train loss {row.train_loss:.4f}"
        f"  val loss {row.val_loss:.4f}  top-1 {row.top1_pct:.2f} %  top-5 {row.top5_pct:.2f} %"
        f"{average}  {row.seconds:.1f} s  {row.img_per_s:.0f} img/s"
        f"  data wait {row.data_wait_pct:.1f} %{heat}{damaged}"
    )


class CsvLog:
    """A header and one line a row, none twice: `log.csv` of `EpochRow`, `steps.csv` of `StepRow`.

    Args:
        path: The file; replaced, atomically, by those of its lines that are kept.
        row_class: Its fields are the columns.
        is_kept: Tells of a line, by column, whether it stays: a resumed run drops those of the
            steps that are run again.

    Raises:
        ValueError: The file has other columns.
    """

    def __init__(
        self,
        path: Path,
        row_class: type[EpochRow | StepRow],
        is_kept: Callable[[dict[str, str]], bool],
    ) -> None:
        self._path = path
        self._columns = [field.name for field in fields(row_class)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in self._read() if is_kept(row))
        write_text_whole(path, text.getvalue())

    def append(self, row: EpochRow | StepRow) -> None:
        """Add one row; the file is closed again at once."""
        cells = [_cell(getattr(row, name)) for name in self._columns]
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)

    def _read(self) -> list[dict[str, str]]:
        if not self._path.is_file():
            return []
        with self._path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if row["epoch"] and None not in row.values()]
            if reader.fieldnames is not None and list(reader.fieldnames) != self._columns:
                raise ValueError(
                    f"{shown(self._path)}: has other columns; move it or choose another --out"
                )
        return rows


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Progress:
    """Progress of one epoch on stderr.

    A bar of plain ASCII on a terminal; elsewhere one line now and then, so that a log file
    does not fill up.
    """

    def __init__(self, title: str, num_steps: int, step: int = 0, *, shown: bool = True) -> None:
        stream: TextIO = sys.stderr
        self._title, self._num_steps, self._stream = title, num_steps, stream
        self._plain = shown and not stream.isatty()
        self._note = ""
        self._next_line = time.monotonic() + PLAIN_INTERVAL_S
        self._bar = tqdm(
            total=num_steps,
            initial=step,
            desc=title,
            unit="step",
            file=stream,
            ascii=True,
            dynamic_ncols=True,
            leave=False,
            disable=not shown or self._plain,
        )

    def update(self, step: int) -> None:
        """Show that `step` steps of the epoch are done."""
        self._bar.update(step - self._bar.n if not self._bar.disable else 0)
        if self._plain and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_INTERVAL_S
            self._stream.write(f"{self._title}: step {step}/{self._num_steps}  {self._note}\n")
            self._stream.flush()

    def note(self, text: str) -> None:
        """Show a few figures beside the progress, from the next update on."""
        self._note = text
        self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def around_progress() -> AbstractContextManager[None]:
    """Take progress bars off the terminal while something else is printed there."""
    return tqdm.external_write_mode()
