"""One training epoch and one evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from train.metrics import top_k_hits
from train.world import World, sum_over_ranks

# Mean and spread of ImageNet's channels, red green blue, for pixels in 0..255.
MEAN: Final = (255 * 0.485, 255 * 0.456, 255 * 0.406)
STD: Final = (255 * 0.229, 255 * 0.224, 255 * 0.225)

Batch = tuple[Tensor, Tensor]


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
        """Class names in label order."""

    @property
    def num_damaged(self) -> int:
        """Samples stepped over so far."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterable[Batch]:
        """Give `(N, 3, S, S)` uint8 images and `(N,)` int64 labels, from a step on."""

    def close(self) -> None:
        """Let go of threads, processes and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Where and how exactly to compute."""

    device: torch.device
    amp_dtype: torch.dtype | None = None
    """Half type of autocast; None computes in float32."""
    channels_last: bool = True

    @property
    def memory_format(self) -> torch.memory_format:
        """Layout of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def autocast(self) -> torch.autocast:
        """Give the context of a forward pass."""
        return torch.autocast(
            self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None
        )

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Give a loss scaler; it does nothing unless the half type is float16."""
        enabled = self.amp_dtype is torch.float16 and self.device.type == "cuda"
        return torch.amp.GradScaler(self.device.type, enabled=enabled)


@dataclass(slots=True, kw_only=True)
class Learner:
    """What a step changes, and how it does."""

    model: nn.Module
    """In the device's memory, wrapped for many ranks where there are many."""
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    precision: Precision
    lr_at: Callable[[int], float]
    """Rate of a step, counted over the whole run."""
    label_smoothing: float = 0.0


@dataclass(slots=True, kw_only=True)
class EpochState:
    """How far this rank is in an epoch, and what it summed up on the way."""

    epoch: int
    step: int = 0
    num_images: int = 0
    loss_sum: Tensor
    """Float64 scalar on the device, read only now and then: reading waits for the device."""
    seconds: float = 0.0
    data_wait_s: float = 0.0
    num_damaged: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; epoch and step stand there once for all ranks."""
        return {
            "num_images": self.num_images,
            "loss_sum": self.loss_sum.item(),
            "seconds": self.seconds,
            "data_wait_s": self.data_wait_s,
            "num_damaged": self.num_damaged,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Result of one evaluation over all ranks."""

    loss: float
    top1_pct: float
    top5_pct: float
    num_samples: int


def train_epoch(
    learner: Learner,
    source: BatchSource,
    state: EpochState,
    after_step: Callable[[EpochState], bool],
) -> bool:
    """Train from `state.step` to the epoch's end, one optimizer update a step.

    Args:
        learner: Changed in place.
        source: Batches of the train split.
        state: Changed in place, and right whenever `after_step` sees it.
        after_step: Called after each step; true leaves the epoch there.

    Returns:
        Whether the epoch is complete.

    Raises:
        RuntimeError: The source gave fewer batches than it promised.
    """
    num_steps = source.steps_per_epoch
    if state.step == num_steps:
        return True
    learner.model.train()
    batches = source.epoch(state.epoch, start_step=state.step)
    started = time.perf_counter() - state.seconds
    damaged_before = source.num_damaged - state.num_damaged
    for images, labels in _on_device(batches, learner.precision, state):
        lr = learner.lr_at(state.epoch * num_steps + state.step)
        loss = train_step(learner, images, labels, lr)
        state.loss_sum += loss.double() * len(labels)
        state.num_images += len(labels)
        state.step += 1
        state.seconds = time.perf_counter() - started
        state.num_damaged = source.num_damaged - damaged_before
        if after_step(state):
            break
    else:
        if state.step != num_steps:
            raise RuntimeError(f"epoch {state.epoch} ended at step {state.step} of {num_steps}")
    return state.step == num_steps


