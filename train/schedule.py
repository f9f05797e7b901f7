"""Learning rate as a pure function of the step: nothing to save, nothing to restart on resume."""

from __future__ import annotations

import math


def lr_at(
    step: int, *, total_steps: int, warmup_steps: int, peak_lr: float, final_lr: float
) -> float:
    """Give the learning rate of one step: a linear rise, then half a cosine.

    The last warmup step has exactly `peak_lr` (the first step without warmup) and the last step
    of the run exactly `final_lr`. The rate belongs to the step's number in the run, also when a
    loss scaler left out the update.

    Args:
        step: 0-based over the whole run.
        total_steps: Steps of the whole run.
        warmup_steps: Steps of the rise, fewer than `total_steps`.
        peak_lr: Highest rate.
        final_lr: Rate of the last step.

    Raises:
        ValueError: Step or warmup lie outside the run.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup must last from 0 to {total_steps - 1} of {total_steps} steps, "
            f"got {warmup_steps}; lower --warmup-epochs or raise --epochs"
        )
    if not 0 <= step < total_steps:
        raise ValueError(f"step must lie in 0..{total_steps - 1}, got {step}")
    if step < warmup_steps:
        return peak_lr * ((step + 1) / warmup_steps)
    peak_step = max(warmup_steps - 1, 0)
    progress = (step - peak_step) / max(total_steps - 1 - peak_step, 1)
    return final_lr + (peak_lr - final_lr) * (1 + math.cos(math.pi * progress)) / 2


def scaled_lr(lr_per_256: float, global_batch_size: int) -> float:
    """Scale a rate meant for 256 images a step linearly (Goyal et al., arXiv 1706.02677)."""
    return lr_per_256 * global_batch_size / 256
