"""Where and how exactly to compute, and how pixels become the network's input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from train.config import InputConfig

# Mean and spread of ImageNet's channels, red green blue, for pixels in 0..255.
MEAN: Final = (255 * 0.485, 255 * 0.456, 255 * 0.406)
STD: Final = (255 * 0.229, 255 * 0.224, 255 * 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Device, half type and memory format of a run."""

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

    def __str__(self) -> str:
        half = self.amp_dtype
        return "float32" if half is None else str(half).removeprefix("torch.")


def choose_precision(config: InputConfig, device: torch.device) -> Precision:
    """Resolve `--amp`, `--amp-dtype` and `--channels-last` for a device.

    Raises:
        ValueError: float16 is asked for on the CPU.
    """
    on_cuda = device.type == "cuda"
    amp = on_cuda if config.amp is None else config.amp
    channels_last = on_cuda if config.channels_last is None else config.channels_last
    amp_dtype = _half_type(config.amp_dtype, device) if amp else None
    return Precision(device=device, amp_dtype=amp_dtype, channels_last=channels_last)


def set_fast_math() -> None:
    """Let CUDA use TF32 in float32 products and try convolutions for the fastest."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True


def normalise(images: Tensor, precision: Precision) -> Tensor:
    """Centre and scale `(N, 3, H, W)` uint8 pixels where they lie, in float32, then to the half."""
    mean, std = _statistics(images.device)
    dtype = precision.amp_dtype or torch.float32
    return ((images - mean) / std).to(dtype, memory_format=precision.memory_format)


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Give mean and spread, `(1, 3, 1, 1)` float32; made once: the copy waits for the device."""
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return mean, std


def _half_type(name: str, device: torch.device) -> torch.dtype:
    if name == "float16" and device.type == "cpu":
        raise ValueError("--amp-dtype float16 needs a CUDA device; on the CPU give bfloat16")
    if name == "float16" or (
        name == "auto" and device.type == "cuda" and not torch.cuda.is_bf16_supported()
    ):
        return torch.float16
    return torch.bfloat16
