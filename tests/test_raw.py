from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from train.raw import EpochOrder, RawLoader
from train.schedule import crop_size_at

NUM_TRAIN = 5


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("raw")
    make_images(root / "train", NUM_TRAIN)
    make_images(root / "val", 3)
    return root


def make_images(folder: Path, num_each: int, wnids: tuple[str, ...] = ("n01", "n02")) -> None:
    random = np.random.default_rng(0)
    for wnid in wnids:
        (folder / wnid).mkdir(parents=True)
        for i in range(num_each):
            pixels = random.integers(0, 256, (40, 52, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / wnid / f"{wnid}_{i}.JPEG")


def open_raw(root: Path, split: str = "train", **options: Any) -> RawLoader:
    sizes: dict[str, Any] = {"batch_size": 2, "crop_size": 24}
    return RawLoader(root, split, **(sizes | options))


def batches_of(
    loader: RawLoader, epoch: int = 0, start_step: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with loader:
        return list(loader.epoch(epoch, start_step))


def equal(
    some: list[tuple[torch.Tensor, torch.Tensor]], others: list[tuple[torch.Tensor, torch.Tensor]]
) -> bool:
    return len(some) == len(others) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(some, others, strict=True)
    )


def test_batches_are_what_the_loop_expects(raw: Path) -> None:
    loader = open_raw(raw)
    assert (loader.num_samples, loader.num_classes, loader.wnids) == (10, 2, ("n01", "n02"))
    assert len(loader) == loader.steps_per_epoch == 5
    images, labels = batches_of(loader)[0]
    assert images.shape == (2, 3, 24, 24)
    assert images.dtype is torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype is torch.int64


def test_an_epoch_repeats_by_its_seed_and_differs_from_the_next(raw: Path) -> None:
    first = batches_of(open_raw(raw))
    assert equal(first, batches_of(open_raw(raw)))
    assert not equal(first, batches_of(open_raw(raw), epoch=1))
    assert not equal(first, batches_of(open_raw(raw, seed=1)))


def test_an_epoch_continues_at_a_step_with_the_same_pixels(raw: Path) -> None:
    assert equal(batches_of(open_raw(raw), 2)[3:], batches_of(open_raw(raw), 2, start_step=3))


def test_loading_leaves_the_random_state_alone(raw: Path) -> None:
    before = torch.get_rng_state()
    batches_of(open_raw(raw))
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_is_in_order_whole_and_without_chance(raw: Path) -> None:
    first = batches_of(open_raw(raw, "val", batch_size=4, resize_size=28))
    assert [len(labels) for _, labels in first] == [4, 2]
    assert torch.cat([labels for _, labels in first]).tolist() == [0, 0, 0, 1, 1, 1]
    again = batches_of(open_raw(raw, "val", batch_size=4, resize_size=28, seed=9), epoch=7)
    assert equal(first, again)


def test_the_first_samples_of_each_class_can_be_taken_alone(raw: Path) -> None:
    loader = open_raw(raw, samples_per_class=2)
    assert loader.num_samples == 4
    assert sorted(torch.cat([labels for _, labels in batches_of(loader)]).tolist()) == [0, 0, 1, 1]


def test_other_files_are_another_identity(raw: Path) -> None:
    assert open_raw(raw).identity == open_raw(raw).identity
    assert open_raw(raw).identity != open_raw(raw, samples_per_class=2).identity


def test_a_flat_val_takes_its_labels_from_the_file(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 1)
    make_images(tmp_path / "made", 1)
    (tmp_path / "val").mkdir()
    for number, wnid in enumerate(("n02", "n01")):
        image = tmp_path / "made" / wnid / f"{wnid}_0.JPEG"
        image.rename(tmp_path / "val" / f"{number}.JPEG")
    (tmp_path / "val_label.txt").write_text("0.JPEG 1\n1.JPEG 0\n", encoding="utf-8")
    ((_, labels),) = batches_of(open_raw(tmp_path, "val"))
    assert labels.tolist() == [1, 0]


def test_a_val_with_other_classes_than_train_is_refused(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 1, ("n01", "n02"))
    make_images(tmp_path / "val", 1, ("n01", "n03"))
    with pytest.raises(ValueError, match=r"missing \['n02'\], surplus \['n03'\]"):
        open_raw(tmp_path, "val")


def test_a_missing_split_is_refused(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 1)
    with pytest.raises(ValueError, match=r"val: holds no image; --src needs train and val"):
        open_raw(tmp_path, "val")


def test_a_file_that_does_not_decode_is_named(tmp_path: Path) -> None:
    make_images(tmp_path / "train", 2)
    bad = tmp_path / "train" / "n02" / "n02_1.JPEG"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"n02_1\.JPEG: does not decode \(.+\); remove it"):
        batches_of(open_raw(tmp_path))


def test_what_crosses_to_a_worker_can_be_pickled(raw: Path) -> None:
    loader = open_raw(raw)
    for part in (loader._loader.dataset, loader._loader.collate_fn):
        pickle.loads(pickle.dumps(part))


@pytest.mark.slow
def test_workers_change_nothing_and_live_over_epochs(raw: Path) -> None:
    growing = partial(crop_size_at, start=16, end=32, ramp_start=0, ramp_end=1)
    with open_raw(raw, num_workers=1, crop_size=growing) as loader:
        next(iter(loader.epoch(0)))  # left half way
        first, second = list(loader.epoch(0)), list(loader.epoch(1, 2))
    assert equal(first, batches_of(open_raw(raw, crop_size=16)))
    assert equal(second, batches_of(open_raw(raw, crop_size=32), 1, 2))


@given(
    num_samples=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_disjoint_and_steps_equal(
    num_samples: int, batch_size: int, world_size: int, epoch: int
) -> None:
    def share(split: str, rank: int) -> list[list[tuple[int, int]]]:
        order = EpochOrder(num_samples, batch_size, split, 0, rank, world_size)
        order.epoch = epoch
        batches = list(order)
        assert len(batches) == len(order)
        return batches

    train = [share("train", rank) for rank in range(world_size)]
    num_steps = num_samples // (batch_size * world_size)
    assert {len(batches) for batches in train} == {num_steps}
    seen = [place for batches in train for batch in batches for place in batch]
    assert len(seen) == len(set(seen)) == num_steps * batch_size * world_size
    val = [place for r in range(world_size) for batch in share("val", r) for place in batch]
    assert val == [(epoch, position) for position in range(num_samples)]
