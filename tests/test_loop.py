from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runs import plain_net, wide_net
from train.average import WeightAverage
from train.loop import (
    DivergedError,
    EpochState,
    Learner,
    StepResult,
    mean_loss,
    refuse_broken_weights,
    train_epoch,
    train_step,
)
from train.memory import TensorSource
from train.model import parameter_groups
from train.precision import Precision, normalise
from train.score import evaluate
from train.world import World

CPU = torch.device("cpu")
FLOAT32 = Precision(device=CPU, channels_last=False)
BFLOAT16 = Precision(device=CPU, amp_dtype=torch.bfloat16, channels_last=True)


class SpySGD(torch.optim.SGD):
    num_steps = 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.num_steps += 1
        return super().step(*args, **options)


def learner(
    precision: Precision = FLOAT32,
    *,
    scaled: bool = False,
    model: nn.Module | None = None,
    **options: Any,
) -> Learner:
    model = model or plain_net().to(memory_format=precision.memory_format)
    scaler = torch.amp.GradScaler("cpu", enabled=True) if scaled else precision.grad_scaler()
    return Learner(
        model=model,
        optimizer=SpySGD(parameter_groups(model, 1e-4), lr=0.1, momentum=0.9),
        scaler=scaler,
        precision=precision,
        lr_at=lambda step: 0.1 / (step + 1),
        **options,
    )


def one_step(subject: Learner, images: Tensor, labels: Tensor, step: int = 0) -> StepResult:
    return train_step(subject, [(images, labels)], 1, step)


