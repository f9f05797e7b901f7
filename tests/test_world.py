from __future__ import annotations

import pytest
import torch

from train.world import World, gather_from_ranks, joined, pick_device, read_world, sum_over_ranks


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_without_torchrun_a_process_is_alone() -> None:
    world = read_world()
    assert world == World(rank=0, local_rank=0, world_size=1)
    assert world.is_main


def test_a_place_is_read_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        environment.setenv(name, value)
    world = read_world()
    assert world == World(rank=3, local_rank=1, world_size=4)
    assert not world.is_main


def test_a_rank_that_is_no_number_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK must be a whole number, got 'one'"):
        read_world()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"RANK must lie in 0\.\.1, got {rank}"):
        World(rank=rank, world_size=2)


def test_a_world_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE must be at least 1, got 0"):
        World(world_size=0)


def test_alone_the_sum_and_the_gathering_are_ones_own() -> None:
    with joined(World(), torch.device("cpu")):
        assert sum_over_ranks(torch.tensor([1.0, 2.0]), World()).tolist() == [1.0, 2.0]
        assert gather_from_ranks({"a": 1}, World()) == [{"a": 1}]


def test_the_cpu_is_taken_when_asked_for() -> None:
    assert pick_device("cpu", World()) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"--device cuda: CUDA is not available \(.+\); give"):
        pick_device("cuda", World())
    assert pick_device("auto", World()) == torch.device("cpu")
