from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from train.feed import Batch, on_device

CPU = torch.device("cpu")


def batches(count: int, wait_s: float = 0.0) -> Iterator[Batch]:
    for number in range(count):
        time.sleep(wait_s)
        yield torch.full((2, 3, 4, 4), number, dtype=torch.uint8), torch.full((2,), number)


def numbers(given: Iterator[Batch]) -> list[tuple[int, int]]:
    return [(int(images[0, 0, 0, 0]), int(labels[0])) for images, labels in given]


def test_every_batch_comes_once_and_in_order() -> None:
    assert numbers(on_device(batches(5), CPU)) == [(n, n) for n in range(5)]
    assert numbers(on_device(iter(()), CPU)) == []


def test_no_batch_is_taken_before_it_is_asked_for() -> None:
    taken: list[int] = []

    def counted() -> Iterator[Batch]:
        for number, batch in enumerate(batches(3)):
            taken.append(number)
            yield batch

    fed = on_device(counted(), CPU)
    assert taken == []
    next(fed)
    assert taken == [0]


def test_waiting_is_told_and_computing_is_not() -> None:
    waited: list[float] = []
    for _ in on_device(batches(3, wait_s=0.02), CPU, waited.append):
        time.sleep(0.1)
    assert 0.06 <= sum(waited) < 0.25


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_beside_the_computing_arrive_whole() -> None:
    def pinned() -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches(20):
            yield images.repeat(64, 1, 32, 32).pin_memory(), labels.pin_memory()

    found = []
    waited: list[float] = []
    for images, labels in on_device(pinned(), torch.device("cuda"), waited.append):
        busy = torch.randn(1024, 1024, device="cuda")
        for _ in range(10):
            busy = busy @ busy
        found.append((images.float().mean(), labels[0]))
    assert [(int(a), int(b)) for a, b in found] == [(n, n) for n in range(20)]
