"""Parts of a run made from its options: sources, precision, learner and record."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prep.files import local_path, write_text_whole
from prep.sources import Source, open_source
from train.config import EvalConfig, FitConfig, to_dict
from train.loop import BatchSource, EpochState, Learner, Precision, Scores
from train.metrics import EpochRow
from train.model import parameter_groups
from train.raw import RawLoader
from train.schedule import lr_at, scaled_lr
from train.world import World, sum_over_ranks

Say = Callable[[str], None]

PACKAGES = ("torch", "torchvision", "numpy", "simplejpeg")


def choose_precision(config: FitConfig | EvalConfig, device: torch.device) -> Precision:
    """Resolve `--amp` and `--amp-dtype` for a device.

    Raises:
        ValueError: float16 is asked for on the CPU.
    """
    on_cuda = device.type == "cuda"
    amp = on_cuda if config.amp is None else config.amp
    channels_last = on_cuda if config.channels_last is None else config.channels_last
    amp_dtype = _half_type(config.amp_dtype, device) if amp else None
    return Precision(device=device, amp_dtype=amp_dtype, channels_last=channels_last)


def resolve(
    config: FitConfig, train: BatchSource, world: World, precision: Precision
) -> dict[str, Any]:
    """Give the options of a run and what follows from them, as plain values."""
    global_batch_size = config.batch_size * world.world_size
    half = precision.amp_dtype
    return to_dict(config) | {
        "world_size": world.world_size,
        "global_batch_size": global_batch_size,
        "peak_lr": scaled_lr(config.lr, global_batch_size),
        "steps_per_epoch": train.steps_per_epoch,
        "precision": "float32" if half is None else str(half).removeprefix("torch."),
    }


def new_learner(
    config: FitConfig, model: nn.Module, precision: Precision, world: World, num_steps: int
) -> Learner:
    """Give a model on its device an optimizer, a rate for each step and, if need be, ranks.

    Args:
        num_steps: Steps of one epoch.
    """
    on_cuda = precision.device.type == "cuda"
    peak_lr = scaled_lr(config.lr, config.batch_size * world.world_size)
    optimizer = torch.optim.SGD(
        parameter_groups(model, config.weight_decay),
        lr=peak_lr,
        momentum=config.momentum,
        fused=on_cuda,
    )
    if world.world_size > 1:
        model = DistributedDataParallel(
            model, device_ids=[precision.device] if on_cuda else None, gradient_as_bucket_view=True
        )
    return Learner(
        model=model,
        optimizer=optimizer,
        scaler=precision.grad_scaler(),
        precision=precision,
        lr_at=partial(
            lr_at,
            total_steps=config.epochs * num_steps,
            warmup_steps=int(config.warmup_epochs * num_steps),
            peak_lr=peak_lr,
            final_lr=config.final_lr,
        ),
        label_smoothing=config.label_smoothing,
    )


def list_raw(config: FitConfig | EvalConfig) -> Source | None:
    """List the raw folder, if `--src` names one; once for both splits."""
    return None if config.src is None else open_source(config.src)


def open_train(config: FitConfig, world: World, raw: Source | None) -> BatchSource:
    """Open the train split of `--shards`, or of a listed raw folder."""
    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "crop_size": config.train_crop_size,
        "num_workers": config.num_workers,
        "prefetch": config.prefetch,
        "seed": config.seed,
        "rank": world.rank,
        "world_size": world.world_size,
    }
    if config.samples_per_class is not None:
        shared["samples_per_class"] = config.samples_per_class
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
    config: FitConfig | EvalConfig,
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
        f"{val.num_samples} to evaluate, {train.steps_per_epoch} steps an epoch, "
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


def _half_type(name: str, device: torch.device) -> torch.dtype:
    if name == "float16" and device.type == "cpu":
        raise ValueError("--amp-dtype float16 needs a CUDA device; on the CPU give bfloat16")
    if name == "float16" or (
        name == "auto" and device.type == "cuda" and not torch.cuda.is_bf16_supported()
    ):
        return torch.float16
    return torch.bfloat16


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


def epoch_row(
    state: EpochState,
    scores: Scores,
    *,
    train_loss: float,
    val_seconds: float,
    lr: float,
    num_steps: int,
    world: World,
) -> EpochRow:
    """Give the log's row of a finished epoch; counts are summed over the ranks."""
    counts = torch.tensor([state.num_images, state.num_damaged], device=state.loss_sum.device)
    num_images, num_damaged = sum_over_ranks(counts, world).tolist()
    seconds = max(state.seconds, 1e-9)
    return EpochRow(
        epoch=state.epoch + 1,
        step=(state.epoch + 1) * num_steps,
        lr=lr,
        train_loss=train_loss,
        val_loss=scores.loss,
        top1_pct=scores.top1_pct,
        top5_pct=scores.top5_pct,
        seconds=state.seconds + val_seconds,
        img_per_s=num_images / seconds,
        data_wait_pct=100 * state.data_wait_s / seconds,
        num_damaged=num_damaged,
    )
