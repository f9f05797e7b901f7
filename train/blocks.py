"""Layers that take the place of torchvision's and keep the names of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STAGES: Final = ("layer1", "layer2", "layer3", "layer4")
"""Of a torchvision ResNet: sequences of blocks."""


class BlurConv2d(nn.Conv2d):
    """A convolution with a stride that blurs first, so that shifts of a pixel change less.

    The filter is the binomial one of 3x3 (Zhang: Making convolutional networks shift-invariant
    again, arXiv 1904.11486), in the place where ffcv-imagenet has it.
    """

    blur: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Blur each channel, then convolve."""
        return super().forward(F.conv2d(x, self.blur, padding=1, groups=x.shape[1]))


class ForgettingStage(nn.Sequential):
    """A stage of blocks that keeps only what goes into each block, and computes the rest again.

    Weights, gradients and BatchNorm's statistics come out as without it: the second pass over a
    block leaves the statistics alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Pass through the blocks."""
        for block in self:
            if not torch.is_grad_enabled():
                x = block(x)
                continue
            x = checkpoint(block, x, use_reentrant=False, context_fn=partial(_contexts, block))
        return x


def add_blurpool(model: nn.Module) -> None:
    """Blur before each convolution with a stride, except on the three colour channels."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d) and max(child.stride) > 1 and child.in_channels > 3:
                setattr(parent, name, _blurred(child))


def forget_activations(model: nn.Module) -> None:
    """Give up the activations inside the blocks of a ResNet's four stages.

    Raises:
        ValueError: The model has no such stages.
    """
    for name in STAGES:
        stage = getattr(model, name, None)
        if not isinstance(stage, nn.Sequential):
            raise ValueError(  # noqa: TRY004 - the user's choice of model, not a slip in a call
                f"--grad-checkpoint needs a ResNet: {type(model).__name__} has no stage {name}"
            )
        setattr(model, name, ForgettingStage(*stage))


def _blurred(plain: nn.Conv2d) -> BlurConv2d:
    blurred = BlurConv2d(
        plain.in_channels,
        plain.out_channels,
        plain.kernel_size,  # type: ignore[arg-type] # of this length, which nn.Conv2d does not say
        plain.stride,  # type: ignore[arg-type]
        plain.padding,  # type: ignore[arg-type]
        plain.dilation,  # type: ignore[arg-type]
        plain.groups,
        plain.bias is not None,
        device="meta",
    )
    blurred.weight, blurred.bias = plain.weight, plain.bias
    row = torch.tensor([1.0, 2.0, 1.0], device=plain.weight.device) / 4
    kernel = torch.outer(row, row).repeat(plain.in_channels, 1, 1, 1)
    blurred.register_buffer("blur", kernel, persistent=False)  # no weight: stays out of the files
    return blurred


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Give the contexts of a block's first and second pass."""
    return nullcontext(), _statistics_alone(block)


@contextmanager
def _statistics_alone(block: nn.Module) -> Iterator[None]:
    """Let BatchNorm use the statistics of the batch without adding them to the running ones."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    running = [dict(norm.named_buffers(recurse=False)) for norm in norms]
    for norm, buffers in zip(norms, running, strict=True):
        for name, buffer in buffers.items():
            setattr(norm, name, buffer.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, running, strict=True):
            for name, buffer in buffers.items():
                setattr(norm, name, buffer)
