"""Images, sources and sets that the tests make for themselves; `from helpers import ...`."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from prep.execute import Show, Tick
from prep.index import SAMPLES_FILE, SetIndex, SplitIndex, save_index, save_table
from prep.labels import ClassTable
from prep.pack import pack
from prep.plan import PackSettings
from prep.shards import SAMPLE_DTYPE, ShardInfo, ShardWriter, shard_name
from prep.sources import open_source

PROJECT = Path(__file__).parent.parent
WNIDS = ("n01440764", "n02102040", "n02979186", "n03000684")


def pixels(seed: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Give a smooth picture with some detail; each seed has its own hue."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-12, 13, (height, width, 3))
    return (np.asarray(smooth).astype(int) + noise).clip(0, 255).astype(np.uint8)


def encoded(array: NDArray[np.uint8], kind: str = "JPEG", **options: Any) -> bytes:
    """Encode a picture with Pillow."""
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def jpeg(seed: int, height: int = 48, width: int = 64, **options: Any) -> bytes:
    """Give the bytes of a small JPEG."""
    return encoded(pixels(seed, height, width), **options)


def make_source(root: Path, num_train: int = 4, num_val: int = 2, num_classes: int = 4) -> Path:
    """Make a source with class folders for both splits."""
    for split, count in (("train", num_train), ("val", num_val)):
        for label, wnid in enumerate(WNIDS[:num_classes]):
            folder = root / split / wnid
            folder.mkdir(parents=True)
            for number in range(count):
                name = f"{wnid}_{split}_{number}.JPEG"
                (folder / name).write_bytes(jpeg(1000 * label + number + 500 * (split == "val")))
    return root


def quiet(num_done: int, num_bytes: int, num_rejected: int) -> None:
    """Show nothing."""


def pack_folder(src: Path, dst: Path, **settings: Any) -> Path:
    """Pack in this process; gives `dst`."""
    show: Show = quiet
    pack(open_source(src), dst, PackSettings(**settings), 1, show)
    return dst


def make_shards(
    dst: Path, counts: tuple[int, ...], split: str = "train", num_classes: int = 4
) -> Path:
    """Write a whole set whose one split has shards of exactly these sizes."""
    (dst / split).mkdir(parents=True)
    infos, rows = [], []
    number = 0
    for shard_index, count in enumerate(counts):
        with ShardWriter(dst / split / shard_name(shard_index)) as writer:
            for _ in range(count):
                writer.add(f"{split}{number:05d}", jpeg(number), number % num_classes)
                number += 1
        if writer.info is not None:
            infos.append(writer.info)
            rows.append(writer.rows())
    samples, sha256 = save_table(dst / split / SAMPLES_FILE, rows)
    entry = SplitIndex(shards=tuple(infos), samples=samples, samples_sha256=sha256)
    wnids = tuple(f"n{label:08d}" for label in range(num_classes))
    save_index(SetIndex(root=dst, classes=ClassTable(wnids=wnids), splits={split: entry}))
    return dst


def fabricate_set(dst: Path, num_shards: int, samples_per_shard: int) -> Path:
    """Write the index of a large set whose shards do not exist."""
    num_samples = num_shards * samples_per_shard
    table = np.zeros(num_samples, SAMPLE_DTYPE)
    offsets = np.arange(samples_per_shard, dtype=np.uint64) * np.uint64(110_000)
    table["offset"] = np.tile(offsets, num_shards)
    table["length"] = 100_000
    table["label"] = np.arange(num_samples) % 1000
    (dst / "train").mkdir(parents=True)
    samples, sha256 = save_table(dst / "train" / SAMPLES_FILE, np.split(table, num_shards))
    shards = tuple(
        ShardInfo(
            name=shard_name(number),
            num_samples=samples_per_shard,
            num_bytes=110_000 * samples_per_shard,
            sha256="0" * 64,
        )
        for number in range(num_shards)
    )
    classes = ClassTable(wnids=tuple(f"n{label:08d}" for label in range(1000)))
    split = SplitIndex(shards=shards, samples=samples, samples_sha256=sha256)
    save_index(SetIndex(root=dst, classes=classes, splits={"train": split}))
    return dst


def array_of(image: Image.Image) -> NDArray[np.uint8]:
    """Give a picture's `(h, w, 3)` pixels; a transform that worker processes can import."""
    return np.array(image)


def decoded(data: bytes) -> NDArray[np.uint8]:
    """Decode a JPEG to RGB; any complaint of the decoder is an error."""
    array: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    return array


def with_segments(data: bytes, *segments: tuple[int, bytes]) -> bytes:
    """Insert marker segments just behind the start marker of a JPEG."""
    inserted = b"".join(
        bytes((0xFF, marker)) + (len(body) + 2).to_bytes(2, "big") + body
        for marker, body in segments
    )
    return data[:2] + inserted + data[2:]


def heavy_jpeg(seed: int, data: bytes) -> bytes:
    """Blow a JPEG up by 100 kB of comments: large for the plan of the shards, quick to decode."""
    return with_segments(data, *[(0xFE, seed.to_bytes(4, "big") + bytes(49_996))] * 2)


def make_heavy_source(root: Path, num_train: int, num_val: int, side: int = 64) -> Path:
    """Make a source of four classes whose files of 100 kB fill several shards of 1 MB."""
    picture = jpeg(0, side, side, quality=40)
    for split, count in (("train", num_train), ("val", num_val)):
        for number in range(count):
            wnid = WNIDS[number % len(WNIDS)]
            path = root / split / wnid / f"{wnid}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(heavy_jpeg(number, picture))
    return root


def snapshot(folder: Path) -> dict[str, str]:
    """Give the sha256 of each file below a folder; names only of files another process holds."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def environment(**changes: str) -> dict[str, str]:
    """Give the environment for a child process that finds our packages."""
    return {**os.environ, "PYTHONPATH": str(PROJECT), **changes}


def pool_workers(pid: int) -> list[psutil.Process]:
    """Give the worker processes of a running program, without Python's own helper process."""
    children = psutil.Process(pid).children(recursive=True)
    if os.name == "nt":
        return children
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def run_prep(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the program as a user does, and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "prep", *map(str, arguments)],
        env=environment() if env is None else env,
        cwd=cwd,
        capture_output=True,
        timeout=60,
        check=False,
    )


def judge_slowly(task: float, tick: Tick) -> float:
    """Count one image after some seconds; a task for pools."""
    time.sleep(task)
    tick(1000, rejected=task == 0)
    return task


def die_at_once(task: int, tick: Tick) -> int:
    """Kill the worker process as a task whose number is odd."""
    if task % 2:
        os._exit(9)
    return judge_many(task, tick)


def judge_many(task: int, tick: Tick) -> int:
    """Count many images with a little wait at each."""
    for _ in range(task):
        time.sleep(0.02)
        tick(1)
    return task


def refuse_task(task: int, tick: Tick) -> int:
    """Fail with the first task, and count many images in all others."""
    if task == 0:
        raise OSError(28, "No space left on device", "E:/x")
    return judge_many(task, tick)


def interpreter_state(task: int, tick: Tick) -> tuple[int, list[str]]:
    """Give the process id and the modules that a worker has loaded."""
    time.sleep(task / 10)
    tick(1)
    return os.getpid(), sorted(sys.modules)
