from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torchvision.models import resnet18

from train.config import FitConfig
from train.estimate import MemoryEstimate, estimate_memory, format_estimate
from train.precision import Precision

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = Precision(device=CPU), Precision(device=CPU, amp_dtype=torch.bfloat16)


def estimate(precision: Precision = FLOAT32, **changes: Any) -> MemoryEstimate:
    settings: dict[str, Any] = {"out": Path("x"), "src": Path("y"), "model": "resnet18"}
    return estimate_memory(FitConfig(**(settings | changes)), 1000, precision)


def test_weights_and_what_belongs_to_each_are_counted_by_hand() -> None:
    weights, statistics = 11_689_512, 9_600 + 20  # of ResNet-18 and its 20 BatchNorms
    found = estimate(batch_size=2, train_crop_size=64)
    assert found.weights == 4 * (weights + statistics)
    assert found.gradients == found.optimizer == 4 * weights
    assert found.images == 2 * 2 * 3 * 64 * 64 * (1 + 4)
    assert estimate(momentum=0.0, batch_size=2, train_crop_size=64).optimizer == 0
    averaged = estimate(ema_decay=0.9, batch_size=2, train_crop_size=64)
    assert averaged.weights == 2 * found.weights


def test_activations_are_those_of_a_real_step() -> None:
    model = resnet18().train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.zeros(4, dtype=torch.int64))
    assert loss.requires_grad
    found = estimate(batch_size=4, train_crop_size=64).activations
    assert found == pytest.approx(sum(kept.values()), rel=0.02)


def test_each_rung_of_the_ladder_saves_memory() -> None:
    plain = estimate().activations
    half = estimate(BFLOAT16).activations
    assert half == pytest.approx(plain / 2, rel=0.1)  # pooling keeps int64 places in both
    assert estimate(BFLOAT16, batch_size=64).activations == pytest.approx(half / 4, rel=0.02)
    assert estimate(BFLOAT16, grad_checkpoint=True).activations < 0.8 * half


def test_the_users_resnet_50_comes_near_the_22_gb_that_he_saw() -> None:
    found = estimate(model="resnet50")
    assert 21e9 < found.total < 24e9
    assert format_estimate(found).startswith("memory, about 22.7 GB a card (activations 21.99, ")
