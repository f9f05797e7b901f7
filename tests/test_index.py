from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import fabricate_set, make_shards, snapshot
from prep.index import (
    INDEX_FILE,
    SAMPLES_FILE,
    SetIndex,
    SplitIndex,
    load_index,
    save_index,
    save_table,
)
from prep.labels import ClassTable
from prep.shards import SAMPLE_DTYPE, ShardError


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Give a set of three shards of 3, 1 and 2 samples."""
    return make_shards(tmp_path / "set", (3, 1, 2))


def edit(packed: Path, change: dict[str, Any]) -> None:
    path = packed / INDEX_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, **change}), encoding="utf-8")


def test_a_saved_index_is_loaded_as_it_was(packed: Path) -> None:
    before = snapshot(packed)
    index = load_index(packed)
    split = index.split("train")
    assert [shard.num_samples for shard in split.shards] == [3, 1, 2]
    assert split.num_samples == 6
    assert split.samples["shard"].tolist() == [0, 0, 0, 1, 2, 2]
    assert isinstance(split.samples, np.memmap)
    assert index.shard_path("train", 2) == index.root / "train" / "000002.tar"
    save_index(index)
    assert snapshot(packed) == before


def test_every_shard_has_its_hash_and_size(packed: Path) -> None:
    files = snapshot(packed)
    for shard in load_index(packed).split("train").shards:
        assert files[f"train/{shard.name}"] == shard.sha256
        assert (packed / "train" / shard.name).stat().st_size == shard.num_bytes


def test_the_document_tells_counts_by_class(packed: Path) -> None:
    document = json.loads((packed / INDEX_FILE).read_text(encoding="utf-8"))
    assert document["format"] == 1
    assert document["splits"]["train"]["class_counts"] == [2, 2, 1, 1]
    assert document["splits"]["train"]["num_samples"] == 6
    assert [entry["wnid"] for entry in document["classes"]] == [f"n{i:08d}" for i in range(4)]


def test_timm_finds_what_its_reader_wants(packed: Path) -> None:
    # timm/data/readers/reader_wds.py, _parse_split_info: these four keys of info["splits"][split],
    # the file names joined to the root
    info = json.loads((packed / "_info.json").read_text(encoding="utf-8"))["splits"]["train"]
    assert info["num_samples"] == sum(info["shard_lengths"]) == 6
    assert info["name"] == "train"
    assert info["shard_lengths"] == [3, 1, 2]
    assert all((packed / name).is_file() for name in info["filenames"])
    assert len(info["filenames"]) == 3


def test_names_of_any_script_are_kept_as_utf8(tmp_path: Path, packed: Path) -> None:
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    classes = ClassTable(wnids=("a", "数据"), names={"a": "tench", "数据": "丁鱥"})
    table = np.array([(0, 512, 1, 1)], SAMPLE_DTYPE)
    samples, sha256 = save_table(other / "train" / SAMPLES_FILE, [table])
    shards = load_index(packed).split("train").shards[1:2]
    split = SplitIndex(shards=shards, samples=samples, samples_sha256=sha256)
    save_index(SetIndex(root=other, classes=classes, splits={"train": split}))
    assert "丁鱥".encode() in (other / INDEX_FILE).read_bytes()
    assert load_index(other).classes == classes


def test_a_set_without_an_index_is_not_whole(packed: Path) -> None:
    (packed / INDEX_FILE).unlink()
    with pytest.raises(
        ShardError, match=r"has no index\.json, so it is not a whole set: run `prep"
    ):
        load_index(packed)
    with pytest.raises(ShardError, match=r"has no index\.json"):
        load_index(packed / "nowhere")


def test_a_split_that_is_not_there_is_named(packed: Path) -> None:
    with pytest.raises(ShardError, match="has no split 'val', only train"):
        load_index(packed).split("val")


@pytest.mark.parametrize("place", ["plain", "file: address"])
def test_a_set_is_found_by_path_and_by_address(packed: Path, place: str) -> None:
    shards = str(packed) if place == "plain" else packed.as_uri()
    assert load_index(shards).split("train").num_samples == 6


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": 1'])
def test_an_index_that_is_no_json_is_refused(packed: Path, content: bytes) -> None:
    (packed / INDEX_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=r"index\.json is damaged"):
        load_index(packed)


@pytest.mark.parametrize("content", [b"[]", b"1", b'{"format": 2}', b"{}"])
def test_an_index_of_another_format_is_refused(packed: Path, content: bytes) -> None:
    (packed / INDEX_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=r"index\.json is not of format 1: pack the set again"):
        load_index(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"splits": []},
        {"splits": {"train": None}},
        {"splits": {"train": {"shards": [{}]}}},
        {"splits": {"train": {"shards": [{"name": "x"}]}}},
        {"classes": 3},
        {"classes": [{}]},
        {"classes": ["n1"]},
    ],
)
def test_an_index_that_lacks_something_is_refused(packed: Path, change: dict[str, Any]) -> None:
    edit(packed, change)
    with pytest.raises(ShardError, match=r"index\.json is damaged"):
        load_index(packed)


def change_shards(packed: Path, change: dict[str, Any]) -> None:
    path = packed / INDEX_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    document["splits"]["train"]["shards"][0].update(change)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_a_short_table_is_refused(packed: Path) -> None:
    change_shards(packed, {"num_samples": 4})
    with pytest.raises(ShardError, match=r"samples\.npy has 6 rows, the index 7 samples"):
        load_index(packed)


@pytest.mark.parametrize(
    ("column", "row", "value", "place"),
    [
        ("shard", 3, 0, "rows 3..3 do not fit 000001.tar"),
        ("label", 0, -1, "rows 0..2 do not fit 000000.tar"),
        ("label", 5, 4, "rows 4..5 do not fit 000002.tar"),
        ("offset", 1, 2**63, "rows 0..2 do not fit 000000.tar"),
        ("offset", 1, 2**64 - 5, "rows 0..2 do not fit 000000.tar"),
        ("length", 2, 2**32 - 1, "rows 0..2 do not fit 000000.tar"),
    ],
)
def test_rows_that_point_outside_are_refused(
    packed: Path, column: str, row: int, value: int, place: str
) -> None:
    path = packed / "train" / SAMPLES_FILE
    table = np.load(path)
    table[column][row] = value
    np.save(path, table)
    with pytest.raises(ShardError, match=re.escape(place)):
        load_index(packed)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"junk" * 100])
def test_a_damaged_table_is_refused(packed: Path, content: bytes) -> None:
    (packed / "train" / SAMPLES_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=r"samples\.npy is missing or damaged"):
        load_index(packed)


def test_a_missing_table_and_one_of_another_kind_are_refused(packed: Path) -> None:
    np.save(packed / "train" / SAMPLES_FILE, np.zeros(6))
    with pytest.raises(ShardError, match="is not a sample table of this format"):
        load_index(packed)
    (packed / "train" / SAMPLES_FILE).unlink()
    with pytest.raises(ShardError, match="is missing or damaged"):
        load_index(packed)


def test_an_index_of_the_whole_imagenet_has_a_table_under_60_mb(tmp_path: Path) -> None:
    found = load_index(fabricate_set(tmp_path, num_shards=1100, samples_per_shard=1165))
    assert found.split("train").num_samples == 1100 * 1165 > 1_280_000
    assert found.split("train").samples.nbytes < 60_000_000
    assert isinstance(found.split("train").samples, np.memmap)
