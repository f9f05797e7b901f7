"""What to do when the device's memory does not suffice."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from train.config import FitConfig
from train.feed import Batch
from train.learner import new_learner, new_model
from train.loop import train_step
from train.precision import Precision, choose_precision, set_fast_math
from train.run import Say
from train.world import World, pick_device, read_world

NUM_CLASSES = 1000
"""Of the network that `find_batch_size` tries; the head hardly matters."""
NUM_STEPS = 2
"""Steps to try: the second one has the optimizer's state in memory already."""


def ladder(config: FitConfig, device: torch.device) -> str:
    """Say which flags save memory, in the order to try them, without those already in use."""
    precision = choose_precision(config, device)
    half, groups = max(config.batch_size // 2, 1), config.grad_accum * 2
    rungs = []
    if precision.amp_dtype is None and device.type == "cuda":
        rungs.append("--amp")
    if config.batch_size > 1:
        rungs.append(f"--batch-size {half} --grad-accum {groups} (the same images a step)")
    if not precision.channels_last and device.type == "cuda":
        rungs.append("--channels-last")
    if not config.grad_checkpoint:
        rungs.append("--grad-checkpoint")
    rungs.append("a smaller --train-crop-size or --model")
    return ", ".join(f"({place}) {rung}" for place, rung in enumerate(rungs, 1))


@contextmanager
def explained(config: FitConfig, device: torch.device) -> Iterator[None]:
    """Tell, where memory runs out in the block, what to type.

    Raises:
        ValueError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory on {device} with --batch-size {config.batch_size}; try in this order: "
            f"{ladder(config, device)}. --find-batch-size tries sizes for you"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell torch's errors for a full card or full main memory from others."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        "DefaultCPUAllocator" in str(error) or "out of memory" in str(error).lower()
    )


def find_batch_size(config: FitConfig, say: Say) -> None:
    """Try steps of `--batch-size`, half of it and so on, on noise, until one fits.

    Args:
        config: Options.
        say: Takes a line for each size, and the flags to type.

    Raises:
        ValueError: Not even one image fits.
    """
    device = pick_device(config.device, read_world())
    precision = choose_precision(config, device)
    set_fast_math()
    size, groups = config.batch_size, config.grad_accum
    while size:
        try:
            peak = try_steps(config, precision, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            say(f"--batch-size {size}: out of memory")
            size, groups = size // 2, groups * 2
            continue
        say(f"--batch-size {size}: fits{peak}")
        say(f"type: --batch-size {size} --grad-accum {groups}  ({size * groups} images a step)")
        return
    raise ValueError(f"not even one image fits; try {ladder(config, device)}")


def try_steps(config: FitConfig, precision: Precision, batch_size: int) -> str:
    """Make steps on noise; gives the peak memory on a card, as text."""
    device = precision.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = new_model(config, NUM_CLASSES, precision, weights=None)
    _step_on_noise(config, model, precision, batch_size)
    if device.type != "cuda":
        return " (main memory; on a CPU this only finds sizes that fail at once)"
    peak = torch.cuda.max_memory_reserved(device) / 1e9
    return f", {peak:.1f} GB of {torch.cuda.get_device_properties(device).total_memory / 1e9:.1f}"


def _step_on_noise(
    config: FitConfig, model: nn.Module, precision: Precision, batch_size: int
) -> None:
    learner = new_learner(
        config, model, precision, World(), num_steps=NUM_STEPS * 100, num_classes=NUM_CLASSES
    )
    model.train()
    for step in range(NUM_STEPS):
        batch = noise(batch_size, config.train_crop_size, precision.device)
        train_step(learner, [batch], 1, step)


def noise(batch_size: int, crop_size: int, device: torch.device) -> Batch:
    """Give uint8 noise `(N, 3, S, S)` in channels_last memory, and random labels."""
    shape = (batch_size, 3, crop_size, crop_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    labels: Tensor = torch.randint(0, NUM_CLASSES, (batch_size,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels
