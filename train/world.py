"""Who am I of how many: the only reader of RANK, LOCAL_RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

TIMEOUT: Final = timedelta(minutes=10)
"""Longest that a rank waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Place of this process among all that train together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"WORLD_SIZE must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"RANK must lie in 0..{self.world_size - 1}, got {self.rank}")
        if not 0 <= self.local_rank < self.world_size:
            raise ValueError(f"LOCAL_RANK must lie in 0..{self.world_size - 1}: {self.local_rank}")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0


def read_world() -> World:
    """Read the place that `torchrun` gave this process; alone without it."""
    return World(
        rank=_read("RANK", 0),
        local_rank=_read("LOCAL_RANK", 0),
        world_size=_read("WORLD_SIZE", 1),
    )


def pick_device(name: str, world: World) -> torch.device:
    """Resolve `auto`, `cpu` or `cuda` to this rank's device.

    Raises:
        ValueError: CUDA is asked for and not there, or has fewer cards than local ranks.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        wheel = "a CPU-only torch is installed" if torch.version.cuda is None else "no usable card"
        raise ValueError(f"--device cuda: CUDA is not available ({wheel}); give --device cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK {world.local_rank} has no card: {torch.cuda.device_count()} found; "
            "start at most one process a card"
        )
    return torch.device("cuda", world.local_rank)


@contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """Join the process group for the block: NCCL for CUDA on Linux, gloo elsewhere.

    Raises:
        ConnectionError: Another rank ended, or did not answer for ten minutes.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.world_size == 1:
        yield
        return
    if sys.platform == "win32":
        os.environ.setdefault("USE_LIBUV", "0")  # torch's Windows wheels come without it
    use_nccl = device.type == "cuda" and distributed.is_nccl_available()
    distributed.init_process_group(
        "nccl" if use_nccl else "gloo",
        rank=world.rank,
        world_size=world.world_size,
        timeout=TIMEOUT,
    )
    try:
        yield
    except RuntimeError as error:
        if not _is_of_network(error):
            raise
        raise ConnectionError(
            f"rank {world.rank} of {world.world_size}: another rank ended or no longer answers; "
            "its own error stands above or in its own window. The same command continues"
        ) from error
    finally:
        distributed.destroy_process_group()


def _is_of_network(error: RuntimeError) -> bool:
    """Tell errors of the process group from others; gloo's have no class of their own."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out waiting")
    return isinstance(error, distributed.DistError) or any(word in text for word in words)


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Add up `values` of all ranks, in place; every rank gets the sum."""
    if world.world_size > 1:
        distributed.all_reduce(values)
    return values


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0, such as BatchNorm's running statistics.

    DistributedDataParallel does so before each training step; after the last one of an epoch they
    differ again, and ranks would score their shares with different models.
    """
    if world.world_size > 1:
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


def gather_from_ranks(value: Any, world: World) -> list[Any]:
    """Collect a small picklable `value` of each rank, in rank order, on every rank."""
    gathered = [value] * world.world_size
    if world.world_size > 1:
        distributed.all_gather_object(gathered, value)
    return gathered


def _read(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from error