def train_step(learner: Learner, images: Tensor, labels: Tensor, lr: float) -> Tensor:
    """Make one update from a batch on the device.

    Returns:
        The mean loss, a detached float32 scalar that nobody waited for.
    """
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    with learner.precision.autocast():
        logits = learner.model(normalise(images, learner.precision))
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=learner.label_smoothing)
    learner.scaler.scale(loss).backward()
    learner.scaler.step(learner.optimizer)
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def evaluate(model: nn.Module, source: BatchSource, precision: Precision, world: World) -> Scores:
    """Score a model on the val split: each image once, over all ranks.

    Scores are float32 and the loss has no label smoothing. The model must be the bare module:
    ranks may have unequal numbers of steps, which a wrapper would wait for.

    Raises:
        ValueError: The split is empty.
    """
    model.eval()
    ks = (1, min(5, source.num_classes))
    totals = torch.zeros(4, dtype=torch.float64, device=precision.device)
    with torch.no_grad():
        for images, labels in _on_device(source.epoch(0), precision):
            with precision.autocast():
                logits = model(normalise(images, precision))
            logits = logits.float()
            totals[0] += F.cross_entropy(logits, labels, reduction="sum")
            totals[1:3] += top_k_hits(logits, labels, ks)
            totals[3] += len(labels)
    loss, top1, top5, num_samples = sum_over_ranks(totals, world).tolist()
    if not num_samples:
        raise ValueError("the val split gave no image; pack one, or look at its report.csv")
    return Scores(
        loss=loss / num_samples,
        top1_pct=100 * top1 / num_samples,
        top5_pct=100 * top5 / num_samples,
        num_samples=int(num_samples),
    )


def mean_loss(state: EpochState, world: World) -> float:
    """Mean loss of the epoch so far, over all ranks; waits for the device.

    Raises:
        ValueError: It is not finite, on every rank alike.
    """
    sums = torch.stack([state.loss_sum, torch.full_like(state.loss_sum, state.num_images)])
    loss_sum, num_images = sum_over_ranks(sums, world).tolist()
    loss = float(loss_sum / max(num_images, 1))
    refuse_nonfinite(loss, f"training loss by step {state.step} of epoch {state.epoch + 1}")
    return loss


def refuse_nonfinite(loss: float, what: str) -> None:
    """Stop a run whose numbers broke.

    Raises:
        ValueError: `loss` is NaN or infinite; the text says what to change.
    """
    if not math.isfinite(loss):
        raise ValueError(
            f"{what} is {loss}: the run diverged and this state is not saved; "
            "lower --lr, raise --warmup-epochs, or use --amp-dtype bfloat16 or --no-amp"
        )


def normalise(images: Tensor, precision: Precision) -> Tensor:
    """Centre and scale `(N, 3, H, W)` uint8 pixels where they lie, in float32, then to the half."""
    mean, std = (
        torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD)
    )
    dtype = precision.amp_dtype or torch.float32
    return ((images - mean) / std).to(dtype, memory_format=precision.memory_format)


def _on_device(
    batches: Iterable[Batch], precision: Precision, state: EpochState | None = None
) -> Iterator[Batch]:
    """Copy batches to the device; add to `state` the time the device stood idle for one.

    On CUDA the host asks for the next batch only when the copy of this one is over, so that a
    loader may use its memory again, and waiting counts only if the device ran dry meanwhile.
    """
    device = precision.device
    on_cuda = device.type == "cuda"
    iterator = iter(batches)
    busy: torch.cuda.Event | None = None
    while True:
        asked = time.perf_counter()
        batch = next(iterator, None)
        if state is not None and (busy is None or busy.query()):
            state.data_wait_s += time.perf_counter() - asked
        if batch is None:
            return
        moved = (batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True))
        copied = torch.cuda.current_stream(device).record_event() if on_cuda else None
        yield moved
        if copied is not None:
            busy = torch.cuda.current_stream(device).record_event()
            copied.synchronize()
