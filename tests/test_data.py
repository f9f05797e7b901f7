"""Whole batches: same order and pixels for any threads and workers; nothing lost, nothing twice."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from helpers import array_of, fabricate_set, make_shards
from prep.index import load_index
from prep.shards import ShardError
from train.data import ShardDataset, ShardLoader
from train.dataset import ShardDataset as MapStyle
from train.schedule import crop_size_at

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def load(
    shards: Path, split: str = "train", epoch: int = 0, step: int = 0, **options: Any
) -> Batches:
    """Give the batches of one epoch."""
    settings: dict[str, Any] = {"batch_size": 4, "crop_size": 16, "num_threads": 2} | options
    with ShardLoader(shards, split, **settings) as loader:
        batches = list(loader.epoch(epoch, step))
        if step == 0:
            assert len(batches) == len(loader) == loader.steps_per_epoch
    return batches


def equal(a: Batches, b: Batches) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and torch.equal(p, q) for (x, p), (y, q) in zip(a, b, strict=True)
    )


def damage(shards: Path, sample: int, split: str = "train") -> None:
    """Overwrite the entropy data of one sample, in its middle, with an impossible marker."""
    index = load_index(shards)
    row = index.splits[split].samples[sample]
    path = index.shard_path(split, int(row["shard"]))
    data = bytearray(path.read_bytes())
    middle = int(row["offset"]) + int(row["length"]) - 200
    data[middle : middle + 100] = b"\xff\xc4" * 50
    del index, row
    path.write_bytes(data)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Give a set whose shards have 7, 3, 5 and 1 samples."""
    return make_shards(tmp_path / "mixed", (7, 3, 5, 1))


def test_batches_have_the_promised_form(mixed: Path) -> None:
    images, labels = load(mixed)[0]
    assert images.shape == (4, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.shape, labels.dtype) == ((4,), torch.int64)


@pytest.mark.parametrize("split_and_order", ["train"])
def test_threads_prefetch_and_history_change_nothing(mixed: Path, split_and_order: str) -> None:
    wanted = load(mixed, split_and_order, epoch=2, num_threads=1, prefetch=1)
    for threads, prefetch in ((2, 1), (3, 4), (8, 2)):
        assert equal(load(mixed, epoch=2, num_threads=threads, prefetch=prefetch), wanted)
    with ShardLoader(mixed, "train", batch_size=4, crop_size=16) as loader:
        for epoch in (0, 1):
            list(loader.epoch(epoch))
        assert equal(list(loader.epoch(2)), wanted)


GROWING = partial(crop_size_at, start=8, end=24, ramp_start=0, ramp_end=2)


def test_a_crop_size_may_grow_over_the_epochs(mixed: Path) -> None:
    for epoch, size in ((0, 8), (1, 16), (2, 24)):
        grown = load(mixed, epoch=epoch, crop_size=GROWING)
        assert {images.shape[2:] for images, _ in grown} == {(size, size)}
        assert equal(grown, load(mixed, epoch=epoch, crop_size=size))


@pytest.mark.slow
def test_workers_give_the_same_batches_over_epochs_and_start_once(mixed: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "crop_size": GROWING, "num_threads": 2}
    with ShardLoader(mixed, "train", num_workers=2, **options) as loader:
        started: set[int] = set()
        for epoch in range(3):
            assert equal(list(loader.epoch(epoch)), load(mixed, epoch=epoch, **options))
            started |= {child.pid for child in psutil.Process().children()}
        assert equal(list(loader.epoch(0, 3)), load(mixed, epoch=0, step=3, **options))
        firsts = [next(iter(loader.epoch(1)))[0] for _ in range(5)]  # left in the middle
        assert all(torch.equal(a, load(mixed, epoch=1, **options)[0][0]) for a in firsts)
        names = [psutil.Process(pid).cmdline() for pid in started if psutil.pid_exists(pid)]
        assert sum("spawn_main" in " ".join(name) for name in names) <= 2


def test_small_windows_change_the_order_but_lose_nothing(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "many", (6,) * 8, num_classes=48)
    for window_mb in (1, 1000):
        labels = torch.cat([labels for _, labels in load(shards, window_mb=window_mb)])
        assert sorted(labels.tolist()) == list(range(48))


def test_an_epoch_ends_and_holds_each_sample_once(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (7, 3, 5, 1), num_classes=16)
    for epoch in range(4):
        seen = Counter(int(x) for _, labels in load(shards, epoch=epoch) for x in labels)
        assert seen == Counter(range(16))


