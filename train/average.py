"""A moving average of weights, kept without waiting for the device."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Keeps a copy of a model whose weights and statistics follow it slowly.

    torch's AveragedModel does the same, but copies its counter to the device at each update, and so
    waits for it.

    Args:
        model: The bare module, on its device; its tensors must stay the same objects.
        decay: Share of the average that stays at an update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = deepcopy(model).eval().requires_grad_(False)
        self._mix = get_ema_multi_avg_fn(decay)
        own, others = ([*m.parameters(), *m.buffers()] for m in (self.module, model))
        self._pairs = list(zip(own, others, strict=True))
        self._floats = [pair for pair in self._pairs if pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, *, copy: bool) -> None:
        """Take a step towards the model, or become a copy of it. Whole numbers are copied."""
        for own, other in self._pairs:
            if copy or not own.is_floating_point():
                own.copy_(other)
        if not copy:
            averages, weights = (list(tensors) for tensors in zip(*self._floats, strict=True))
            self._mix(averages, weights, 0)
