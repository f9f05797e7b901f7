"""The batches of one process: read by one thread, decoded by several, given in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prep.index import load_index
from prep.shards import member_name
from train.decode import NUM_UNIFORMS, Decoder
from train.order import (
    Ids,
    Share,
    eval_share,
    num_train_steps,
    require_rank,
    train_order,
    train_share,
    uniforms,
)
from train.reader import NUM_WINDOWS, Window, WindowReader

CHUNK = 8
"""Samples that a thread decodes in one go."""

Decoded = tuple[Tensor, Tensor, list[str]]
"""Images, labels, and a line for each damaged sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """What decides the batches of a loader, and who makes them; see `ShardLoader`."""

    shards: Path
    split: str
    batch_size: int
    crop_size: int | Callable[[int], int]
    """Pixels, or a function of the epoch."""
    resize_size: int | None
    """Pixels; None is 256/224 of the crop."""
    num_threads: int
    num_workers: int
    prefetch: int
    seed: int
    rank: int
    world_size: int
    window_mb: int
    samples_per_class: int | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        lowest = {"num_workers": 0, "seed": 0} | dict.fromkeys(
            ("batch_size", "num_threads", "prefetch", "window_mb"), 1
        )
        lowest |= dict.fromkeys(("crop_size", "resize_size", "samples_per_class"), 1)
        for name, low in lowest.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if self.split not in ("train", "val"):
            raise ValueError(f"split must be 'train' or 'val', got {self.split!r}")
        require_rank(self.rank, self.world_size)

    def crop_size_at(self, epoch: int) -> int:
        """Give the side of the images of an epoch, in pixels."""
        return self.crop_size(epoch) if callable(self.crop_size) else self.crop_size

    def resize_size_at(self, epoch: int) -> int:
        """Give the shorter side before the centre crop of evaluation, in pixels."""
        if self.resize_size is None:
            return round(self.crop_size_at(epoch) * 256 / 224)
        return self.resize_size

    @property
    def is_train(self) -> bool:
        """Tell whether samples are shuffled and augmented."""
        return self.split == "train"


@dataclass(slots=True)
class _Batch:
    """A batch under way."""

    images: Tensor
    labels: Tensor
    slots: NDArray[np.uint8]
    """The memory of `images`, `(N, S, S, 3)`."""
    resize_size: int
    """Shorter side before the centre crop of evaluation."""
    chunks: list[Future[list[tuple[int, str]]]] = field(default_factory=list)
    """Each gives the places in the batch that it could not fill, and why."""


