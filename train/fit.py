"""Open what a run needs, run it, close it whatever happens."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import nn

from train import ladder
from train.config import FitConfig
from train.feed import BatchSource
from train.run import FitResult, Say, list_raw, open_train, open_val
from train.stop import StopSignal
from train.training import Run
from train.world import World, joined, pick_device, read_world


def fit(config: FitConfig, say: Say) -> FitResult:
    """Train from `--shards` or `--src`, from the first step or where a run was left.

    Args:
        config: Options.
        say: Takes the lines of the result; only called on rank 0.

    Raises:
        ValueError: Something that the user can mend.
        ConnectionError: Another rank ended.
        Interrupted: SIGTERM or Ctrl+C came; `last.pt` is saved.
    """
    world = read_world()
    device = pick_device(config.device, world)
    sizes = (config.val_crop_size, config.val_resize_size)
    raw = list_raw(config)
    with (
        joined(world, device),
        closing(open_train(config, world, raw)) as source,
        closing(open_val(config, world, raw, *sizes)) as val,
    ):
        return fit_sources(config, source, val, say, world=world, device=device)


def fit_sources(
    config: FitConfig,
    train: BatchSource,
    val: BatchSource,
    say: Say,
    *,
    model: nn.Module | None = None,
    world: World | None = None,
    device: torch.device | None = None,
) -> FitResult:
    """Train from two open sources, whatever they are.

    Args:
        config: Options.
        train: Batches to learn from.
        val: Batches to score on.
        say: Takes the lines of the result; only called on rank 0.
        model: Trained in place of the one that `config` names.
        world: This process alone without it.
        device: The CPU without it.

    Raises:
        ValueError: Something that the user can mend; out of memory with what to type.
    """
    world, device = world or World(), device or torch.device("cpu")
    with (
        ladder.explained(config, device),
        closing(Run(config, train, val, say, world, device)) as run,
        StopSignal() as stop,
    ):
        run.prepare(model)
        return run.train(stop)
