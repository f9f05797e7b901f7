"""Runs in memory that several tests share; `from runs import ...`."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from helpers import PROJECT
from train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from train.config import FitConfig
from train.fit import fit_sources
from train.memory import TensorSource
from train.metrics import CsvLog, EpochRow, StepRow
from train.model import build_model
from train.run import FitResult
from train.world import joined, read_world

WNIDS = ("n01", "n02", "n03")
TIMES = ("seconds", "img_per_s", "data_wait_pct")


def plain_net() -> nn.Sequential:
    """A small net with BatchNorm, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def net() -> nn.Module:
    """A small net whose dropout draws from the random state that must be restored."""
    *body, head = plain_net()
    return nn.Sequential(*body, nn.Dropout(0.2), head)


class Wide(nn.Module):
    """Casts its input to float64, as the layers after it are."""

    def forward(self, images: Tensor) -> Tensor:
        return images.double()


def wide_net() -> nn.Module:
    """A net in float64 without BatchNorm or dropout: what is summed in another order agrees."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(Wide(), *(layer.double() for layer in layers))


def source(split: str, num_samples: int = 22, **options: Any) -> TensorSource:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(num_samples) % 3
    images = torch.randint(0, 100, (num_samples, 3, 12, 12), generator=generator)
    images[torch.arange(num_samples), labels] += 120
    settings: dict[str, Any] = {"wnids": WNIDS, "batch_size": 4} | options
    return TensorSource(images.to(torch.uint8), labels, split, **settings)


def config(out: Path, **changes: Any) -> FitConfig:
    settings: dict[str, Any] = {
        "out": out,
        "src": Path("in memory"),
        "epochs": 3,
        "warmup_epochs": 1.0,
        "batch_size": 4,
        "lr": 3.0,
        "train_crop_size": 12,
        "val_crop_size": 12,
        "val_resize_size": 12,
        "device": "cpu",
    }
    return FitConfig(**(settings | changes))


def run(out: Path, say: Callable[[str], None] = lambda _: None, **changes: Any) -> FitResult:
    return fit_sources(config(out, **changes), source("train"), source("val"), say, model=net())


def weights(out: Path, name: str = "last.pt") -> dict[str, Tensor]:
    return load_checkpoint(out / name).model


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


def rows(out: Path, name: str = "log.csv") -> list[dict[str, str]]:
    with (out / name).open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def run_as_rank(out: Path, **changes: Any) -> None:
    """Train `wide_net` as one of the ranks that the environment tells of."""
    world, device = read_world(), torch.device("cpu")
    options = config(out, **changes)
    place = {"rank": world.rank, "world_size": world.world_size}
    train, val = (
        source(split, batch_size=options.batch_size, **place) for split in ("train", "val")
    )
    with joined(world, device):
        fit_sources(options, train, val, print, model=wide_net(), world=world, device=device)


EPOCH = EpochRow(
    epoch=1,
    step=10,
    lr=0.1,
    train_loss=1.5,
    val_loss=1.25,
    top1_pct=50.0,
    top5_pct=87.5,
    crop_size=64,
    seconds=3.0,
    img_per_s=120.0,
    data_wait_pct=1.0,
    num_damaged=0,
)
STEP = StepRow(epoch=1, step=5, lr=0.05, loss=2.2, img_per_s=110.0, data_wait_pct=2.0)


def write_logs(folder: Path, num_epochs: int = 3, **changes: float) -> Path:
    """Write the logs of a run of 10 steps an epoch, with a row every 5 steps."""
    folder.mkdir(parents=True)
    log = CsvLog(folder / "log.csv", EpochRow, lambda _row: False)
    steps = CsvLog(folder / "steps.csv", StepRow, lambda _row: False)
    for number in range(2 * max(num_epochs, 1)):
        steps.append(replace(STEP, epoch=1 + number // 2, step=5 * number + 5))
    for epoch in range(1, num_epochs + 1):
        log.append(replace(EPOCH, epoch=epoch, step=10 * epoch, **changes))  # type: ignore[arg-type]
    return folder


COLOUR_WNIDS = ["n00", "n01", "n02"]
COLOUR_NAMES = ["red, crimson", "green", "n02"]
RED, GREEN, BLUE = (200, 50, 50), (50, 200, 50), (50, 50, 200)


def colour_state() -> dict[str, Any]:
    """Weights of a ResNet-18 that hands the three channels' brightness through to its scores."""
    state = build_model("resnet18", 3).state_dict()
    for name, value in state.items():
        if value.ndim == 4 or name.startswith("fc."):
            value.zero_()
        for channel in range(3):
            if name == "conv1.weight":
                value[channel, channel, 3, 3] = 1
            elif name.endswith("downsample.0.weight"):
                value[channel, channel, 0, 0] = 1
            elif name == "fc.weight":
                value[channel, channel] = 8
    state["bn1.bias"].fill_(3)  # no normalised pixel is below -3, where ReLU would cut
    return dict(state)


def swapped_state() -> dict[str, Any]:
    """The same, but green and blue are taken for each other."""
    state = colour_state()
    state["fc.weight"] = state["fc.weight"][[0, 2, 1]]
    return state


def colour_checkpoint(
    path: Path,
    ema: dict[str, Any] | None = None,
    *,
    state: dict[str, Any] | None = None,
    **run: Any,
) -> Path:
    """Save a checkpoint of a 3-class ResNet-18 at 32 pixels; `run` changes its options."""
    config = {"model": "resnet18", "blurpool": False, "val_flip": False}
    config |= {"val_crop_size": 32, "val_resize_size": 36}
    checkpoint = Checkpoint(
        epoch=1,
        step=0,
        model=colour_state() if state is None else state,
        optimizer={},
        scaler={},
        ema=ema,
        best_top1_pct=50.0,
        ranks=[],
        config=config | run,
        wnids=COLOUR_WNIDS,
        class_names=COLOUR_NAMES,
        data={},
    )
    save_checkpoint(path, checkpoint)
    return path


def picture(colour: tuple[int, int, int], height: int = 40, width: int = 48) -> Image.Image:
    return Image.fromarray(np.full((height, width, 3), colour, np.uint8))


@contextmanager
def ranks(*arguments: str, world_size: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `python -W error ARGUMENTS` once a rank; none outlives the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = os.pathsep.join([str(PROJECT), str(PROJECT / "tests")])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        for rank in range(world_size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()
