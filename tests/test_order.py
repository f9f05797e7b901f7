"""Every sample once, equal steps on all ranks, an order of its own for each epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from train.order import (
    eval_share,
    num_train_steps,
    train_order,
    train_share,
    uniforms,
    window_of_shard,
)

counts_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def table(counts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the shard of each sample and the bytes of each shard, ten a sample."""
    return np.repeat(np.arange(len(counts)), counts), np.array(counts, np.int64) * 10


@given(counts=counts_strategy, window=st.integers(1, 200), seed=st.integers(0, 99))
def test_an_epoch_holds_each_sample_exactly_once(counts: list[int], window: int, seed: int) -> None:
    shard_of, sizes = table(counts)
    ids, windows = train_order(shard_of, sizes, window_bytes=window, seed=seed, epoch=3)
    assert sorted(ids.tolist()) == list(range(sum(counts)))
    assert (np.diff(windows) >= 0).all()
    for number in range(int(windows[-1]) + 1):
        shards = np.unique(shard_of[ids[windows == number]])
        assert len(shards) == 1 or sizes[shards].sum() <= window


@given(
    counts=counts_strategy,
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    epoch=st.integers(0, 5),
)
def test_ranks_get_disjoint_equal_shares_of_an_epoch(
    counts: list[int], world_size: int, batch_size: int, epoch: int
) -> None:
    shard_of, sizes = table(counts)
    total = sum(counts)
    if total < world_size * batch_size:
        with pytest.raises(ValueError, match="fewer than one batch"):
            num_train_steps(total, batch_size, world_size)
        return
    order = train_order(shard_of, sizes, window_bytes=100, seed=1, epoch=epoch)
    shares = [
        train_share(order, batch_size=batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    steps = num_train_steps(total, batch_size, world_size)
    assert [share.num_steps for share in shares] == [steps] * world_size
    read = np.concatenate([share.ids for share in shares]).tolist()
    assert len(set(read)) == len(read) == steps * batch_size * world_size
    assert total - len(read) < batch_size * world_size


@given(counts=counts_strategy, world_size=st.integers(1, 5), batch_size=st.integers(1, 7))
def test_evaluation_counts_each_sample_once_on_any_world(
    counts: list[int], world_size: int, batch_size: int
) -> None:
    shard_of, sizes = table(counts)
    shares = [
        eval_share(
            shard_of,
            sizes,
            window_bytes=50,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]
    read = np.concatenate([share.ids for share in shares]).tolist()
    assert read == list(range(sum(counts)))


def test_shards_of_7_3_5_1_give_two_and_three_ranks_equal_steps() -> None:
    shard_of, sizes = table([7, 3, 5, 1])
    order = train_order(shard_of, sizes, window_bytes=80, seed=0, epoch=0)
    for world_size, steps in ((2, 4), (3, 2)):
        shares = [
            train_share(order, batch_size=2, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        assert [share.num_steps for share in shares] == [steps] * world_size


def test_epochs_differ_and_a_seed_repeats_its_order() -> None:
    shard_of, sizes = table([20] * 8)
    orders = [
        train_order(shard_of, sizes, window_bytes=400, seed=seed, epoch=epoch)[0].tolist()
        for seed, epoch in ((0, 0), (0, 1), (0, 2), (1, 0), (0, 0))
    ]
    assert orders[0] == orders[4]
    assert len({tuple(order) for order in orders}) == 4


def test_each_rank_sees_other_shards_in_each_epoch() -> None:
    shard_of, sizes = table([10] * 12)
    seen = []
    for epoch in range(3):
        order = train_order(shard_of, sizes, window_bytes=100, seed=0, epoch=epoch)
        share = train_share(order, batch_size=5, rank=0, world_size=2)
        seen.append(frozenset(shard_of[share.ids].tolist()))
    assert len(set(seen)) == 3


def test_neighbours_in_a_window_do_not_stay_neighbours() -> None:
    shard_of, sizes = table([100] * 10)
    ids, _ = train_order(shard_of, sizes, window_bytes=5000, seed=0, epoch=0)
    assert abs(np.corrcoef(ids, np.arange(1000))[0, 1]) < 0.2
    assert np.mean(np.abs(np.diff(ids)) == 1) < 0.02


def test_resuming_is_slicing() -> None:
    shard_of, sizes = table([9, 4, 8])
    order = train_order(shard_of, sizes, window_bytes=100, seed=0, epoch=1)
    share = train_share(order, batch_size=3, rank=0, world_size=1)
    rest = share.from_step(4)
    assert rest.ids.tolist() == share.ids[12:].tolist()
    assert share.from_step(share.num_steps).num_steps == 0


@given(num_workers=st.integers(1, 4), num_samples=st.integers(1, 30), batch_size=st.integers(1, 6))
def test_workers_take_turns_over_the_batches(
    num_workers: int, num_samples: int, batch_size: int
) -> None:
    shard_of, sizes = table([num_samples])
    share = eval_share(
        shard_of, sizes, window_bytes=50, batch_size=batch_size, rank=0, world_size=1
    )
    parts = [share.every(num_workers, worker) for worker in range(num_workers)]
    batches: list[list[int]] = []
    for step in range(share.num_steps):
        part = parts[step % num_workers]
        start = step // num_workers * batch_size
        batches.append(part.ids[start : start + batch_size].tolist())
    assert [sample for batch in batches for sample in batch] == share.ids.tolist()


def test_windows_double_up_to_their_size() -> None:
    sizes = np.array([1, 1, 1, 4, 3, 5, 8, 200, 32, 32, 30, 40, 60])
    windows = [0, 1, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9]
    assert window_of_shard(sizes, 64).tolist() == windows


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    shard_of, sizes = table([4])
    with pytest.raises(ValueError, match=rf"rank must be in 0\.\.{world_size - 1}, got {rank}"):
        eval_share(shard_of, sizes, window_bytes=50, batch_size=1, rank=rank, world_size=world_size)


def test_random_numbers_belong_to_seed_epoch_and_sample_alone() -> None:
    ids = np.arange(50)
    numbers = uniforms(7, 3, ids, 23)
    assert numbers.shape == (50, 23)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert np.array_equal(uniforms(7, 3, ids[::-1], 23), numbers[::-1])
    assert np.array_equal(uniforms(7, 3, ids[10:12], 5), numbers[10:12, :5])
    for other in (uniforms(8, 3, ids, 23), uniforms(7, 4, ids, 23)):
        assert not (other == numbers).any()
    assert len(np.unique(numbers)) == numbers.size


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = uniforms(0, 0, np.arange(20_000), 4)
    assert np.allclose(numbers.mean(0), 0.5, atol=0.01)
    assert np.allclose(numbers.var(0), 1 / 12, atol=0.003)
    correlations = np.corrcoef(np.vstack([numbers.T, uniforms(0, 1, np.arange(20_000), 1).T]))
    assert np.abs(correlations - np.eye(5)).max() < 0.03


def test_a_million_samples_are_ordered_in_flat_memory() -> None:
    shard_of, sizes = table([1000] * 1280)
    ids, windows = train_order(shard_of, sizes, window_bytes=80_000, seed=0, epoch=0)
    assert ids.nbytes + windows.nbytes <= 16 * 1_280_000
    assert int(ids.sum()) == 1_280_000 * 1_279_999 // 2
