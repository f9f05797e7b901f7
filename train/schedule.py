"""Learning rate and crop size as pure functions: nothing to save, nothing to restart on resume."""

from __future__ import annotations

import math


def lr_at(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int,
    peak_lr: float,
    final_lr: float,
    schedule: str = "cosine",
    drop_steps: int = 1,
) -> float:
    """Give the learning rate of one step: a linear rise, then what `schedule` names.

    The last warmup step has exactly `peak_lr` (the first step without warmup); the last step of the
    run has exactly `final_lr` under `cosine` and `linear`. The rate belongs to the step's number in
    the run, also when a loss scaler left out the update.

    Args:
        step: 0-based over the whole run.
        total_steps: Steps of the whole run.
        warmup_steps: Steps of the rise, fewer than `total_steps`.
        peak_lr: Highest rate.
        final_lr: Rate of the last step of `cosine` and `linear`.
        schedule: `cosine` (SGDR without restarts, arXiv 1608.03983), `linear` (as ffcv-imagenet's
            cyclic ramp) or `step` (a tenth after every `drop_steps`, as torchvision's StepLR).
        drop_steps: Steps between two drops of `step`, counted from the run's start.

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
    if schedule == "step":
        return peak_lr * 0.1 ** (step // drop_steps)
    peak_step = max(warmup_steps - 1, 0)
    progress = (step - peak_step) / max(total_steps - 1 - peak_step, 1)
    if schedule == "linear":
        return peak_lr + (final_lr - peak_lr) * progress
    return final_lr + (peak_lr - final_lr) * (1 + math.cos(math.pi * progress)) / 2


def scaled_lr(lr_per_256: float, global_batch_size: int) -> float:
    """Scale a rate meant for 256 images a step linearly (Goyal et al., arXiv 1706.02677)."""
    return lr_per_256 * global_batch_size / 256


def crop_size_at(epoch: int, *, start: int, end: int, ramp_start: int, ramp_end: int) -> int:
    """Give the side of the training crop in one epoch, as ffcv-imagenet resizes progressively.

    Sizes between the two ends are rounded to a multiple of the largest power of two, up to the 32
    of a ResNet's stride, that divides both.

    Args:
        epoch: 0-based.
        start: Side up to and including epoch `ramp_start`, in pixels.
        end: Side from epoch `ramp_end` on, in pixels.
        ramp_start: 0-based epoch.
        ramp_end: 0-based epoch, at least `ramp_start`.
    """
    if epoch >= ramp_end:
        return end
    if epoch <= ramp_start:
        return start
    unit = math.gcd(start, end, 32)
    exact = start + (end - start) * (epoch - ramp_start) / (ramp_end - ramp_start)
    return unit * round(exact / unit)
