"""The plan of a packing: which image goes into which shard, fixed before anything is written.

It depends only on the source, the settings and the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prep.images import ImageSettings
from prep.shards import keys_for
from prep.sources import Source, SourceImage

PLAN_VERSION = 1
"""Raise it when the same source would give other bytes than before."""
WORK_FOLDER = ".prep"
MIN_SHARD_BYTES = 4_000_000
MIN_SHARDS = 8
"""A small split is cut in about so many shards, so that workers and windows have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """What decides the bytes of a packed set, beside its source."""

    shard_bytes: int = 128_000_000
    seed: int = 0
    image: ImageSettings = field(default_factory=ImageSettings)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1_000_000 <= self.shard_bytes <= 16_000_000_000:
            raise ValueError(
                f"--shard-mb must be in 1..16000, got {self.shard_bytes / 1_000_000:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """All that a worker needs to write one shard."""

    root: Path
    folder: Path
    """Where the shard goes; the folder of its split."""
    split: str
    shard_index: int
    images: tuple[SourceImage, ...]
    keys: tuple[str, ...]
    settings: ImageSettings

    def digest(self) -> str:
        """Name the task by its content: equal digests give equal shards."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(repr((PLAN_VERSION, self.split, self.shard_index, self.settings)).encode())
        for image, key in zip(self.images, self.keys, strict=True):
            row = f"{image.path}\0{image.label}\0{image.num_bytes}\0{key}\n"
            hasher.update(row.encode("utf-8", "surrogateescape"))
        return hasher.hexdigest()

    def result_file(self) -> Path:
        """Give the place of the task's result file."""
        return self.folder.parent / WORK_FOLDER / f"{self.split}-{self.shard_index:06d}.json"


def plan_shards(sizes: Sequence[int], shard_bytes: int) -> list[slice]:
    """Cut images, in order, into shards of about equal size, none of them empty.

    Args:
        sizes: Bytes of each image's file.
        shard_bytes: Aimed-at size; a split with less than `MIN_SHARDS` of them gets smaller ones.
    """
    ends = np.cumsum(np.maximum(sizes, 1))
    total = int(ends[-1])
    aim = min(shard_bytes, max(MIN_SHARD_BYTES, total // MIN_SHARDS))
    num_shards = min(-(-total // aim), len(sizes))
    cuts = np.searchsorted(ends, np.arange(1, num_shards) * (total / num_shards), side="right")
    bounds = np.unique(np.concatenate([[0], cuts, [len(sizes)]])).tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def shuffled(images: Sequence[SourceImage], seed: int) -> list[SourceImage]:
    """Give the images in an order that depends on seed and paths only.

    A hash decides rather than a random generator, so that the order outlives library versions.
    """
    return sorted(images, key=lambda image: (_place(image.path, seed), image.path))


def _place(path: str, seed: int) -> bytes:
    text = f"{seed}\0{path}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=12).digest()


def plan(source: Source, dst: Path, settings: PackSettings) -> list[ShardTask]:
    """Give the tasks that pack a source, in a fixed order."""
    tasks = []
    for split, listed in source.splits.items():
        images = shuffled(listed, settings.seed)
        keys = keys_for([image.path for image in images])
        cuts = plan_shards([image.num_bytes for image in images], settings.shard_bytes)
        tasks += [
            ShardTask(
                root=source.root,
                folder=dst / split,
                split=split,
                shard_index=shard_index,
                images=tuple(images[cut]),
                keys=tuple(keys[cut]),
                settings=settings.image,
            )
            for shard_index, cut in enumerate(cuts)
        ]
    return tasks


def describe(tasks: Sequence[ShardTask], settings: PackSettings) -> dict[str, Any]:
    """Describe a plan so that two can be compared and the difference told."""
    digests = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digests.update(task.digest().encode())
    return {
        "version": PLAN_VERSION,
        **settings_document(settings),
        "num_images": sum(len(task.images) for task in tasks),
        "num_source_bytes": sum(image.num_bytes for task in tasks for image in task.images),
        "num_shards": len(tasks),
        "images_digest": digests.hexdigest(),
    }


def settings_document(settings: PackSettings) -> dict[str, Any]:
    """Give the settings under the names of their flags."""
    return {
        "shard_mb": settings.shard_bytes / 1_000_000,
        "seed": settings.seed,
        **asdict(settings.image),
    }
