from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers import encoded, jpeg, make_shards, pixels, quiet
from prep.execute import Counters
from prep.index import SAMPLES_FILE, load_index
from prep.shards import ShardWriter
from prep.verify import ShardCheck, check_shard, verify


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Give a set of three shards of 3, 1 and 2 samples."""
    return make_shards(tmp_path / "set", (3, 1, 2))


def change_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x55
    path.write_bytes(content)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_whole_set_has_no_problem(packed: Path, num_workers: int) -> None:
    told: list[tuple[int, int, int]] = []
    index = load_index(packed)
    assert verify(index, num_workers, lambda *totals: told.append(totals)) == []
    assert told[-1][0] == 6
    assert told[-1][1] == index.split("train").samples["length"].sum()


def cut_to_60_percent(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut_to_60_percent, r"\d+ bytes, the index says \d+"),
    "empty": (lambda path: path.write_bytes(b""), r"0 bytes, the index says \d+ \(.+\)"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"\d+ bytes, the index"),
    "a header": (lambda path: change_byte(path, 3), "its bytes changed since packing"),
    "an image": (lambda path: change_byte(path, 520), "its bytes changed since packing"),
    "the padding": (
        lambda path: change_byte(path, -1),
        "its bytes changed since packing",
    ),
    "gone": (lambda path: path.unlink(), "cannot be read: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_shard_is_named(packed: Path, damage: str) -> None:
    damage_it, text = DAMAGES[damage]
    for number in (0, 2):
        damage_it(packed / "train" / f"{number:06d}.tar")
    problems = verify(load_index(packed), 1, quiet)
    assert len(problems) == 2
    for number, problem in zip((0, 2), problems, strict=True):
        path = packed / "train" / f"{number:06d}.tar"
        assert re.match(re.escape(f"{path}: ") + text, problem), problem


def test_the_damaged_key_is_named(packed: Path) -> None:
    path = packed / "train" / "000000.tar"
    row = load_index(packed).split("train").samples[1]
    content = bytearray(path.read_bytes())
    content[row["offset"] : row["offset"] + row["length"]] = bytes(int(row["length"]))
    path.write_bytes(content)
    (problem,) = verify(load_index(packed), 1, quiet)
    assert "changed since packing (key 'train00001' is damaged: " in problem


def test_a_change_that_hurts_no_image_is_told_as_such(packed: Path) -> None:
    row = load_index(packed).split("train").samples[0]
    label_header = -(-int(row["offset"] + row["length"]) // 512) * 512
    change_byte(packed / "train" / "000000.tar", label_header + 512 + 100)  # behind the label
    (problem,) = verify(load_index(packed), 1, quiet)
    assert problem.endswith("its bytes changed since packing (every image still decodes)")


def test_a_changed_table_is_named(packed: Path) -> None:
    path = packed / "train" / SAMPLES_FILE
    table = np.load(path)
    table["label"][0] = 3
    np.save(path, table)
    problems = verify(load_index(packed), 1, quiet)
    assert problems[0] == f"{path}: its bytes changed since packing"
    assert "its 3 samples are not the 3 that the table lists" in problems[1]


def check_of(path: Path, *images: bytes) -> ShardCheck:
    with ShardWriter(path) as writer:
        for number, data in enumerate(images):
            writer.add(f"k{number}", data, 0)
    assert writer.info is not None
    return ShardCheck(path=path, info=writer.info, rows=writer.rows())


@pytest.mark.parametrize(
    "data", [jpeg(1)[:-60], b"", b"<html>", encoded(pixels(1), "PNG"), b"\xff\xd8\xff\xd9"]
)
def test_an_image_that_does_not_decode_is_named_even_under_a_right_hash(
    tmp_path: Path, data: bytes
) -> None:
    check = check_of(tmp_path / "000000.tar", jpeg(1), data)
    path, problem = check_shard(check, Counters(1).ticker())
    assert path == check.path
    assert problem.startswith(f"{path}: key 'k1' is damaged: ")


def test_grey_and_colour_images_pass(tmp_path: Path) -> None:
    check = check_of(
        tmp_path / "000000.tar",
        jpeg(1),
        jpeg(1, progressive=True),
        encoded(pixels(1)[..., 0]),
    )
    assert check_shard(check, Counters(1).ticker()) == (check.path, "")
