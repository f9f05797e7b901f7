"""The loaders that `train bench` compares; each runs in a process of its own and is told when.

The raw folder is the usual way: torchvision's ImageFolder, Pillow, ToTensor and Normalize, and a
DataLoader with pinned memory, persistent workers and prefetch 2. The webdataset pipeline is the one
of its documentation. All draw RandomResizedCrop and flip, and give whole batches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psutil

PREFETCH: Final = 2
SHUFFLE_BUFFER: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One loader and its settings."""

    kind: str
    """`raw folder`, `webdataset`, `shardlane`, or one of `train.peers`."""
    path: Path
    """The raw folder, or the packed set."""
    num_workers: int
    """Processes, or decode threads where the loader has those."""
    batch_size: int
    crop_size: int
    num_images: int
    """Images of one pass."""

    @property
    def name(self) -> str:
        """Give the row's name in the table."""
        what = "threads" if self.kind in ("shardlane", "ffcv", "dali") else "workers"
        return f"{self.kind}, {self.num_workers} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass over the images took."""

    num_images: int
    seconds: float
    first_batch_s: float
    """From the start of the pass; in the first pass from the start of building the loader."""
    cpu_s: float
    """Processor time of the process and its workers."""

    @property
    def img_per_s(self) -> float:
        """Give the throughput."""
        return self.num_images / self.seconds


def serve(contender: Contender, pipe: Connection) -> None:
    """Live in a child process: build the loader, then make a pass whenever told to."""
    import torch  # the import is not what is measured

    torch.set_num_threads(1)
    passes: Iterable[Any] | None = None
    pipe.send("ready")
    while pipe.recv() == "pass":
        started, cpu = time.perf_counter(), _cpu_seconds()
        passes = passes if passes is not None else _build(contender)
        first_batch_s, num_images = 0.0, 0
        for images, _ in _batches(passes, contender.num_images):
            first_batch_s = first_batch_s or time.perf_counter() - started
            num_images += len(images)
        pipe.send(
            Pass(
                num_images=num_images,
                seconds=time.perf_counter() - started,
                first_batch_s=first_batch_s,
                cpu_s=_cpu_seconds() - cpu,
            )
        )


def _build(contender: Contender) -> Iterable[Any]:
    if contender.kind in BUILDERS:
        return BUILDERS[contender.kind](contender)
    from train.peers import PEERS

    return PEERS[contender.kind](contender)


def _batches(passes: Iterable[Any], num_images: int) -> Iterable[Any]:
    """Give batches until there are `num_images` of them or the pass ends."""
    given = 0
    for batch in passes:
        yield batch
        given += len(batch[0])
        if given >= num_images:
            return


def _cpu_seconds() -> float:
    """Add up the processor time of this process and its children, dead ones included."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _transform(crop_size: int) -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(crop_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def _raw_folder(contender: Contender) -> Iterable[Any]:
    import torch
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder

    folder = ImageFolder(str(contender.path / "train"), _transform(contender.crop_size))
    chosen = torch.randperm(len(folder), generator=torch.Generator().manual_seed(0))
    return DataLoader(
        Subset(folder, chosen[: contender.num_images].tolist()),
        batch_size=contender.batch_size,
        shuffle=True,
        num_workers=contender.num_workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=True,
        prefetch_factor=PREFETCH,
    )


def _webdataset(contender: Contender) -> Iterable[Any]:
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted((contender.path / "train").glob("*.tar"))
    dataset = (
        webdataset.WebDataset(
            [path.as_posix() for path in shards], shardshuffle=len(shards), detshuffle=True
        )
        .shuffle(SHUFFLE_BUFFER)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(_transform(contender.crop_size), int)
        .with_epoch(-(-contender.num_images // contender.num_workers))
    )
    return DataLoader(
        dataset,
        batch_size=contender.batch_size,
        num_workers=min(contender.num_workers, len(shards)),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=True,
        prefetch_factor=PREFETCH,
    )


class _Epochs:
    """Our loader as something to iterate again and again, another epoch each time."""

    def __init__(self, contender: Contender) -> None:
        from train.data import ShardLoader

        self._loader = ShardLoader(
            contender.path,
            "train",
            batch_size=contender.batch_size,
            crop_size=contender.crop_size,
            num_threads=contender.num_workers,
            prefetch=PREFETCH,
        )
        self._numbers = itertools.count()

    def __iter__(self) -> Any:
        return self._loader.epoch(next(self._numbers))


BUILDERS = {"raw folder": _raw_folder, "webdataset": _webdataset, "shardlane": _Epochs}
