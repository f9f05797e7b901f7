from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torchvision.models import resnet18, resnet50

from train.blocks import BlurConv2d, add_blurpool, forget_activations


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    labels = torch.arange(len(images)) % 3
    F.cross_entropy(model(images), labels).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def test_a_blurred_convolution_is_the_filter_by_hand_and_then_the_convolution() -> None:
    plain = nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False)
    model = nn.Sequential(copy.deepcopy(plain))
    add_blurpool(model)
    assert isinstance(model[0], BlurConv2d)
    images = torch.randn(2, 4, 9, 9)
    kernel = np.outer([1, 2, 1], [1, 2, 1]) / 16
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    blurred = sum(
        kernel[y, x] * padded[:, :, y : y + 9, x : x + 9] for y in range(3) for x in range(3)
    )
    wanted = plain(torch.from_numpy(np.asarray(blurred)).float())
    torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)


def test_blurring_takes_the_strided_convolutions_of_a_resnet_but_its_first() -> None:
    model = resnet50()
    before = {key: value.shape for key, value in model.state_dict().items()}
    add_blurpool(model)
    blurred = [name for name, m in model.named_modules() if isinstance(m, BlurConv2d)]
    assert blurred == [
        f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")
    ]
    assert {key: value.shape for key, value in model.state_dict().items()} == before
    model.load_state_dict(resnet50().state_dict())


def test_blurring_works_in_half_and_in_channels_last() -> None:
    model = resnet18(num_classes=3).to(memory_format=torch.channels_last)
    add_blurpool(model)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(images).isfinite().all()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_forgetting_gives_the_same_gradients_statistics_and_random_numbers(dropout: float) -> None:
    torch.manual_seed(0)
    plain = resnet18(num_classes=3)
    plain.layer2[1].relu = nn.Sequential(nn.ReLU(), nn.Dropout(dropout))
    forgetful = copy.deepcopy(plain)
    forget_activations(forgetful)
    images = torch.randn(4, 3, 64, 64)
    for some, others in zip(gradients(plain, images), gradients(forgetful, images), strict=True):
        assert torch.equal(some, others)
    state, other = plain.state_dict(), forgetful.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state)


def kept_bytes(model: nn.Module, images: Tensor) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = model(images)
    assert alive.requires_grad
    return sum(kept.values())


def test_forgetting_keeps_less_for_the_backward_pass() -> None:
    model, images = resnet50(num_classes=3), torch.randn(2, 3, 64, 64)
    before = kept_bytes(model, images)
    forget_activations(model)
    assert kept_bytes(model, images) < 0.75 * before  # the weights are in both figures


def test_forgetting_leaves_evaluation_alone() -> None:
    model = resnet18(num_classes=3).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        forget_activations(model)
        assert torch.equal(model(images), before)


def test_a_model_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="--grad-checkpoint needs a ResNet: Linear has no stage"):
        forget_activations(nn.Linear(2, 2))
