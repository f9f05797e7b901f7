"""`ShardLoader`: batches from packed shards. `ShardDataset`: single samples, for any loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from prep.files import local_path, shown
from prep.shards import ShardError
from train.batches import BatchMaker, Decoded, LoaderSettings
from train.config import default_threads
from train.dataset import ShardDataset

__all__ = ["ShardDataset", "ShardLoader", "default_threads"]

logger = logging.getLogger(__name__)

MAX_DAMAGED_SHARE = 0.01
MIN_DAMAGED_LIMIT = 10
"""More damaged samples in one epoch than both limits allow end the run: the disk is going."""


class ShardLoader:
    """Gives the batches of a split of a packed set, epoch by epoch.

    Training: each sample at most once an epoch, the remainder of the global batch left out, random
    resized crops and flips. Evaluation (`val`): each sample exactly once over all ranks, resize and
    centre crop, never augmented. Order and pixels depend on `seed`, the epoch, `batch_size` and
    `world_size` only, not on threads, workers or what was read before.

    A sample that no longer decodes is counted in `num_damaged`, named in the log and stepped over:
    in training another sample of its batch takes its place, in evaluation its batch is shorter.

    Args:
        shards: Folder that `prep shard` wrote.
        split: `train` or `val`.
        batch_size: Samples a step on this rank.
        crop_size: Side of the images given, in pixels; or a function that gives it for an epoch
            (picklable with `num_workers`).
        resize_size: Shorter side before the centre crop of evaluation; default 256/224 of
            `crop_size`.
        num_threads: Decode threads, over all workers; default: one a core, at most 8.
        num_workers: Worker processes; 0 decodes in threads of this process.
        prefetch: Batches that are ready or under way.
        seed: Of order and crops.
        rank: Of this process.
        world_size: Number of ranks.
        window_mb: Memory for packed bytes, in MB: samples are permuted inside half of it while the
            other half is being read.
        samples_per_class: Only the first so many samples of each class; None takes all.

    Raises:
        ShardError: The set is not whole.
        ValueError: A number is out of its range, or training has less than one batch a rank.
    """

    def __init__(  # noqa: PLR0913 - the public interface: one keyword a setting
        self,
        shards: str | Path,
        split: str,
        *,
        batch_size: int,
        crop_size: int | Callable[[int], int] = 224,
        resize_size: int | None = None,
        num_threads: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        window_mb: int = 1024,
        samples_per_class: int | None = None,
    ) -> None:
        self.settings = LoaderSettings(
            shards=local_path(shards),
            split=split,
            batch_size=batch_size,
            crop_size=crop_size,
            resize_size=resize_size,
            num_threads=default_threads() if num_threads is None else num_threads,
            num_workers=num_workers,
            prefetch=prefetch,
            seed=seed,
            rank=rank,
            world_size=world_size,
            window_mb=window_mb,
            samples_per_class=samples_per_class,
        )
        self._maker = BatchMaker(self.settings)
        self._workers = _Workers(self.settings) if num_workers else None
        self.num_damaged = 0

    @property
    def num_samples(self) -> int:
        """Count the samples of the split, over all ranks."""
        return len(self._maker.samples)

    @property
    def wnids(self) -> tuple[str, ...]:
        """Give the classes; a label is a place in it."""
        return self._maker.wnids

    @property
    def class_names(self) -> tuple[str, ...]:
        """Give readable names in label order; the wnid where there is none."""
        return self._maker.class_names

    @property
    def num_classes(self) -> int:
        """Count the classes."""
        return len(self.wnids)

    @property
    def steps_per_epoch(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self._maker.num_steps

    def __len__(self) -> int:
        """Count the batches of an epoch on this rank."""
        return self.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the batches of one epoch.

        Args:
            epoch: Counted from 0; decides the order and the crops.
            start_step: Batches to leave out at the start, to continue where a run stopped.

        Yields:
            images: `(N, 3, S, S)` uint8 in channels_last memory, pinned when CUDA is there.
            labels: `(N,)` int64.

        Raises:
            ShardError: Too many samples are damaged.
            ValueError: `start_step` is beyond the epoch.
        """
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step must be in 0..{self.steps_per_epoch}, got {start_step}")
        source = self._workers or self._maker
        limit = max(MIN_DAMAGED_LIMIT, MAX_DAMAGED_SHARE * self.num_samples)
        damaged_before = self.num_damaged
        for images, labels, damaged in source.batches(epoch, start_step):
            for line in damaged:
                logger.warning("stepped over a damaged sample: %s", line)
            self.num_damaged += len(damaged)
            if self.num_damaged - damaged_before > limit or not len(images):
                raise ShardError(
                    f"{shown(self.settings.shards)}: {self.num_damaged - damaged_before} damaged "
                    f"samples in epoch {epoch}, the last is {damaged[-1]}: run "
                    "`prep verify --shards`, then delete the damaged shards and run `prep shard`"
                )
            yield images, labels

    def close(self) -> None:
        """End the threads and worker processes."""
        self._maker.close()
        if self._workers:
            self._workers.close()

    def __enter__(self) -> ShardLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Workers:
    """Makes the batches in worker processes, started once and kept over the epochs."""

    def __init__(self, settings: LoaderSettings) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._now = context.Array("q", 2)
        self._loader: DataLoader[Decoded] = DataLoader(
            _WorkerBatches(settings, self._now),
            batch_size=None,
            num_workers=settings.num_workers,
            prefetch_factor=max(1, settings.prefetch // settings.num_workers),
            pin_memory=torch.cuda.is_available(),
            persistent_workers=True,
            multiprocessing_context=context,
        )

    def batches(self, epoch: int, start_step: int) -> Iterator[Decoded]:
        """Give the batches of an epoch in order: the workers take turns."""
        self._now[:] = [epoch, start_step]
        yield from self._loader

    def close(self) -> None:
        """End the processes."""
        self._loader._iterator = None  # its destructor ends them and waits


class _WorkerBatches(IterableDataset[Decoded]):
    """Lives in each worker; gives every n-th batch of the epoch that is on."""

    def __init__(self, settings: LoaderSettings, now: SynchronizedArray[int]) -> None:
        self._settings = settings
        self._now = now
        self._maker: BatchMaker | None = None

    def __iter__(self) -> Iterator[Decoded]:
        worker = get_worker_info()
        if worker is None:
            raise RuntimeError("the batches of a worker were asked for outside of one")
        if self._maker is None:
            threads = max(1, self._settings.num_threads // worker.num_workers)
            self._maker = BatchMaker(replace(self._settings, num_threads=threads))
        epoch, start_step = self._now[:]
        yield from self._maker.batches(epoch, start_step, worker.id, worker.num_workers)