class BatchMaker:
    """Reads and decodes the batches of one split for one rank, or for one worker of it."""

    def __init__(self, settings: LoaderSettings) -> None:
        index = load_index(settings.shards)
        split = index.split(settings.split)
        self.wnids = index.classes.wnids
        self.class_names = index.classes.readable()
        self.samples = split.samples.view(np.ndarray)  # a memmap's own indexing is slow
        if settings.samples_per_class is not None:
            self.samples = split.samples[
                first_of_each(split.samples["label"], settings.samples_per_class)
            ]
        self._settings = settings
        self._shard_of = np.ascontiguousarray(self.samples["shard"])
        self._shard_bytes = np.array([shard.num_bytes for shard in split.shards], np.int64)
        self._paths = [
            index.shard_path(settings.split, number) for number in range(len(split.shards))
        ]
        self._pool: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self.num_steps = self._count_steps()

    def _count_steps(self) -> int:
        s = self._settings
        if s.is_train:
            return num_train_steps(len(self.samples), s.batch_size, s.world_size)
        return self.share(0).num_steps

    def share(self, epoch: int) -> Share:
        """Give what this rank reads in an epoch."""
        s = self._settings
        window_bytes = s.window_mb * 1_000_000 // NUM_WINDOWS
        if not s.is_train:
            return eval_share(
                self._shard_of,
                self._shard_bytes,
                window_bytes=window_bytes,
                batch_size=s.batch_size,
                rank=s.rank,
                world_size=s.world_size,
            )
        order = train_order(
            self._shard_of, self._shard_bytes, window_bytes=window_bytes, seed=s.seed, epoch=epoch
        )
        return train_share(order, batch_size=s.batch_size, rank=s.rank, world_size=s.world_size)

    def batches(
        self, epoch: int, start_step: int, worker: int = 0, num_workers: int = 1
    ) -> Iterator[Decoded]:
        """Give the batches of an epoch from a step on, or every n-th of them for one worker."""
        share = self.share(epoch).from_step(start_step).every(num_workers, worker)
        if not len(share.ids):
            return
        reader = WindowReader(self._paths, self.samples, share)
        pending: list[_Batch] = []
        try:
            for batch in self._submitted(share, reader, epoch):
                pending.append(batch)
                if len(pending) > self._settings.prefetch:
                    yield self._finished(pending.pop(0))
            while pending:
                yield self._finished(pending.pop(0))
        finally:
            for batch in pending:
                for chunk in batch.chunks:
                    chunk.cancel()
            reader.close()

    def _submitted(self, share: Share, reader: WindowReader, epoch: int) -> Iterator[_Batch]:
        """Hand the batches of a share to the threads, as soon as their bytes are there."""
        window = reader.next_window()
        for start in range(0, len(share.ids), share.batch_size):
            ids = share.ids[start : start + share.batch_size]
            batch = self._new_batch(ids, epoch)
            numbers = uniforms(self._settings.seed, epoch, ids, NUM_UNIFORMS)
            place = 0
            while place < len(ids):
                if start + place == window.first + window.num_samples:
                    window = reader.next_window()
                stop = min(place + CHUNK, len(ids), window.first + window.num_samples - start)
                first = start + place - window.first
                batch.chunks.append(
                    self._threads().submit(
                        self._decode, batch, window, first, slice(place, stop), ids, numbers
                    )
                )
                place = stop
            yield batch

    def _new_batch(self, ids: Ids, epoch: int) -> _Batch:
        size = self._settings.crop_size_at(epoch)
        images = torch.empty(
            (len(ids), size, size, 3), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        labels = torch.from_numpy(self.samples["label"][ids].astype(np.int64))
        resize_size = self._settings.resize_size_at(epoch)
        return _Batch(images.permute(0, 3, 1, 2), labels, images.numpy(), resize_size)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._settings.num_threads, "decode")
        return self._pool

    def _decode(
        self,
        batch: _Batch,
        window: Window,
        first: int,
        places: slice,
        ids: Ids,
        numbers: NDArray[np.float64],
    ) -> list[tuple[int, str]]:
        """Decode a chunk into its places; runs in a thread."""
        failed = []
        decoder = self._decoder()
        for offset, place in enumerate(range(places.start, places.stop)):
            jpeg = window.samples[first + offset]
            try:
                if not len(jpeg):
                    raise ValueError("the shard ends before it, or is gone")
                if self._settings.is_train:
                    decoder.train(jpeg, numbers[place].tolist(), batch.slots[place])
                else:
                    decoder.evaluate(jpeg, batch.resize_size, batch.slots[place])
            except ValueError as error:
                failed.append((place, f"{self._name(ids[place])}: {error}"))
        window.release(places.stop - places.start)
        return failed

    def _decoder(self) -> Decoder:
        """Give this thread's decoder."""
        if not hasattr(self._local, "decoder"):
            self._local.decoder = Decoder()
        decoder: Decoder = self._local.decoder
        return decoder

    def _name(self, sample: int) -> str:
        """Name a sample by shard and member."""
        row = self.samples[sample]
        path = self._paths[int(row["shard"])]
        member = member_name(path, int(row["offset"]))
        return f"{path.parent.name}/{path.name}: {member} (sample {sample})"

    def _finished(self, batch: _Batch) -> Decoded:
        """Wait for a batch and step over its damaged samples by the rule of `ShardLoader`."""
        failed = [failure for chunk in batch.chunks for failure in chunk.result()]
        if not failed:
            return batch.images, batch.labels, []
        bad = {place for place, _ in failed}
        good = [place for place in range(len(batch.labels)) if place not in bad]
        if self._settings.is_train and good:
            good = [
                _next_good(place, good, len(batch.labels)) for place in range(len(batch.labels))
            ]
        kept = batch.images.permute(0, 2, 3, 1)[good].permute(0, 3, 1, 2)
        return kept, batch.labels[good], [line for _, line in failed]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def first_of_each(labels: NDArray[np.integer], count: int) -> NDArray[np.intp]:
    """Give the places of the first `count` samples of each class, ascending."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.sort(by_class[np.arange(len(labels)) - starts < count])


def _next_good(place: int, good: list[int], count: int) -> int:
    """Give the place itself, or the next one, around the end, that could be decoded."""
    return min(good, key=lambda other: (other - place) % count)
