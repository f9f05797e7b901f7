"""One training epoch, one step; evaluation is in `score`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from train.average import WeightAverage
from train.feed import Batch, BatchSource, on_device
from train.precision import Precision, normalise
from train.score import at_least_float32
from train.world import World, sum_over_ranks

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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
    lr_factor: float = 1.0
    """What rollbacks left of the rate."""
    grad_accum: int = 1
    """Batches of one step; the last step of an epoch may have fewer."""
    label_smoothing: float = 0.0
    mix: Mix | None = None
    """Mixes normalised images and labels of a batch; gives `(N, C)` shares as labels."""
    clip_norm: float | None = None
    ema: WeightAverage | None = None
    """Follows the bare model's weights."""
    ema_start_step: int = 0
    """Before this step of the run, and after the first one, the average is a copy."""

    def lr(self, step: int) -> float:
        """Give the rate of a step of the run."""
        return self.lr_factor * self.lr_at(step)


@dataclass(slots=True, kw_only=True)
class EpochState:
    """How far this rank is in an epoch, and what it summed up on the way."""

    epoch: int
    step: int = 0
    """Steps done: optimizer updates, of `grad_accum` batches each."""
    num_images: int = 0
    loss_sum: Tensor
    """Float64 scalar on the device, read only now and then: reading waits for the device."""
    seconds: float = 0.0
    data_wait_s: float = 0.0
    num_damaged: int = 0
    grad_norm: Tensor | None = None
    """Of the last step, over all weights and before clipping; None without --clip-norm."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint; epoch and step stand there once for all ranks."""
        return {
            "num_images": self.num_images,
            "loss_sum": self.loss_sum.item(),
            "seconds": self.seconds,
            "data_wait_s": self.data_wait_s,
            "num_damaged": self.num_damaged,
        }

    def add_wait(self, seconds: float) -> None:
        """Note that the device stood idle for a batch."""
        self.data_wait_s += seconds


@dataclass(slots=True)
class StepResult:
    """What one step found, on the device: nobody waited for it."""

    loss: Tensor
    """Mean over the step's images, a detached scalar."""
    num_images: int = 0
    grad_norm: Tensor | None = None


def num_steps_of(source: BatchSource, grad_accum: int) -> int:
    """Count the steps of one epoch: groups of `grad_accum` batches, the last one maybe short."""
    return -(-source.steps_per_epoch // grad_accum)


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
    num_steps = num_steps_of(source, learner.grad_accum)
    if state.step == num_steps:
        return True
    learner.model.train()
    done = state.step * learner.grad_accum
    batches = source.epoch(state.epoch, start_step=done)
    batches = on_device(batches, learner.precision.device, state.add_wait)
    started = time.perf_counter() - state.seconds
    damaged_before = source.num_damaged - state.num_damaged
    while state.step < num_steps:
        length = min(learner.grad_accum, source.steps_per_epoch - done)
        result = train_step(
            learner, islice(batches, length), length, state.epoch * num_steps + state.step
        )
        done += length
        state.loss_sum += result.loss.double() * result.num_images
        state.num_images += result.num_images
        state.grad_norm = result.grad_norm
        state.step += 1
        state.seconds = time.perf_counter() - started
        state.num_damaged = source.num_damaged - damaged_before
        if after_step(state):
            break
    return state.step == num_steps


def train_step(
    learner: Learner, batches: Iterable[Batch], num_batches: int, step: int
) -> StepResult:
    """Make one update from batches on the device, as from one batch of all their images.

    Each batch's loss is divided by the number of batches, so their gradients add up to those of
    the mean. (BatchNorm still sees one batch at a time.)

    Args:
        learner: Changed in place.
        batches: Of equal size; each is used up before the next is asked for.
        num_batches: How many there are.
        step: Of the run, counted from 0; decides the rate.

    Raises:
        RuntimeError: There were fewer batches.
    """
    lr = learner.lr(step)
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    result = StepResult(torch.zeros((), device=learner.precision.device))
    place = 0
    for place, (images, labels) in enumerate(batches, 1):
        with _gradients_alone(learner.model, alone=place < num_batches):
            loss = _loss(learner, images, labels) / num_batches
            learner.scaler.scale(loss).backward()
        result.loss += loss.detach()
        result.num_images += len(labels)
    if place < num_batches:
        raise RuntimeError(f"step {step} got {place} of {num_batches} batches: the source ended")
    result.grad_norm = _update(learner)
    if learner.ema is not None:
        learner.ema.update(copy=step < max(learner.ema_start_step, 1))
    return result


def mean_loss(state: EpochState, world: World) -> float:
    """Mean loss of the epoch so far, over all ranks; waits for the device.

    Raises:
        DivergedError: It is not finite, on every rank alike.
    """
    sums = torch.stack([state.loss_sum, torch.full_like(state.loss_sum, state.num_images)])
    loss_sum, num_images = sum_over_ranks(sums, world).tolist()
    loss = float(loss_sum / max(num_images, 1))
    refuse_nonfinite(loss, f"training loss by step {state.step} of epoch {state.epoch + 1}")
    return loss


class DivergedError(ValueError):
    """The numbers of a run broke; on every rank alike."""


def refuse_nonfinite(value: float, what: str) -> None:
    """Stop a run whose numbers broke.

    Raises:
        DivergedError: `value` is NaN or infinite; the text says what to change.
    """
    if not math.isfinite(value):
        raise DivergedError(
            f"{what} is {value}: the run diverged and this state is not saved; lower --lr, raise "
            "--warmup-epochs, use --amp-dtype bfloat16 or --no-amp, or --on-nan rollback"
        )


def refuse_broken_weights(model: nn.Module, world: World) -> None:
    """Refuse to save weights that are no longer numbers; waits for the device.

    Raises:
        DivergedError: A weight or buffer is NaN or infinite, on whatever rank; on every rank alike.
    """
    sums = [t.sum(dtype=torch.float64) for t in model.state_dict().values()]
    total = sum_over_ranks(torch.stack(sums).sum(), world)
    refuse_nonfinite(total.item(), "the sum of all weights")


def _loss(learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
    pixels = normalise(images, learner.precision)
    if learner.mix is not None:
        pixels, labels = learner.mix(pixels, labels)
    with learner.precision.autocast():
        logits = learner.model(pixels)
    return F.cross_entropy(
        at_least_float32(logits), labels, label_smoothing=learner.label_smoothing
    )


def _update(learner: Learner) -> Tensor | None:
    """Step the optimizer; gives the gradient's norm where clipping needs it."""
    norm = None
    if learner.clip_norm is not None:
        learner.scaler.unscale_(learner.optimizer)
        norm = nn.utils.clip_grad_norm_(learner.model.parameters(), learner.clip_norm)
    learner.scaler.step(learner.optimizer)
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    return norm


def _gradients_alone(model: nn.Module, *, alone: bool) -> AbstractContextManager[None]:
    """Keep the ranks' gradients apart until the last batch of a step."""
    if alone and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()
