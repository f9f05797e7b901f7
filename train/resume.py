"""Continue a run exactly where a checkpoint left it, or say why that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

import torch
from torch import nn

from prep.files import local_path
from train.checkpoint import Checkpoint, load_checkpoint
from train.config import FitConfig, flag
from train.loop import EpochState, Learner

# Options that a resumed run may change: none of them alters which samples come when, what the
# optimizer holds, or how the figures compare. Any other one is refused.
FREE_ON_RESUME: Final = frozenset(
    {
        *("out", "shards", "src", "recipe", "weights", "zero_init"),
        *("resume", "resume_anyway", "stop_after_steps", "checkpoint_every_steps", "keep"),
        *("num_threads", "num_workers", "prefetch"),
        *("device", "amp", "amp_dtype", "channels_last", "precision", "compile"),
        *("grad_checkpoint", "lr", "peak_lr", "final_lr", "schedule", "warmup_epochs"),
        *("lr_step_epochs", "on_nan", "max_rollbacks", "log_every_steps", "tensorboard"),
        *("one_card_img_per_s", "dry_run", "find_batch_size", "smoke"),
    }
)


def find_checkpoint(config: FitConfig) -> Checkpoint | None:
    """Load what `--resume` names, or `last.pt` of the run folder; None to start afresh."""
    if config.resume == "none":
        return None
    last = local_path(config.out) / "last.pt"
    if config.resume == "auto":
        return load_checkpoint(last) if last.is_file() else None
    return load_checkpoint(local_path(config.resume))


def is_same_run(
    checkpoint: Checkpoint,
    resolved: Mapping[str, Any],
    wnids: tuple[str, ...],
    identity: Mapping[str, Any],
    *,
    anyway: Callable[[str], None] | None,
) -> bool:
    """Compare a run with the one that its checkpoint is of.

    Args:
        checkpoint: To continue from.
        resolved: Settings of now.
        wnids: Classes of now.
        identity: Training data of now.
        anyway: Where given, takes the differences, and the run may continue as another one.

    Raises:
        ValueError: A setting that makes it another run differs, or the data do.
    """
    if checkpoint.wnids != list(wnids):
        raise ValueError(
            f"cannot resume: the checkpoint is for {len(checkpoint.wnids)} classes, the data have "
            f"{len(wnids)}, or others; give another --out, and --weights with the checkpoint"
        )
    found = _differences(checkpoint, resolved, identity)
    if found and anyway is None:
        raise ValueError(
            f"cannot resume: {'; '.join(found)}; give the old value, another --out, "
            "--resume none to start over, or --resume-anyway"
        )
    if found and anyway is not None:
        anyway(f"resumes as another run, at the start of an epoch: {'; '.join(found)}")
    return not found


def _differences(
    checkpoint: Checkpoint, resolved: Mapping[str, Any], identity: Mapping[str, Any]
) -> list[str]:
    flags = {field.name: flag(field.name) for field in fields(FitConfig)}
    found = [
        f"{flags.get(name, name.replace('_', ' '))} was {checkpoint.config.get(name)!r}, "
        f"now {now!r}"
        for name, now in resolved.items()
        if name not in FREE_ON_RESUME and checkpoint.config.get(name) != now
    ]
    if checkpoint.data != identity:
        found.append(
            f"the training data are others than before ({checkpoint.data!r}, now {identity!r})"
        )
    return found


def random_states(device: torch.device) -> dict[str, Any]:
    """Take the random states of this rank."""
    states: dict[str, Any] = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng_cuda"] = torch.cuda.get_rng_state(device)
    return states


def learner_state(learner: Learner, model: nn.Module) -> dict[str, Any]:
    """Take weights, their average, optimizer, scaler and what is left of the rate."""
    return {
        "model": model.state_dict(),
        "ema": None if learner.ema is None else learner.ema.module.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "lr_factor": learner.lr_factor,
    }


def restore_learner(learner: Learner, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put weights, their average, optimizer and scaler back, on whatever device they are now.

    Momentum and decay stay those of the options, which differ only with --resume-anyway.
    """
    model.load_state_dict(checkpoint.model)
    groups = learner.optimizer.param_groups
    own = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    learner.optimizer.load_state_dict(checkpoint.optimizer)
    for group, settings in zip(learner.optimizer.param_groups, own, strict=True):
        group.update(settings)
    if checkpoint.scaler and learner.scaler.is_enabled():
        learner.scaler.load_state_dict(checkpoint.scaler)
    learner.lr_factor = checkpoint.lr_factor
    if learner.ema is not None:
        learner.ema.module.load_state_dict(checkpoint.ema or checkpoint.model)


def restore_epoch(state: EpochState, checkpoint: Checkpoint, rank: int) -> None:
    """Put the random states and the running sums of a rank back."""
    own = checkpoint.ranks[rank]
    device = state.loss_sum.device
    torch.set_rng_state(own["rng_cpu"])
    if device.type == "cuda" and "rng_cuda" in own:
        torch.cuda.set_rng_state(own["rng_cuda"], device)
    state.epoch, state.step = checkpoint.epoch, checkpoint.step
    state.loss_sum.fill_(own["loss_sum"])
    for name in ("num_images", "seconds", "data_wait_s", "num_damaged"):
        setattr(state, name, own[name])