def coloured(num_samples: int, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    """Noise with one bright channel, by which the label can be told."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(num_samples) % num_classes
    images = torch.randint(0, 100, (num_samples, 3, 12, 12), generator=generator)
    images[torch.arange(num_samples), labels % 3] += 120
    return images.to(torch.uint8).contiguous(memory_format=torch.channels_last), labels


def source(num_samples: int, split: str, batch_size: int = 4, **options: Any) -> TensorSource:
    images, labels = coloured(num_samples)
    wnids = ("n01", "n02", "n03")
    return TensorSource(images, labels, split, wnids=wnids, batch_size=batch_size, **options)


def fresh(epoch: int = 0, step: int = 0) -> EpochState:
    return EpochState(epoch=epoch, step=step, loss_sum=torch.zeros((), dtype=torch.float64))


def never(_state: EpochState) -> bool:
    return False


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("grad_accum", "num_updates"), [(1, 5), (2, 3), (5, 1), (7, 1)])
def test_an_update_is_one_optimizer_step(
    scaled: bool, clip_norm: float | None, grad_accum: int, num_updates: int
) -> None:
    subject = learner(scaled=scaled, clip_norm=clip_norm, grad_accum=grad_accum)
    train_epoch(subject, source(22, "train"), fresh(), never)
    assert isinstance(subject.optimizer, SpySGD)
    assert subject.optimizer.num_steps == num_updates


def test_a_step_that_the_scaler_leaves_out_changes_nothing_and_warns_of_nothing() -> None:
    subject = learner(scaled=True)
    images, labels = coloured(4)
    one_step(subject, images, labels)
    subject.scaler.update(float("inf"))  # the scaled gradients overflow
    before = [p.clone() for p in subject.model.parameters()]
    assert one_step(subject, images, labels, step=1).loss.isfinite()
    assert all_equal(before, list(subject.model.parameters()))
    assert subject.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16])
def test_a_few_epochs_learn_to_tell_colours(precision: Precision) -> None:
    subject, batches = learner(precision), source(24, "train", batch_size=8)
    losses = []
    for epoch in range(12):
        state = fresh(epoch)
        assert train_epoch(subject, batches, state, never)
        losses.append(mean_loss(state, World()))
    (scores,) = evaluate([subject.model], source(24, "val"), precision, World())
    assert losses[-1] < losses[0]
    assert scores.top1_pct > 90


def test_gradients_are_released_and_the_loss_is_detached() -> None:
    subject = learner()
    images, labels = coloured(4)
    loss = one_step(subject, images, labels).loss
    assert loss.dtype is torch.float32
    assert not loss.requires_grad
    assert all(p.grad is None for p in subject.model.parameters())


def test_the_rate_is_that_of_the_step_in_the_run() -> None:
    subject = learner()
    train_epoch(subject, source(12, "train"), fresh(epoch=2), never)
    assert subject.optimizer.param_groups[0]["lr"] == 0.1 / 9
    assert subject.optimizer.param_groups[1]["lr"] == 0.1 / 9


def test_an_epoch_left_and_taken_up_again_ends_in_the_same_weights() -> None:
    whole, parts = learner(), learner()
    state, left = fresh(1), fresh(1)
    train_epoch(whole, source(22, "train"), state, never)
    assert not train_epoch(parts, source(22, "train"), left, lambda s: s.step == 2)
    assert left.step == 2
    assert train_epoch(parts, source(22, "train"), left, never)
    assert all_equal(weights(whole.model), weights(parts.model))
    assert left.loss_sum.item() == state.loss_sum.item()
    assert left.num_images == state.num_images == 20


def test_a_complete_epoch_is_not_run_again() -> None:
    subject = learner()
    before = weights(subject.model)
    assert train_epoch(subject, source(12, "train"), fresh(step=3), never)
    assert all_equal(before, weights(subject.model))


class ShortSource(TensorSource):
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        yield from list(super().epoch(epoch, start_step))[:-1]


class SlowSource(TensorSource):
    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().epoch(epoch, start_step):
            time.sleep(0.05)
            self.num_damaged += 1
            yield batch


def test_a_source_that_ends_early_is_an_error() -> None:
    images, labels = coloured(12)
    batches = ShortSource(images, labels, "train", wnids=("a", "b", "c"), batch_size=4)
    with pytest.raises(RuntimeError, match="step 2 got 0 of 1 batches: the source ended"):
        train_epoch(learner(), batches, fresh(), never)


def test_waiting_and_damage_are_counted() -> None:
    images, labels = coloured(12)
    batches = SlowSource(images, labels, "train", wnids=("a", "b", "c"), batch_size=4)
    batches.num_damaged = 7  # by an epoch before
    state = fresh()
    train_epoch(learner(), batches, state, never)
    assert 0.15 <= state.data_wait_s <= state.seconds
    assert state.num_damaged == 3


def test_a_loss_that_is_not_finite_stops_the_run_with_advice() -> None:
    state = fresh(step=20)
    state.num_images = 4
    state.loss_sum += float("nan")
    with pytest.raises(
        DivergedError,
        match=r"training loss by step 20 of epoch 1 is nan: the run diverged.*lower --lr",
    ):
        mean_loss(state, World())


def by_hand(
    model: nn.Module, groups: list[tuple[Tensor, Tensor]], clip_norm: float | None
) -> float:
    """Train on whole groups with SGD as written in the textbook; gives the last gradient's norm."""
    weights = list(model.parameters())
    speeds = [torch.zeros_like(w) for w in weights]
    norm = 0.0
    for step, (images, labels) in enumerate(groups):
        loss = F.cross_entropy(model(normalise(images, FLOAT32)), labels)
        gradients = torch.autograd.grad(loss, weights)
        norm = float(sum((g**2).sum() for g in gradients)) ** 0.5
        shrink = min(1.0, clip_norm / norm) if clip_norm else 1.0
        for w, v, g in zip(weights, speeds, gradients, strict=True):
            decay = 1e-4 if w.ndim > 1 else 0.0
            v.copy_(0.9 * v + shrink * g + decay * w.detach())
            w.data -= 0.1 / (step + 1) * v
    return norm


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_is_the_large_batch_and_the_last_short_group_counts_by_its_length(
    scaled: bool, clip_norm: float | None
) -> None:
    batches = source(20, "train", batch_size=2)
    parts = list(batches.epoch(0))
    groups = [
        tuple(torch.cat(tensors) for tensors in zip(*parts[first : first + 4], strict=True))
        for first in (0, 4, 8)
    ]
    assert [len(labels) for _, labels in groups] == [8, 8, 4]
    reference = wide_net()
    norm = by_hand(reference, groups, clip_norm)  # type: ignore[arg-type]
    model = wide_net()
    subject = learner(scaled=scaled, model=model, grad_accum=4, clip_norm=clip_norm)
    state = fresh()
    assert train_epoch(subject, batches, state, never)
    assert (state.step, state.num_images) == (3, 20)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    if clip_norm:
        assert state.grad_norm is not None
        assert state.grad_norm.item() == pytest.approx(norm, rel=1e-6)


def test_an_accumulating_epoch_continues_at_the_right_batch() -> None:
    whole, parts = (learner(model=wide_net(), grad_accum=4) for _ in range(2))
    batches = source(20, "train", batch_size=2)
    train_epoch(whole, batches, fresh(), never)
    left = fresh()
    assert not train_epoch(parts, batches, left, lambda s: s.step == 2)
    assert left.num_images == 16
    assert train_epoch(parts, batches, left, never)
    assert all_equal(weights(whole.model), weights(parts.model))


def test_the_average_copies_in_warmup_and_then_forgets_as_worked_out_by_hand() -> None:
    model = plain_net()
    ema = WeightAverage(model, 0.75)
    subject = learner(model=model, ema=ema, ema_start_step=2)
    images, labels = coloured(4)
    seen = []
    for step in range(4):
        one_step(subject, images, labels, step)
        seen.append(model.get_parameter("0.weight").detach().clone())
        if step < 2:
            assert torch.equal(ema.module.get_parameter("0.weight"), seen[-1])
    wanted = 0.75 * (0.75 * seen[1] + 0.25 * seen[2]) + 0.25 * seen[3]
    torch.testing.assert_close(ema.module.get_parameter("0.weight"), wanted)


def test_a_mix_of_labels_reaches_the_loss() -> None:
    def halves(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        shares = (F.one_hot(labels, 3) + F.one_hot(labels.roll(1), 3)) / 2
        return (pixels + pixels.roll(1, 0)) / 2, shares

    images, labels = coloured(4)
    model = plain_net()
    pixels, shares = halves(normalise(images, FLOAT32), labels)
    wanted = -(model.train()(pixels).log_softmax(1) * shares).sum(1).mean()
    found = one_step(learner(model=model, mix=halves), images, labels).loss
    torch.testing.assert_close(found, wanted.detach())


def test_a_rollback_factor_scales_the_rate() -> None:
    subject = learner(lr_factor=0.5)
    train_epoch(subject, source(12, "train"), fresh(), never)
    assert subject.optimizer.param_groups[0]["lr"] == 0.5 * 0.1 / 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float) -> None:
    model = plain_net()
    refuse_broken_weights(model, World())
    model.get_parameter("0.weight").data[0, 0, 0, 0] = value
    with pytest.raises(DivergedError, match="the sum of all weights is"):
        refuse_broken_weights(model, World())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_a_gpu_learns_one_batch_in_each_precision(half: torch.dtype | None) -> None:
    precision = Precision(device=torch.device("cuda"), amp_dtype=half)
    subject = learner(precision)
    subject.model.cuda()
    batches = source(24, "train", batch_size=8)
    for epoch in range(12):
        state = EpochState(
            epoch=epoch, loss_sum=torch.zeros((), dtype=torch.float64, device="cuda")
        )
        train_epoch(subject, batches, state, never)
    (scores,) = evaluate([subject.model], source(24, "val"), precision, World())
    assert scores.top1_pct > 90


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_a_step_never_waits_for_the_gpu(half: torch.dtype | None) -> None:
    precision = Precision(device=torch.device("cuda"), amp_dtype=half)
    subject = learner(precision, model=plain_net().cuda(), clip_norm=1.0)
    subject.optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.1, fused=True)
    subject.ema = WeightAverage(subject.model, 0.9)
    images, labels = (tensor.cuda() for tensor in coloured(8))
    one_step(subject, images, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 4):
            one_step(subject, images, labels, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
