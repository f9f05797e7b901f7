"""Continue a run exactly where a checkpoint left it, or say why that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
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
        *("out", "shards", "src", "recipe", "weights", "resume"),
        *("stop_after_steps", "checkpoint_every_steps"),
        *("num_threads", "num_workers", "prefetch"),
        *("device", "amp", "amp_dtype", "channels_last", "precision"),
        *("lr", "peak_lr", "final_lr", "warmup_epochs"),
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


def refuse_changes(
    checkpoint: Checkpoint,
    resolved: Mapping[str, Any],
    wnids: tuple[str, ...],
    identity: Mapping[str, Any],
) -> None:
    """Compare a run with the one that its checkpoint is of.

    Raises:
        ValueError: A setting that makes it another run differs, or the training data do.
    """
    flags = {field.name: flag(field.name) for field in fields(FitConfig)}
    for name, now in resolved.items():
        before = checkpoint.config.get(name)
        if name not in FREE_ON_RESUME and before != now:
            raise ValueError(
                f"cannot resume: {flags.get(name, name.replace('_', ' '))} was {before!r}, "
                f"now {now!r}; give the old value, another --out, or --resume none"
            )
    if checkpoint.wnids != list(wnids) or checkpoint.data != identity:
        raise ValueError(
            f"cannot resume: the training data are others than before ({checkpoint.data!r}, "
            f"now {identity!r}); give the old ones, another --out, or --resume none"
        )


def random_states(device: torch.device) -> dict[str, Any]:
    """Take the random states of this rank."""
    states: dict[str, Any] = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_learner(learner: Learner, model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put weights, optimizer and scaler back, also on another device than they were saved on."""
    model.load_state_dict(checkpoint.model)
    learner.optimizer.load_state_dict(checkpoint.optimizer)
    for group in learner.optimizer.param_groups:
        group["fused"] = learner.precision.device.type == "cuda"
    if checkpoint.scaler and learner.scaler.is_enabled():
        learner.scaler.load_state_dict(checkpoint.scaler)


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
