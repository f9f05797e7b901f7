"""Read the logs of runs back, also while they are being written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prep.files import shown

Table = dict[str, list[float]]
"""Columns of a log by name; an empty cell is NaN."""

PLACE: Final = "place"
"""Column that is added to a log: where its row stands, in epochs."""
WHICH: Final = "--run takes the --out of a train fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The logs of one run, each with the column `PLACE`; without columns where there is no row."""

    epochs: Table
    steps: Table


def read_run(folder: Path) -> Run:
    """Read the logs of a run.

    Raises:
        ValueError: The folder is missing or has no row yet, or a log is not as `fit` writes it.
    """
    if not folder.is_dir():
        raise ValueError(f"{shown(folder)}: no such folder; {WHICH}")
    epochs, steps = read_table(folder / "log.csv"), read_table(folder / "steps.csv")
    if not epochs and not steps:
        if not any((folder / name).exists() for name in ("log.csv", "steps.csv")):
            raise ValueError(f"{shown(folder)}: holds neither log.csv nor steps.csv; {WHICH}")
        raise ValueError(f"{shown(folder)}: its logs have no row yet; wait for the first steps")
    if epochs:
        epochs[PLACE] = epochs["epoch"]
    if steps:
        steps_per_epoch = _steps_per_epoch(folder, epochs)
        steps[PLACE] = [step / steps_per_epoch for step in steps["step"]]
    return Run(epochs=epochs, steps=steps)


def read_table(path: Path) -> Table:
    """Read a log; a last line without its line end is still being written, and left out.

    Returns:
        The columns; none where there is no file or no row.

    Raises:
        ValueError: A line has more or fewer cells than the header, or a cell is no number.
    """
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [line.split(",") for line in text.split("\n")[:-1]]
    if len(lines) < 2:
        return {}
    header = lines[0]
    if not {"epoch", "step"} <= set(header):
        raise ValueError(f"{shown(path)}: has no column epoch or step; {WHICH}")
    try:
        rows = [_numbers(number, header, cells) for number, cells in enumerate(lines[1:], 2)]
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {error}; mend or remove that line") from error
    return {name: [row[name] for row in rows] for name in header}


def _numbers(line: int, header: Sequence[str], cells: Sequence[str]) -> dict[str, float]:
    if len(cells) != len(header):
        raise ValueError(f"line {line} has {len(cells)} cells, the header {len(header)}")
    row = {n: _number(f"line {line}: {n}", c) for n, c in zip(header, cells, strict=True)}
    for name in ("epoch", "step"):
        if not 1 <= row[name] < math.inf:
            raise ValueError(f"line {line}: {name} must be at least 1, got {row[name]:g}")
    return row


def _number(place: str, cell: str) -> float:
    try:
        return float(cell or "nan")
    except ValueError as error:
        raise ValueError(f"{place} is {cell!r}, which is no number") from error


def _steps_per_epoch(folder: Path, epochs: Table) -> float:
    """Take it from the last finished epoch, else from the run's record."""
    if epochs:
        return epochs["step"][-1] / epochs["epoch"][-1]
    path = folder / "config.json"
    try:
        count = float(json.loads(path.read_text(encoding="utf-8"))["config"]["steps_per_epoch"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        count = math.nan
    if not count >= 1:
        raise ValueError(
            f"{shown(path)}: gives no steps_per_epoch, which steps.csv needs; wait for the end of "
            "the first epoch"
        )
    return count
