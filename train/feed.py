"""What gives batches, and how they come to the device while it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]
Waited = Callable[[float], None]


class BatchSource(Protocol):
    """What gives batches: `ShardLoader`, `RawLoader`, or tensors in memory."""

    @property
    def num_samples(self) -> int:
        """Samples of the split over all ranks."""

    @property
    def num_classes(self) -> int:
        """Labels lie below it."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch on this rank."""

    @property
    def wnids(self) -> tuple[str, ...]:
        """Classes in label order."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Readable names in label order; the wnid where there is none."""

    @property
    def num_damaged(self) -> int:
        """Samples stepped over so far."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterable[Batch]:
        """Give `(N, 3, S, S)` uint8 images and `(N,)` int64 labels, from a batch on."""

    def close(self) -> None:
        """Let go of threads, processes and files."""


def on_device(
    batches: Iterable[Batch], device: torch.device, waited: Waited | None = None
) -> Iterator[Batch]:
    """Copy batches to the device, beside the computing where that is CUDA.

    A batch is copied on a stream of its own as soon as the host has queued the step before, so the
    copy hides behind that step. The host runs at most two batches ahead of the device.

    Args:
        batches: On the host, in pinned memory for copies that do not block.
        device: Where to.
        waited: Told the seconds that the device stood idle for a batch: those in which the host
            waited for one while the device had nothing queued.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    iterator = iter(batches)
    queued: list[torch.cuda.Event] = []
    while True:
        asked = time.perf_counter()
        batch = next(iterator, None)
        if waited is not None and (not queued or queued[-1].query()):
            waited(time.perf_counter() - asked)
        if batch is None:
            return
        if copies is None:
            yield batch[0].to(device), batch[1].to(device)
            continue
        yield _copied(batch, device, copies)
        queued.append(torch.cuda.current_stream(device).record_event())
        if len(queued) > 1:
            queued.pop(0).synchronize()


def _copied(batch: Batch, device: torch.device, copies: torch.cuda.Stream) -> Batch:
    """Copy on the stream `copies`; what is computed with the result waits for it."""
    computing = torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        images = batch[0].to(device, non_blocking=True)
        labels = batch[1].to(device, non_blocking=True)
    computing.wait_stream(copies)
    images.record_stream(computing)
    labels.record_stream(computing)
    return images, labels
