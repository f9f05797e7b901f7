"""Figures of the README that no command of the product prints.

python tests/measure.py pack SRC     cost of packing against a plain decode; workers; memory
python tests/measure.py index        a made-up index of 1,280,000 samples: time and memory
python tests/measure.py decode SHARDS    what the loader's steps cost an image
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import simplejpeg

from helpers import fabricate_set
from prep.index import load_index
from prep.jpeg import cut_region
from prep.pack import compile_kernels, pack, pack_task
from prep.plan import WORK_FOLDER, PackSettings, plan
from prep.resize import Span, resize
from prep.sources import Source, SourceImage, open_source

TURNS = 7
COPIES = 5
"""The source is packed so many times over where workers are compared, for a steady rate."""


def spread(values: Sequence[float]) -> str:
    """Give the median and the range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def measure_pack(src: Path) -> None:
    """Print the cost of packing an image over a plain decode of it, in turn, on one core."""
    compile_kernels()
    source = open_source(src)
    with tempfile.TemporaryDirectory() as folder:
        tasks = plan(source, Path(folder), PackSettings(shard_bytes=8_000_000))
        for task in tasks:
            task.folder.mkdir(exist_ok=True)
        (Path(folder) / WORK_FOLDER).mkdir()
        num_images = sum(len(task.images) for task in tasks)
        ratios, packing, decoding = [], [], []
        for turn in range(TURNS + 1):
            decode_s = pack_s = 0.0
            for task in tasks:
                data = [(source.root / image.path).read_bytes() for image in task.images]
                decode_s += cpu_seconds(partial(decode_all, data))
                pack_s += cpu_seconds(partial(pack_task, task, no_tick))
            if turn:  # the first turn warms up
                ratios.append(pack_s / decode_s)
                packing.append(1000 * pack_s / num_images)
                decoding.append(1000 * decode_s / num_images)
        packed = sum(split_bytes(Path(folder)))
    print(f"{num_images} images, {TURNS} turns, processor time of one thread")
    print(f"plain simplejpeg decode, ms an image: {spread(decoding)}")
    print(f"packing whole, ms an image:           {spread(packing)}")
    print(f"packing over decode:                  {spread(ratios)}")
    total = sum(image.num_bytes for image in images_of(source))
    print(f"bytes of the shards over the source:  {packed / total:.4f}")
    measure_workers(source)


def decode_all(data: list[bytes]) -> None:
    for jpeg in data:
        simplejpeg.decode_jpeg(jpeg)


def no_tick(num_bytes: int, *, rejected: bool = False) -> None:
    """Count nothing."""


def cpu_seconds(function: Callable[[], object]) -> float:
    """Give the processor time of a call."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def images_of(source: Source) -> list[SourceImage]:
    return [image for images in source.splits.values() for image in images]


def split_bytes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*.tar")]


def measure_workers(source: Source) -> None:
    """Print the rate of two workers over one, in turn, and the largest memory of a worker."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        many = copied(source, Path(folder) / "source")
        for turn in range(3):
            for workers in (1, 2):
                dst = Path(folder) / f"{turn}-{workers}"
                rate, memory = steady_rate(many, dst, workers)
                rates[workers].append(rate)
                peak = max(peak, memory)
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    print(f"packing, img/s, one worker:           {spread(rates[1])}")
    print(f"packing, img/s, two workers:          {spread(rates[2])}")
    print(f"two workers over one:                 {spread(ratios)}")
    print(f"largest memory of a worker:           {peak / 1e6:.0f} MB resident")


