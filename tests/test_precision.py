from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import transforms

from train.config import FitConfig
from train.precision import Precision, choose_precision, normalise

CPU = torch.device("cpu")
FLOAT32 = Precision(device=CPU, channels_last=False)
BFLOAT16 = Precision(device=CPU, amp_dtype=torch.bfloat16, channels_last=True)
IMAGES = torch.randint(
    0, 256, (4, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)


def config(**changes: bool | str) -> FitConfig:
    return FitConfig(out=Path("x"), src=Path("y"), **changes)  # type: ignore[arg-type]


def test_pixels_are_normalised_as_torchvision_does_it() -> None:
    oracle = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))(IMAGES / 255)
    torch.testing.assert_close(normalise(IMAGES, FLOAT32), oracle)
    half = normalise(IMAGES, BFLOAT16)
    assert half.dtype is torch.bfloat16
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert normalise(IMAGES, FLOAT32).is_contiguous()


def test_the_scaler_is_off_without_float16_on_cuda() -> None:
    assert not FLOAT32.grad_scaler().is_enabled()
    assert not BFLOAT16.grad_scaler().is_enabled()
    assert not Precision(device=CPU, amp_dtype=torch.float16).grad_scaler().is_enabled()


def test_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    plain = choose_precision(config(), CPU)
    assert (plain.amp_dtype, plain.channels_last, str(plain)) == (None, False, "float32")
    half = choose_precision(config(amp=True, channels_last=True), CPU)
    assert (half.amp_dtype, half.channels_last, str(half)) == (torch.bfloat16, True, "bfloat16")


def test_float16_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="--amp-dtype float16 needs a CUDA device"):
        choose_precision(config(amp=True, amp_dtype="float16"), CPU)
