"""Which rank reads which sample when: a pure function of the table, the seed and the epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FIRST_WINDOW_PART = 64
"""The first window of an epoch is this part of a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank reads in one epoch."""

    ids: Ids
    """`(n,)` sample numbers, rows of the split's table, in reading order."""
    windows: Ids
    """`(n,)` for each of them the number of its window, ascending."""
    batch_size: int

    @property
    def num_steps(self) -> int:
        """Count the batches; the last may be short in evaluation."""
        return -(-len(self.ids) // self.batch_size)

    def from_step(self, step: int) -> Share:
        """Give what is left once `step` batches were read."""
        start = step * self.batch_size
        return Share(ids=self.ids[start:], windows=self.windows[start:], batch_size=self.batch_size)

    def every(self, num_workers: int, worker: int) -> Share:
        """Give the batches `worker`, `worker + num_workers`, ... of this share."""
        mine = np.arange(len(self.ids)) // self.batch_size % num_workers == worker
        return Share(ids=self.ids[mine], windows=self.windows[mine], batch_size=self.batch_size)


def num_train_steps(num_samples: int, batch_size: int, world_size: int) -> int:
    """Count the full batches that each rank gets; the remainder of the global batch is dropped.

    Raises:
        ValueError: There are fewer samples than one batch on each rank takes.
    """
    steps = num_samples // (batch_size * world_size)
    if steps == 0:
        raise ValueError(
            f"{num_samples} training samples are fewer than one batch of {batch_size} on each of "
            f"{world_size} ranks: lower --batch-size to at most {num_samples // world_size}"
        )
    return steps


def window_of_shard(shard_bytes: NDArray[np.int64], window_bytes: int) -> Ids:
    """Group shards, in the order given, into windows of at most `window_bytes`.

    A shard that is larger than a window makes one of its own. The first windows are small and each
    may be twice the one before, so that an epoch begins after one shard is read.

    Returns:
        `(num_shards,)` window numbers, ascending from 0.
    """
    windows = np.empty(len(shard_bytes), np.int64)
    window, filled, limit = 0, 0, window_bytes // FIRST_WINDOW_PART
    for place, size in enumerate(shard_bytes.tolist()):
        if filled and filled + size > limit:
            window, filled, limit = window + 1, 0, min(2 * limit, window_bytes)
        windows[place] = window
        filled += size
    return windows


def train_order(
    shard_of: NDArray[np.integer],
    shard_bytes: NDArray[np.int64],
    *,
    window_bytes: int,
    seed: int,
    epoch: int,
) -> tuple[Ids, Ids]:
    """Order all samples of a split for one epoch.

    Shards are permuted and grouped into windows; samples are permuted inside each window, so that
    only a window's shards need be in memory. Prepared sets are shuffled as a whole when packed.

    Args:
        shard_of: `(num_samples,)` shard of each sample, ascending.
        shard_bytes: `(num_shards,)`.
        window_bytes: Size of a window.
        seed: Of the run.
        epoch: Counted from 0; each has an order of its own.

    Returns:
        `(num_samples,)` sample numbers, each exactly once, and the window of each.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    num_shards = len(shard_bytes)
    shard_order = generator.permutation(num_shards)
    windows = window_of_shard(shard_bytes[shard_order], window_bytes)
    starts = np.searchsorted(shard_of, np.arange(num_shards + 1))
    ids = np.empty(len(shard_of), np.int64)
    window_of = np.empty(len(shard_of), np.int64)
    filled = 0
    for window in range(int(windows[-1]) + 1):
        shards = shard_order[windows == window]
        mine = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in shards])
        stop = filled + len(mine)
        ids[filled:stop] = generator.permutation(mine)
        window_of[filled:stop] = window
        filled = stop
    return ids, window_of


def train_share(order: tuple[Ids, Ids], *, batch_size: int, rank: int, world_size: int) -> Share:
    """Give a rank its part of a training epoch: contiguous, and as long as every other rank's."""
    require_rank(rank, world_size)
    ids, windows = order
    length = num_train_steps(len(ids), batch_size, world_size) * batch_size
    mine = slice(rank * length, (rank + 1) * length)
    return Share(ids=ids[mine], windows=windows[mine], batch_size=batch_size)


def eval_share(
    shard_of: NDArray[np.integer],
    shard_bytes: NDArray[np.int64],
    *,
    window_bytes: int,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Share:
    """Give a rank its part of an evaluation: file order, nothing dropped, nothing twice.

    Ranks may differ by one sample, hence by one step.
    """
    require_rank(rank, world_size)
    num_samples = len(shard_of)
    ids = np.arange(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)
    windows = window_of_shard(shard_bytes, window_bytes)[shard_of[ids]]
    return Share(ids=ids, windows=windows, batch_size=batch_size)


def require_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that does not exist.

    Raises:
        ValueError: The rank lies outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")


def uniforms(seed: int, epoch: int, ids: Ids, count: int) -> NDArray[np.float64]:
    """Give each sample its own random numbers, whoever asks and in whatever order.

    The n-th output of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014) whose state is a hash of seed, epoch and sample.

    Returns:
        `(len(ids), count)` float64 in [0, 1).
    """
    with np.errstate(over="ignore"):
        state = _mix(_mix(np.uint64(seed) + _GAMMA) ^ np.uint64(epoch))
        state = _mix(state ^ (ids.astype(np.uint64) * _GAMMA))
        steps = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
        bits = _mix(state[:, None] + steps[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Finalise as SplitMix64 does (variant 13 of Stafford's mixers)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))