def copied(source: Source, root: Path) -> Source:
    """Copy a source several times over."""
    for image in images_of(source):
        data = (source.root / image.path).read_bytes()
        for copy in range(COPIES):
            path = root / image.path
            path = path.with_name(f"{copy}_{path.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return open_source(root)


def steady_rate(source: Source, dst: Path, workers: int) -> tuple[float, int]:
    """Give img/s between the first and the last tenth, and the largest memory of a worker."""
    seen: list[tuple[float, int]] = []
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            with suppress(psutil.Error):
                for child in psutil.Process().children(recursive=True):
                    if "spawn_main" in " ".join(child.cmdline()):
                        peak[0] = max(peak[0], child.memory_info().rss)

    def show(num_done: int, _bytes: int, _rejected: int, /) -> None:
        seen.append((time.perf_counter(), num_done))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        pack(source, dst, PackSettings(shard_bytes=8_000_000), workers, show)
    finally:
        done.set()
        watcher.join()
    total = len(images_of(source))
    start = next(point for point in seen if point[1] >= total / 10)
    stop = next(point for point in seen if point[1] >= total * 9 / 10)
    return (stop[1] - start[1]) / (stop[0] - start[0]), peak[0]


def measure_index() -> None:
    """Print the time to load a made-up index of ImageNet's size, and its memory."""
    from train.data import ShardLoader  # not above: pack workers import this file, and no torch

    with tempfile.TemporaryDirectory() as folder:
        shards = fabricate_set(Path(folder) / "set", num_shards=1280, samples_per_shard=1000)
        process = psutil.Process()
        start = time.perf_counter()
        index = load_index(shards)
        print(f"load the index: {time.perf_counter() - start:.3f} s")
        table = index.split("train").samples.nbytes
        print(f"table: {table / 1e6:.1f} MB (memory-mapped)")
        del index
        start = time.perf_counter()
        with ShardLoader(shards, "train", batch_size=256) as loader:
            print(f"open the loader: {time.perf_counter() - start:.3f} s")
            for epoch in range(3):
                start = time.perf_counter()
                share = loader._maker.share(epoch)
                seconds = time.perf_counter() - start
                print(
                    f"order epoch {epoch} of {len(share.ids)} samples: {seconds:.3f} s, "
                    f"resident {process.memory_info().rss / 1e6:.0f} MB"
                )


def measure_decode(shards: Path) -> None:
    """Print what each step of the loader's decoding costs, and the limit that bounds it."""
    from train.decode import NUM_UNIFORMS, Decoder
    from train.order import uniforms

    index = load_index(shards)
    samples = index.split("train").samples
    data = []
    for row in samples:
        with index.shard_path("train", int(row["shard"])).open("rb") as file:
            file.seek(int(row["offset"]))
            data.append(np.frombuffer(file.read(int(row["length"])), np.uint8))
    numbers = uniforms(0, 0, np.arange(len(data)), NUM_UNIFORMS).tolist()
    out, scratch = np.empty((224, 224, 3), np.uint8), np.empty(4_000_000, np.uint8)
    decoder = Decoder()
    names = ("whole train sample", "cut", "region decode", "resize", "full decode", "crop's area")
    costs: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(TURNS + 1):
        sums = dict.fromkeys(names, 0.0)
        for jpeg, row in zip(data, numbers, strict=True):
            for name, seconds in sample_costs(decoder, jpeg, row, out, scratch).items():
                sums[name] += seconds
        for name in names if turn else ():
            costs[name].append(1000 * sums[name] / len(data))
    for name in names:
        print(f"{name + ', ms':24s}{spread(costs[name])}")
    shares = [a / b for a, b in zip(costs["crop's area"], costs["whole train sample"], strict=True)]
    print(f"share of the limit:     {spread(shares)}")


def sample_costs(
    decoder: Any,
    jpeg: np.ndarray[tuple[int], np.dtype[np.uint8]],
    row: list[float],
    out: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]],
    scratch: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> dict[str, float]:
    """Time one sample's steps; the limit is a full decode, scaled to the crop's share of it."""
    from train.decode import train_box

    pixels = simplejpeg.decode_jpeg(jpeg)
    height, width = pixels.shape[:2]
    box = train_box(height, width, row)
    region = cut_region(jpeg, box, scratch)
    part = scratch[: region.size].copy() if region else jpeg
    top, left = (region.top, region.left) if region else (box.top, box.left)
    small = simplejpeg.decode_jpeg(part)
    rows, columns = Span(top, box.height, 224, 0), Span(left, box.width, 224, 0)
    full = cpu_seconds(lambda: simplejpeg.decode_jpeg(jpeg))
    return {
        "whole train sample": cpu_seconds(lambda: decoder.train(jpeg, row, out)),
        "cut": cpu_seconds(lambda: cut_region(jpeg, box, scratch)),
        "region decode": cpu_seconds(lambda: simplejpeg.decode_jpeg(part)),
        "resize": cpu_seconds(lambda: resize(small, rows, columns, out)),
        "full decode": full,
        "crop's area": full * box.height * box.width / (height * width),
    }


def main(arguments: Sequence[str]) -> int:
    """Run one measurement."""
    match list(arguments):
        case ["pack", src]:
            measure_pack(Path(src))
        case ["index"]:
            measure_index()
        case ["decode", shards]:
            measure_decode(Path(shards))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
