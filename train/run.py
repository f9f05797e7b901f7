"""Parts of a run made from its options: sources, resolved settings and record."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from prep.files import local_path, write_text_whole
from prep.sources import Source, open_source
from train.config import FitConfig, InputConfig, to_dict
from train.feed import BatchSource
from train.loop import num_steps_of
from train.precision import Precision
from train.raw import RawLoader
from train.schedule import crop_size_at, scaled_lr
from train.world import World

Say = Callable[[str], None]

PACKAGES = ("torch", "torchvision", "numpy", "simplejpeg")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """How a run ended."""

    num_epochs_done: int
    finished: bool
    """False after --stop-after-steps."""
    best_top1_pct: float
    """Of the averaged weights, where there are some."""
    num_steps: int
    """Steps made by this start."""


def resolve(
    config: FitConfig, train: BatchSource, world: World, precision: Precision
) -> dict[str, Any]:
    """Give the options of a run and what follows from them, as plain values."""
    images_a_step = config.images_a_step(world.world_size)
    return to_dict(config) | {
        "world_size": world.world_size,
        "global_batch_size": images_a_step,
        "peak_lr": scaled_lr(config.lr, images_a_step),
        "steps_per_epoch": num_steps_of(train, config.grad_accum),
        "precision": str(precision),
    }


def train_crop_size(config: FitConfig, epoch: int) -> int:
    """Give the side of the training crop in an epoch, in pixels."""
    if config.crop_size_start is None:
        return config.train_crop_size
    return crop_size_at(
        epoch,
        start=config.crop_size_start,
        end=config.train_crop_size,
        ramp_start=config.crop_ramp_start,
        ramp_end=config.crop_ramp_end,
    )


def list_raw(config: InputConfig) -> Source | None:
    """List the raw folder, if `--src` names one; once for both splits."""
    return None if config.src is None else open_source(config.src)


def open_train(config: FitConfig, world: World, raw: Source | None) -> BatchSource:
    """Open the train split of `--shards`, or of a listed raw folder."""
    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "crop_size": partial(train_crop_size, config),
        "num_workers": config.num_workers,
        "prefetch": config.prefetch,
        "seed": config.seed,
        "rank": world.rank,
        "world_size": world.world_size,
        "samples_per_class": config.samples_per_class,
    }
    if raw is not None:
        return RawLoader(raw, "train", **shared)
    return _open_shards(
        config.shards,
        "train",
        num_threads=config.num_threads,
        window_mb=config.window_mb,
        **shared,
    )


def open_val(
    config: InputConfig,
    world: World,
    raw: Source | None,
    crop_size: int,
    resize_size: int,
) -> BatchSource:
    """Open the val split of `--shards`, or of a listed raw folder."""
    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "crop_size": crop_size,
        "resize_size": resize_size,
        "num_workers": config.num_workers,
        "prefetch": config.prefetch,
        "rank": world.rank,
        "world_size": world.world_size,
        "samples_per_class": config.val_samples_per_class,
    }
    if raw is not None:
        return RawLoader(raw, "val", **shared)
    return _open_shards(config.shards, "val", num_threads=config.num_threads, **shared)


def refuse_sources(config: FitConfig, train: BatchSource, val: BatchSource, world: World) -> None:
    """Check that two splits belong together and are enough.

    Raises:
        ValueError: Their classes differ, or training has less than one global batch.
    """
    if train.wnids != val.wnids:
        raise ValueError("train and val have different classes; labels would be shifted")
    if train.steps_per_epoch < 1:
        raise ValueError(
            f"--batch-size {config.batch_size} on {world.world_size} ranks is more than the "
            f"{train.num_samples} training images; lower it"
        )


def describe(
    resolved: dict[str, Any],
    train: BatchSource,
    val: BatchSource,
    device: torch.device,
    place: str | None,
) -> str:
    """Give the first line of a run; `place` is where it continues, if it does."""
    return (
        f"{resolved['model']} on {device} ({device_name(device)}), {resolved['precision']}: "
        f"{train.num_samples} training images in {train.num_classes} classes, "
        f"{val.num_samples} to evaluate, {resolved['steps_per_epoch']} steps an epoch of "
        f"{resolved['global_batch_size']} images, "
        f"peak lr {resolved['peak_lr']:g}" + (f"; continues from {place}" if place else "")
    )


def identify(config: FitConfig, train: BatchSource) -> dict[str, Any]:
    """Say what the training samples are, to notice on resume that they are others."""
    identity: dict[str, Any] = {"num_samples": train.num_samples}
    if isinstance(train, RawLoader):
        identity["sha256"] = train.identity
    elif config.shards is not None:
        index = local_path(config.shards) / "index.json"
        identity["sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    return identity


def write_record(path: Path, resolved: dict[str, Any], device: torch.device) -> None:
    """Write `config.json`: resolved options, versions, device and commit."""
    record = {
        "config": resolved,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "platform": platform.platform(),
        "device": device_name(device),
        "commit": _commit(),
    }
    write_text_whole(path, json.dumps(record, indent=2) + "\n")


def device_name(device: torch.device) -> str:
    """Name of the card, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _open_shards(shards: Path | None, split: str, **settings: Any) -> BatchSource:
    from train.data import ShardLoader  # a raw run needs no shards

    if shards is None:
        raise RuntimeError("neither --shards nor --src reached the loader")
    return ShardLoader(shards, split, **settings)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
