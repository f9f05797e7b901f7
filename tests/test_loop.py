from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import transforms

from train.loop import (
    EpochState,
    Learner,
    Precision,
    evaluate,
    mean_loss,
    normalise,
    train_epoch,
    train_step,
)
from train.memory import TensorSource
from train.model import parameter_groups
from train.world import World

CPU = torch.device("cpu")
FLOAT32 = Precision(device=CPU, channels_last=False)
BFLOAT16 = Precision(device=CPU, amp_dtype=torch.bfloat16, channels_last=True)


class SpySGD(torch.optim.SGD):
    num_steps = 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.num_steps += 1
        return super().step(*args, **options)


def net(num_classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def learner(precision: Precision = FLOAT32, *, scaled: bool = False) -> Learner:
    model = net().to(memory_format=precision.memory_format)
    scaler = torch.amp.GradScaler("cpu", enabled=True) if scaled else precision.grad_scaler()
    return Learner(
        model=model,
        optimizer=SpySGD(parameter_groups(model, 1e-4), lr=0.1, momentum=0.9),
        scaler=scaler,
        precision=precision,
        lr_at=lambda step: 0.1 / (step + 1),
    )


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


@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_is_one_optimizer_step(scaled: bool) -> None:
    subject = learner(scaled=scaled)
    train_epoch(subject, source(22, "train"), fresh(), never)
    assert isinstance(subject.optimizer, SpySGD)
    assert subject.optimizer.num_steps == 5


def test_a_step_that_the_scaler_leaves_out_changes_nothing_and_warns_of_nothing() -> None:
    subject = learner(scaled=True)
    images, labels = coloured(4)
    train_step(subject, images, labels, 0.1)
    subject.scaler.update(float("inf"))  # the scaled gradients overflow
    before = [p.clone() for p in subject.model.parameters()]
    loss = train_step(subject, images, labels, 0.05)
    assert loss.isfinite()
    assert all_equal(before, list(subject.model.parameters()))
    assert subject.optimizer.param_groups[0]["lr"] == 0.05


def test_the_scaler_is_off_without_float16_on_cuda() -> None:
    assert not FLOAT32.grad_scaler().is_enabled()
    assert not BFLOAT16.grad_scaler().is_enabled()
    assert not Precision(device=CPU, amp_dtype=torch.float16).grad_scaler().is_enabled()


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16])
def test_a_few_epochs_learn_to_tell_colours(precision: Precision) -> None:
    subject, batches = learner(precision), source(24, "train", batch_size=8)
    losses = []
    for epoch in range(12):
        state = fresh(epoch)
        assert train_epoch(subject, batches, state, never)
        losses.append(mean_loss(state, World()))
    scores = evaluate(subject.model, source(24, "val"), precision, World())
    assert losses[-1] < losses[0]
    assert scores.top1_pct > 90


def test_gradients_are_released_and_the_loss_is_detached() -> None:
    subject = learner()
    images, labels = coloured(4)
    loss = train_step(subject, images, labels, 0.1)
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
    with pytest.raises(RuntimeError, match="epoch 0 ended at step 2 of 3"):
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
        ValueError,
        match=r"training loss by step 20 of epoch 1 is nan: the run diverged.*lower --lr",
    ):
        mean_loss(state, World())


def test_pixels_are_normalised_as_torchvision_does_it() -> None:
    images, _ = coloured(4)
    oracle = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(images / 255)
    torch.testing.assert_close(normalise(images, FLOAT32), oracle)
    half = normalise(images, BFLOAT16)
    assert half.dtype is torch.bfloat16
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert normalise(images, FLOAT32).is_contiguous()


class Fixed(nn.Module):
    """Gives each image its own first pixels as scores."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]


def test_an_evaluation_of_four_samples_is_as_worked_out_by_hand() -> None:
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    best = torch.tensor([0, 1, 2, 2])
    images[torch.arange(4), best] = 255
    batches = TensorSource(
        images, torch.tensor([0, 1, 2, 0]), "val", wnids=("a", "b", "c"), batch_size=3
    )
    scores = evaluate(Fixed(), batches, FLOAT32, World())
    assert (scores.top1_pct, scores.top5_pct, scores.num_samples) == (75.0, 100.0, 4)
    logits = normalise(images, FLOAT32)[:, :, 0, 0]
    by_hand = -logits.log_softmax(dim=1)[range(4), [0, 1, 2, 0]].mean()
    assert scores.loss == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_the_shares_of_an_evaluation_add_up_to_each_image_once(world_size: int) -> None:
    shares = [source(21, "val", rank=r, world_size=world_size) for r in range(world_size)]
    labels = torch.cat([label for share in shares for _, label in share.epoch(0)])
    assert labels.tolist() == coloured(21)[1].tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 21, 50])
def test_figures_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    scores = evaluate(net(), source(21, "val", batch_size=batch_size), FLOAT32, World())
    assert scores.num_samples == 21
    reference = evaluate(net(), source(21, "val", batch_size=7), FLOAT32, World())
    assert scores.top1_pct == reference.top1_pct
    assert scores.loss == pytest.approx(reference.loss, rel=1e-5)


def test_an_evaluation_changes_nothing_in_the_model() -> None:
    model = net()
    before = weights(model)
    evaluate(model, source(21, "val"), FLOAT32, World())
    assert all_equal(before, weights(model))
    assert not model.training


def test_an_empty_val_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the val split gave no image"):
        evaluate(net(), source(0, "val"), FLOAT32, World())


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
    scores = evaluate(subject.model, source(24, "val"), precision, World())
    assert scores.top1_pct > 90
