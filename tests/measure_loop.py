"""What the training loop costs beyond the network, and what loading adds.

python tests/measure_loop.py SHARDS    ResNet-18 at 64 px on the CPU: seconds a step, in turn
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from train.config import FitConfig
from train.data import ShardLoader
from train.feed import BatchSource
from train.learner import new_learner, new_model
from train.loop import EpochState, Learner, train_epoch
from train.memory import TensorSource
from train.precision import Precision, normalise
from train.world import World

TURNS, STEPS, BATCH_SIZE, SIZE = 9, 12, 32, 64
PRECISION = Precision(device=torch.device("cpu"), channels_last=False)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step."""

    cpu_s: float
    wall_s: float


def fresh_learner(num_classes: int) -> Learner:
    """Give a ResNet-18 of the default recipe."""
    config = FitConfig(
        out=Path("x"), shards=Path("x"), model="resnet18", batch_size=BATCH_SIZE, weight_decay=1e-4
    )
    model = new_model(config, num_classes, PRECISION, weights=None)
    return new_learner(
        config, model, PRECISION, World(), num_steps=STEPS * 100, num_classes=num_classes
    )


def bare_steps(learner: Learner, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Train in the fewest lines: what no loop can leave out."""
    learner.model.train()
    for images, labels in batches:
        loss = F.cross_entropy(learner.model(normalise(images, PRECISION)), labels)
        loss.backward()
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)


def loop_steps(learner: Learner, source: BatchSource) -> None:
    """Train as `fit` does."""
    state = EpochState(epoch=0, loss_sum=torch.zeros((), dtype=torch.float64))
    train_epoch(learner, source, state, lambda now: now.step == STEPS)


def cost_of(steps: Callable[[], None]) -> Cost:
    """Time some steps, on all threads of this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    steps()
    return Cost((time.process_time() - cpu) / STEPS, (time.perf_counter() - wall) / STEPS)


def measure(shards: Path) -> None:
    """Print what a step costs: bare, in the loop from tensors, in the loop from shards."""
    torch.set_num_threads(1)
    loader = ShardLoader(shards, "train", batch_size=BATCH_SIZE, crop_size=SIZE, num_threads=1)
    learner = fresh_learner(loader.num_classes)
    batches = [batch for batch, _ in zip(loader.epoch(0), range(STEPS), strict=False)]
    images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    tensors = TensorSource(images, labels, "train", wnids=loader.wnids, batch_size=BATCH_SIZE)
    contenders: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare_steps(learner, batches),
        "loop, from tensors": lambda: loop_steps(learner, tensors),
        "loop, from shards": lambda: loop_steps(learner, loader),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for turn in range(TURNS + 1):
        for name, steps in contenders.items():
            cost = cost_of(steps)
            if turn:  # the first turn warms up
                costs[name].append(cost)
    for name, found in costs.items():
        cpu = statistics.median(cost.cpu_s for cost in found)
        wall = statistics.median(cost.wall_s for cost in found)
        over = [a.cpu_s / b.cpu_s - 1 for a, b in zip(found, costs["bare"], strict=True)]
        print(
            f"{name:20s} {1000 * wall:6.1f} ms a step, {1000 * cpu:6.1f} ms of processor time, "
            f"{100 * statistics.median(over):+.1f} % ({100 * min(over):+.1f} to "
            f"{100 * max(over):+.1f})"
        )
    loader.close()


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