def test_epochs_and_seeds_differ_in_order_and_crops(mixed: Path) -> None:
    base = load(mixed, epoch=0)
    assert equal(base, load(mixed, epoch=0))
    assert not equal(base, load(mixed, epoch=1))
    assert not equal(base, load(mixed, epoch=0, seed=1))


def test_the_same_picture_is_cropped_otherwise_each_time(tmp_path: Path) -> None:
    """One picture many times: crops differ over samples, epochs and ranks, and after resume."""
    from helpers import jpeg
    from prep.index import SAMPLES_FILE, SetIndex, SplitIndex, save_index, save_table
    from prep.labels import ClassTable
    from prep.shards import ShardWriter

    root = tmp_path / "same"
    (root / "train").mkdir(parents=True)
    with ShardWriter(root / "train" / "000000.tar") as writer:
        for number in range(8):
            writer.add(f"s{number}", jpeg(1), 0)
    assert writer.info is not None
    samples, sha256 = save_table(root / "train" / SAMPLES_FILE, [writer.rows()])
    split = SplitIndex(shards=(writer.info,), samples=samples, samples_sha256=sha256)
    save_index(SetIndex(root=root, classes=ClassTable(wnids=("a",)), splits={"train": split}))
    crops = [
        image.numpy().tobytes()
        for epoch in range(3)
        for rank in range(2)
        for images, _ in load(root, epoch=epoch, batch_size=2, rank=rank, world_size=2)
        for image in images
    ]
    assert len(crops) == 24
    assert len(set(crops)) == 24


