"""Measure the loader against the raw folder and webdataset, in turn, on the same machine."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import psutil

from prep.files import local_path, shown, write_text_whole
from prep.index import load_index
from prep.sources import open_source
from train.contenders import Contender, Pass, serve
from train.options import BenchConfig

SAMPLE_S: Final = 0.2
"""Between two looks at the memory of a contender."""
SETTLE_S: Final = 0.5
"""Before each pass: some loaders read ahead after their own is over."""
STOP_S: Final = 10.0
"""Time that a contender has to end by itself."""
BUSY_PCT: Final = 10.0
"""Of the machine's processor time: more than this used by others is said."""
COLUMNS: Final = (
    "contender",
    "img_per_s",
    "lowest",
    "highest",
    "ratio",
    "cpu_s_per_1000",
    "peak_mb",
    "first_batch_s",
)
HEADS: Final = (
    "contender",
    "img/s, median",
    "lowest",
    "highest",
    "x first row",
    "CPU s per 1,000",
    "peak MB",
    "first batch s",
)


@dataclass(slots=True)
class Record:
    """The passes of one contender."""

    contender: Contender
    passes: list[Pass] = field(default_factory=list)
    """The first one is the warm-up: it builds the loader, with the page cache cold where that can
    be had, and counts for the time to the first batch only."""
    peak_bytes: int = 0

    @property
    def rates(self) -> list[float]:
        """Give the img/s of the passes that count."""
        return [one.img_per_s for one in self.passes[1:]]

    def row(self, base: Record) -> dict[str, Any]:
        """Give the row of the table; the ratio is the median over the turns."""
        counted = self.passes[1:]
        num_images = sum(one.num_images for one in counted)
        return {
            "contender": self.contender.name,
            "img_per_s": round(statistics.median(self.rates), 1),
            "lowest": round(min(self.rates), 1),
            "highest": round(max(self.rates), 1),
            "ratio": round(
                statistics.median(a / b for a, b in zip(self.rates, base.rates, strict=True)), 2
            ),
            "cpu_s_per_1000": round(1000 * sum(one.cpu_s for one in counted) / num_images, 2),
            "peak_mb": round(self.peak_bytes / 1e6),
            "first_batch_s": round(self.passes[0].first_batch_s, 2),
        }


