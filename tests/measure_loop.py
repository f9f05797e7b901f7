"""What the training loop costs beyond the network.

python tests/measure_loop.py    milliseconds a step, on the CPU, and their share of a ResNet-18's

The loop is measured around a network that costs next to nothing, in turn with the five lines that
no loop can do without: around a real one, the noise of a shared machine is larger than the loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.config import FitConfig
from train.learner import new_learner, place_model
from train.loop import EpochState, Learner, train_epoch
from train.memory import TensorSource
from train.model import build_model
from train.precision import Precision, normalise
from train.world import World

TURNS, STEPS, BATCH_SIZE, SIZE, NUM_CLASSES = 9, 200, 32, 64, 10
PRECISION = Precision(device=torch.device("cpu"), channels_last=False)
Batches = Sequence[tuple[Tensor, Tensor]]


def learner_of(model: nn.Module) -> Learner:
    """Give a model the default recipe."""
    config = FitConfig(out=Path("x"), shards=Path("x"), batch_size=BATCH_SIZE, train_crop_size=SIZE)
    placed = place_model(config, model, PRECISION)
    return new_learner(config, placed, PRECISION, World(), num_steps=STEPS, num_classes=NUM_CLASSES)


def bare_steps(learner: Learner, batches: Batches) -> None:
    """Train in the fewest lines: what no loop can leave out."""
    learner.model.train()
    for images, labels in batches:
        loss = F.cross_entropy(learner.model(normalise(images, PRECISION)), labels)
        loss.backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)


def loop_steps(learner: Learner, source: TensorSource) -> None:
    """Train as `fit` does."""
    state = EpochState(epoch=0, loss_sum=torch.zeros((), dtype=torch.float64))
    train_epoch(learner, source, state, lambda _state: False)


def ms_a_step(run: Callable[[], Any], num_steps: int) -> float:
    """Give the processor time of one step, in milliseconds."""
    started = time.process_time()
    run()
    return 1000 * (time.process_time() - started) / num_steps


def spread(values: Sequence[float]) -> str:
    """Give the median and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure() -> None:
    """Print what a step costs bare and in the loop, and what it costs with a real network."""
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (BATCH_SIZE * STEPS, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.randint(0, NUM_CLASSES, (len(images),))
    source = TensorSource(images, labels, "train", wnids=tuple("abcdefghij"), batch_size=BATCH_SIZE)
    tiny = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, NUM_CLASSES))
    learner, real = learner_of(tiny), learner_of(build_model("resnet18", NUM_CLASSES))
    bare: list[float] = []
    loop: list[float] = []
    network: list[float] = []
    for turn in range(TURNS + 1):
        row = (
            ms_a_step(lambda: bare_steps(learner, list(source.epoch(0))), STEPS),
            ms_a_step(lambda: loop_steps(learner, source), STEPS),
            ms_a_step(lambda: bare_steps(real, list(source.epoch(0))[:3]), 3),
        )
        for values, value in zip((bare, loop, network), row, strict=True):
            if turn:  # the first turn warms up
                values.append(value)
    extra = [b - a for a, b in zip(bare, loop, strict=True)]
    share = [100 * a / b for a, b in zip(extra, network, strict=True)]
    print(f"next to no network, bare:    {spread(bare)} ms")
    print(f"next to no network, in loop: {spread(loop)} ms")
    print(f"the loop's own:              {spread(extra)} ms")
    print(f"ResNet-18, {SIZE} px, bare:       {spread(network)} ms")
    print(f"the loop's share of it:      {spread(share)} %")


if __name__ == "__main__":
    measure()