@pytest.mark.parametrize("step", [0, 1, 7, 19, 20])
def test_resuming_gives_the_rest_of_the_epoch(tmp_path: Path, step: int) -> None:
    shards = make_shards(tmp_path / "set", (13, 9, 18))
    whole = load(shards, epoch=3, batch_size=2)
    assert len(whole) == 20
    assert equal(load(shards, epoch=3, step=step, batch_size=2), whole[step:])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_have_equal_steps_and_disjoint_samples(tmp_path: Path, world_size: int) -> None:
    shards = make_shards(tmp_path / "set", (7, 3, 5, 1), num_classes=16)
    parts = [
        load(shards, batch_size=2, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = [int(x) for part in parts for _, labels in part for x in labels]
    assert len(seen) == len(set(seen)) == 16 // (2 * world_size) * 2 * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_evaluation_counts_21_images_on_any_world(tmp_path: Path, world_size: int) -> None:
    shards = make_shards(tmp_path / "set", (8, 8, 5), split="val", num_classes=21)
    seen = [
        int(x)
        for rank in range(world_size)
        for _, labels in load(shards, "val", rank=rank, world_size=world_size)
        for x in labels
    ]
    assert seen == list(range(21))


def test_evaluation_is_never_augmented(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (6,), split="val")
    assert equal(load(shards, "val", epoch=0), load(shards, "val", epoch=9, seed=5))


def test_one_shard_serves_more_ranks_than_shards(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (16,), num_classes=16)
    seen = [
        int(x)
        for rank in range(4)
        for _, labels in load(shards, batch_size=4, rank=rank, world_size=4)
        for x in labels
    ]
    assert sorted(seen) == list(range(16))


def test_batches_mix_classes_that_were_packed_in_order(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (16,) * 4, num_classes=64)
    classes = [len(set((labels // 16).tolist())) for _, labels in load(shards, batch_size=16)]
    assert np.mean(classes) > 3


def test_samples_per_class_takes_the_first_of_each(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (9, 9), num_classes=3)
    seen = Counter(
        int(x) for _, labels in load(shards, samples_per_class=2, batch_size=2) for x in labels
    )
    assert seen == {0: 2, 1: 2, 2: 2}


def test_a_damaged_training_sample_is_counted_named_and_replaced(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(mixed, 8)
    with ShardLoader(mixed, "train", batch_size=4, crop_size=16) as loader:
        batches = list(loader.epoch(0))
        assert loader.num_damaged == 1
        assert [len(labels) for _, labels in batches] == [4] * 4
        list(loader.epoch(1))
        assert loader.num_damaged == 2
    assert "train/000001.tar: train00008.jpg (sample 8)" in caplog.text


def test_a_damaged_evaluation_sample_is_left_out(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (8, 4), split="val", num_classes=12)
    damage(shards, 5, "val")
    with ShardLoader(shards, "val", batch_size=4, crop_size=16) as loader:
        seen = [int(x) for _, labels in loader.epoch(0) for x in labels]
        assert loader.num_damaged == 1
    assert seen == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_a_cut_shard_ends_the_run_with_its_name(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (40, 40))
    path = shards / "train" / "000001.tar"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.6)])
    with (
        ShardLoader(shards, "train", batch_size=4, crop_size=16) as loader,
        pytest.raises(ShardError, match=r"damaged samples in epoch 0, the last is train/000001"),
    ):
        list(loader.epoch(0))


def test_a_few_lost_samples_of_a_cut_shard_are_counted(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "set", (20, 4))
    (shards / "train" / "000001.tar").unlink()
    with ShardLoader(shards, "train", batch_size=8, crop_size=16) as loader:
        assert len(list(loader.epoch(0))) == 3
        assert loader.num_damaged == 4


def test_leaving_an_epoch_early_ends_its_reader(mixed: Path) -> None:
    with ShardLoader(mixed, "train", batch_size=2, crop_size=16) as loader:
        for _ in range(5):
            batches = loader.epoch(0)
            next(batches)
            batches.close()  # type: ignore[attr-defined]
        assert not [t for t in threading.enumerate() if t.name == "shard-reader"]
        assert len(list(loader.epoch(0))) == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 17}, "16 training samples are fewer than one batch of 17 on each of 1"),
        ({"batch_size": 9, "world_size": 2}, "lower --batch-size to at most 8"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"rank": 1}, r"rank must be in 0\.\.0, got 1"),
        ({"samples_per_class": 0}, "samples_per_class must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(mixed: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ShardLoader(mixed, "train", **({"batch_size": 4} | options))


def test_a_split_or_set_that_is_not_there_is_refused(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no split 'val', only train"):
        ShardLoader(mixed, "val", batch_size=4)
    with pytest.raises(ShardError, match=r"has no index\.json"):
        ShardLoader(tmp_path, "train", batch_size=4)
    with (
        ShardLoader(mixed, "train", batch_size=4, crop_size=16) as loader,
        pytest.raises(ValueError, match=r"start_step must be in 0\.\.4, got 5"),
    ):
        list(loader.epoch(0, 5))


def test_a_file_address_opens_the_set(mixed: Path) -> None:
    with ShardLoader(mixed.as_uri(), "train", batch_size=4, crop_size=16) as loader:
        assert loader.num_samples == 16


def test_the_dataset_gives_what_image_folder_would(mixed: Path) -> None:
    dataset = ShardDataset(mixed, "train")
    image, label = dataset[5]
    assert (image.mode, image.size, label) == ("RGB", (64, 48), 1)
    assert len(dataset) == 16
    assert dataset.targets == [number % 4 for number in range(16)]
    assert dataset.class_to_idx[dataset.classes[2]] == 2
    with pytest.raises(IndexError, match=r"sample must be in 0\.\.15, got 16"):
        dataset[16]


def test_the_dataset_can_be_pickled_before_and_after_use(mixed: Path) -> None:
    dataset = MapStyle(mixed, "train", array_of)
    for _ in range(2):
        data = pickle.dumps(dataset)
        assert len(data) < 1000
        copy = pickle.loads(data)
        assert torch.equal(torch.from_numpy(copy[3][0]), torch.from_numpy(dataset[3][0]))


@pytest.mark.slow
def test_any_data_loader_takes_the_dataset(mixed: Path) -> None:
    loader = DataLoader(
        MapStyle(mixed, "train", array_of),
        batch_size=5,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [number % 4 for number in range(16)]


def test_the_dataset_steps_over_a_damaged_sample(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (mixed / "train" / "000003.tar").unlink()
    dataset = MapStyle(mixed, "train")
    assert dataset[15][1] == dataset[0][1]
    assert "stepped over a damaged sample: train/000003.tar" in caplog.text
    for number in range(3):
        (mixed / "train" / f"{number:06d}.tar").unlink()
    with pytest.raises(ShardError, match="10 damaged samples in a row from 4 on"):
        dataset[4]


def test_a_table_of_1280000_samples_is_ordered_in_flat_memory(tmp_path: Path) -> None:
    shards = fabricate_set(tmp_path / "big", num_shards=1280, samples_per_shard=1000)
    process = psutil.Process()
    with ShardLoader(shards, "train", batch_size=256) as loader:
        assert (loader.num_samples, loader.steps_per_epoch) == (1_280_000, 5000)
        before = process.memory_info().rss
        peaks = []
        for epoch in range(2):
            share = loader._maker.share(epoch)
            assert len(np.unique(share.ids)) == 1_280_000
            peaks.append(process.memory_info().rss - before)
    assert peaks[1] - peaks[0] < 30_000_000
