"""`RawLoader`: batches from a raw image folder, the way most people train. To compare with.

Files are listed and labelled as `prep` does it, read as torchvision's ImageFolder does it, and
batched by torch's DataLoader with the recipe's transforms. Order and random numbers come from
(seed, epoch, sample), so a resumed run continues exactly and the number of workers changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import transforms
from torchvision.datasets.folder import default_loader

from prep.files import shown
from prep.sources import Source, open_source
from train.batches import first_of_each

Place = tuple[int, int]


class RawLoader:
    """Batches of one split of a raw folder; the interface of `ShardLoader`.

    Args:
        root: Folder with `train/<wnid>/*` and `val`, or its listing.
        split: `train` (random crop and flip) or `val` (resize and centre crop).
        batch_size: Images per step on this rank.
        crop_size: Side of the crop, in pixels; or, for `train`, a function of the epoch.
        resize_size: Shorter side before the centre crop, in pixels; `val` only.
        samples_per_class: Only the first so many of each class.

    Raises:
        ValueError: A split is missing, `val` has other classes than `train`, or no labels.
    """

    def __init__(  # noqa: PLR0913 - the interface of ShardLoader
        self,
        root: Path | Source,
        split: str,
        *,
        batch_size: int,
        crop_size: int | Callable[[int], int],
        resize_size: int = 256,
        num_workers: int = 0,
        prefetch: int = 2,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        samples_per_class: int | None = None,
    ) -> None:
        source = open_source(root) if isinstance(root, Path) else root
        self.wnids = source.classes.wnids
        self.class_names = source.classes.readable()
        samples = _split_of(source, split)
        if samples_per_class is not None:
            labels = np.array([label for _, label in samples])
            samples = [samples[place] for place in first_of_each(labels, samples_per_class)]
        self.num_samples = len(samples)
        self.num_classes = len(self.wnids)
        self.num_damaged = 0
        self.identity = _hash_listing(source.root, samples)
        self._order = EpochOrder(len(samples), batch_size, split, seed, rank, world_size)
        self.steps_per_epoch = len(self._order)
        transform_of = _Transforms(split, crop_size, resize_size)
        self._loader: DataLoader[Any] = DataLoader(
            RawDataset(samples, transform_of, seed),
            batch_sampler=cast("Any", self._order),
            collate_fn=stack_batch,
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            persistent_workers=num_workers > 0,
            multiprocessing_context="spawn" if num_workers else None,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # leaves torch's global random state alone
        )

    def __len__(self) -> int:
        return self.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the batches of one epoch, from `start_step` on.

        Raises:
            ValueError: A file does not decode; this loader cannot step over it.
        """
        self._order.epoch, self._order.start_step = epoch, start_step
        try:
            yield from self._loader
        except ValueError as error:  # a worker's error carries its whole traceback as text
            line = str(error).strip().splitlines()[-1]
            raise ValueError(line.removeprefix("ValueError: ")) from error

    def close(self) -> None:
        """End the worker processes."""
        del self._loader

    def __enter__(self) -> RawLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RawDataset(Dataset[tuple[Tensor, int]]):
    """Decoded and cropped samples, addressed by (epoch, position) so that crops are repeatable."""

    def __init__(
        self, samples: list[tuple[str, int]], transform_of: Callable[[int], Any], seed: int
    ) -> None:
        self._samples, self._transform_of, self._seed = samples, transform_of, seed

    def __getitem__(self, place: Place) -> tuple[Tensor, int]:
        epoch, position = place
        path, label = self._samples[position]
        try:
            image = default_loader(path)
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(
                f"{shown(Path(path))}: does not decode ({error}); "
                "remove it, or pack the folder with prep shard"
            ) from error
        words = np.random.SeedSequence((self._seed, epoch, position)).generate_state(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words[0]))
            return self._transform_of(epoch)(image), label


@dataclass(frozen=True, slots=True)
class _Transforms:
    """Gives the transform of an epoch; picklable, for the workers."""

    split: str
    crop_size: int | Callable[[int], int]
    resize_size: int

    def __call__(self, epoch: int) -> transforms.Compose:
        size = self.crop_size(epoch) if callable(self.crop_size) else self.crop_size
        if self.split == "train":
            return train_transform(size)
        return val_transform(size, self.resize_size)


class EpochOrder(Sampler[list[Place]]):
    """Batches of (epoch, position) for one rank.

    Train: a permutation by (seed, epoch), the remainder of the global batch dropped. Val: the
    rank's contiguous share in order, its last batch short.
    """

    def __init__(
        self, num_samples: int, batch_size: int, split: str, seed: int, rank: int, world_size: int
    ) -> None:
        self._num_samples, self._batch_size, self._split = num_samples, batch_size, split
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self.epoch = 0
        self.start_step = 0

    def __len__(self) -> int:
        return len(self._batches(0))

    def __iter__(self) -> Iterator[list[Place]]:
        for batch in self._batches(self.epoch)[self.start_step :]:
            yield [(self.epoch, int(position)) for position in batch]

    def _batches(self, epoch: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        size, num_samples = self._batch_size, self._num_samples
        if self._split == "train":
            order = np.random.default_rng((self._seed, epoch)).permutation(num_samples)
            num_steps = num_samples // (size * self._world_size)
            kept = order[: num_steps * size * self._world_size]
            return list(kept.reshape(num_steps, self._world_size, size)[:, self._rank])
        start, stop = (num_samples * r // self._world_size for r in (self._rank, self._rank + 1))
        return [np.arange(s, min(s + size, stop)) for s in range(start, stop, size)]


def train_transform(crop_size: int) -> transforms.Compose:
    """Random crop of 8 to 100 % of the area, flip, uint8: normalised later, on the device."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(crop_size),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )


def val_transform(crop_size: int, resize_size: int) -> transforms.Compose:
    """Shorter side to `resize_size`, centre crop, uint8."""
    return transforms.Compose(
        [
            transforms.Resize(resize_size),
            transforms.CenterCrop(crop_size),
            transforms.PILToTensor(),
        ]
    )


def stack_batch(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack images in channels_last memory, and labels."""
    images = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    return images.contiguous(memory_format=torch.channels_last), labels


def _split_of(source: Source, split: str) -> list[tuple[str, int]]:
    if split not in source.splits:
        raise ValueError(f"{shown(source.root / split)}: holds no image; --src needs train and val")
    return [(str(source.root / image.path), image.label) for image in source.splits[split]]


def _hash_listing(root: Path, samples: list[tuple[str, int]]) -> str:
    digest = hashlib.sha256()
    for path, label in samples:
        digest.update(f"{Path(path).relative_to(root).as_posix()} {label}\n".encode())
    return digest.hexdigest()