def bench(config: BenchConfig, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure, print the table and write `bench.json`, `bench.csv` and `bench.png`.

    Args:
        config: Options.
        say: Takes the lines of the result.

    Returns:
        The rows, in the order of the table; ratios are to its first row.

    Raises:
        ValueError: The set or the raw folder cannot be read, or a contender failed.
    """
    records = [Record(contender) for contender in _contenders(config)]
    others_pct = _measure(records, config.passes)
    rows = [record.row(records[0]) for record in records]
    for line in table(rows):
        say(line)
    if others_pct > BUSY_PCT:
        say(
            f"warning: other programs used {others_pct:.0f} % of the processors meanwhile: "
            "trust the ratios, not the rates, or close them and run again"
        )
    folder = local_path(config.out)
    _write(folder, rows, records, others_pct)
    say(f"written: {shown(folder)} (bench.json, bench.csv{_plot(folder, rows)})")
    return rows


def _contenders(config: BenchConfig) -> list[Contender]:
    """Give the raw folder first: it is what the others are compared with."""
    shards, src = config.shards, config.src
    sizes = []
    if shards is not None:
        sizes.append(load_index(shards).split("train").num_samples)
    if src is not None:
        sizes.append(len(open_source(src).splits.get("train", [])))
    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "crop_size": config.crop_size,
        "num_images": min([config.num_images, *sizes]),
    }
    result = []
    if src is not None:
        counts = [config.num_workers, *config.num_threads]
        result += [
            Contender(kind="raw folder", path=local_path(src), num_workers=count, **shared)
            for count in dict.fromkeys(counts)
        ]
    kinds: list[tuple[str, Path | None]] = [
        ("webdataset", shards),
        *((kind, shards if kind == "timm" else src) for kind in config.peers),
        ("shardlane", shards),
    ]
    result += [
        Contender(kind=kind, path=local_path(place), num_workers=count, **shared)
        for count in config.num_threads
        for kind, place in kinds
        if place is not None
    ]
    return result


def _measure(records: Sequence[Record], num_passes: int) -> float:
    """Let the contenders take turns; gives the percentage of processor time that others used."""
    ours_s, busy_s, all_s = 0.0, 0.0, 0.0
    with _children(records) as pipes:
        for turn in range(num_passes + 1):
            for record, (pipe, process) in zip(records, pipes, strict=True):
                time.sleep(SETTLE_S)
                if turn == 0:
                    _chill(record.contender)
                before = psutil.cpu_times()
                done = _one_pass(record, pipe, process, watched=turn == 0)
                after = psutil.cpu_times()
                record.passes.append(done)
                ours_s += done.cpu_s
                all_s += sum(after) - sum(before)
                busy_s += sum(after) - sum(before) - (after.idle - before.idle)
    return 100 * max(0.0, busy_s - ours_s) / max(all_s, 1e-9)


@contextmanager
def _children(records: Sequence[Record]) -> Iterator[list[tuple[Connection, SpawnProcess]]]:
    """Start a process for each contender; end them all."""
    context = multiprocessing.get_context("spawn")
    children = []
    try:
        for record in records:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(record.contender, theirs))
            process.start()
            theirs.close()
            children.append((ours, process))
        for record, (pipe, _) in zip(records, children, strict=True):
            _receive(record, pipe)
        yield children
    finally:
        for pipe, process in children:
            with suppress(OSError):  # it may be dead already
                pipe.send("stop")
            process.join(STOP_S)
            process.terminate()
            process.join()
            pipe.close()


def _one_pass(record: Record, pipe: Connection, process: SpawnProcess, *, watched: bool) -> Pass:
    """Have one pass made; watching the memory slows it, so only the warm-up is watched."""
    done = threading.Event()
    peak = [0]

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            peak[0] = max(peak[0], _memory(process.pid or 0))

    watcher = threading.Thread(target=watch, daemon=True)
    if watched:
        watcher.start()
    pipe.send("pass")
    try:
        result: Pass = _receive(record, pipe)
    finally:
        done.set()
        if watched:
            watcher.join()
    record.peak_bytes = max(record.peak_bytes, peak[0])
    return result


def _receive(record: Record, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError as error:
        raise ValueError(
            f"{record.contender.name}: its process ended; its own message stands above"
        ) from error


def _memory(pid: int) -> int:
    """Add up the memory of a process and its children; shared pages count once where known."""
    total = 0
    try:
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            memory = one.memory_full_info()
            total += getattr(memory, "pss", memory.uss)
    except psutil.Error:
        return 0
    return total


def _chill(contender: Contender) -> None:
    """Drop a contender's files from the page cache, where the platform lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    folder = contender.path / "train"
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Give the rows as lines of a Markdown table."""
    cells = [list(HEADS), *([str(row[name]) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that figures depend on."""
    from importlib.metadata import version

    packages = ("torch", "torchvision", "numpy", "numba", "simplejpeg", "pillow", "webdataset")
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _write(
    folder: Path, rows: Sequence[dict[str, Any]], records: Sequence[Record], others_pct: float
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine(),
        "others_pct": round(others_pct, 1),
        "rows": [
            row | {"passes_img_per_s": [round(rate, 1) for rate in record.rates]}
            for row, record in zip(rows, records, strict=True)
        ],
    }
    write_text_whole(folder / "bench.json", json.dumps(document, indent=1) + "\n")
    with (folder / "bench.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _plot(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Draw the rates as bars; gives what to add to the list of files."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return '; a picture too with the extra "plot"'
    figure = Figure(figsize=(8, 0.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    rates = [row["img_per_s"] for row in rows]
    spread = [
        [row["img_per_s"] - row["lowest"] for row in rows],
        [row["highest"] - row["img_per_s"] for row in rows],
    ]
    bars = axes.barh([row["contender"] for row in rows], rates, xerr=spread, color="#4477aa")
    axes.bar_label(bars, [f"{row['img_per_s']:.0f} (x{row['ratio']})" for row in rows], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("images a second, median; the lines span all passes")
    figure.savefig(folder / "bench.png", dpi=120)
    return ", bench.png"
