"""Checkpoints that appear whole or not at all and hold what it takes to continue exactly."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from prep.files import shown, write_whole
from train.model import build_model

FORMAT_VERSION: Final = 2


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """State of a run between two steps. Tensors and plain values only: `weights_only` loads it."""

    epoch: int
    """Epochs finished, which is the 0-based number of the running one."""
    step: int
    """Steps done of the running epoch."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    ema: dict[str, Any] | None = None
    """Averaged weights, named as those of `model`; None without --ema-decay."""
    lr_factor: float = 1.0
    """What is left of the rate after rollbacks."""
    num_rollbacks: int = 0
    best_top1_pct: float
    """Highest so far, -1 before the first evaluation."""
    kept: dict[str, float] = field(default_factory=dict)
    """Top-1 in percent by name of each file that --keep holds beside best.pt."""
    ranks: list[dict[str, Any]]
    """For each rank its random states and what it summed up in the running epoch."""
    config: dict[str, Any]
    """Resolved options of the run, `world_size` and `steps_per_epoch` among them."""
    wnids: list[str]
    """Classes in label order."""
    class_names: list[str]
    """Readable names in label order; the wnid where there is none."""
    data: dict[str, Any]
    """What the samples were: number, and a hash of the index or listing."""


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; at any kill or full disk the file of before is still there, whole.

    Raises:
        OSError: It could not be written or renamed; the temporary sibling is removed.
    """
    content = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    try:
        write_whole(path, lambda file: torch.save({"format": FORMAT_VERSION, **content}, file))
    except RuntimeError as error:  # torch's zip writer wraps a full disk
        raise OSError(
            f"{shown(path)}: checkpoint not written ({error}); the one before stays"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint to the CPU.

    Raises:
        ValueError: The file is missing, damaged, or no checkpoint of this version.
    """
    if not path.is_file():
        raise ValueError(f"{shown(path)}: no such checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many classes for damaged files
        raise ValueError(
            f"{shown(path)}: damaged, or not a checkpoint; use another with --resume"
        ) from error
    names = {f.name for f in fields(Checkpoint)}
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT_VERSION:
        raise ValueError(f"{shown(path)}: not a checkpoint of format {FORMAT_VERSION}")
    if set(content) != names:
        raise ValueError(f"{shown(path)}: lacks or adds {sorted(names ^ set(content))!r}")
    return Checkpoint(**content)


def best_of(kept: dict[str, float], count: int) -> tuple[dict[str, float], list[str]]:
    """Rank files by their score, the earlier name first among equals.

    Returns:
        The `count` best with their scores, and the names of the others.
    """
    ranking = sorted(kept, key=lambda name: (-kept[name], name))
    return {name: kept[name] for name in ranking[:count]}, ranking[count:]


def takes_average(checkpoint: Checkpoint, ema: bool | None) -> bool:
    """Tell whether `--ema`, `--no-ema` or neither means the averaged weights of a checkpoint."""
    return checkpoint.ema is not None and ema is not False


def trained_network(checkpoint: Checkpoint, *, ema: bool | None = None) -> nn.Module:
    """Build the network of a checkpoint, on the CPU and in evaluation mode.

    Args:
        checkpoint: As loaded.
        ema: Take the averaged weights; None takes them where there are some.

    Raises:
        ValueError: Averaged weights are asked for and not there.
    """
    if ema and checkpoint.ema is None:
        raise ValueError("--ema: the checkpoint holds no averaged weights (--ema-decay makes them)")
    state = checkpoint.ema if takes_average(checkpoint, ema) else None
    config = checkpoint.config
    network = build_model(config["model"], len(checkpoint.wnids), blurpool=config["blurpool"])
    network.load_state_dict(state or checkpoint.model)
    return network.eval()
