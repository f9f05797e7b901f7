from __future__ import annotations

import errno
import io
import re
import tarfile
import warnings
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import jpeg, snapshot
from prep.shards import (
    MAX_KEY_BYTES,
    SAMPLE_DTYPE,
    ShardError,
    ShardWriter,
    keys_for,
    member_name,
    read_samples,
    shard_name,
)

SAMPLES = [(f"n01440764_{number}", jpeg(number, 8, 8), 7 * number) for number in range(5)]


def write_shard(path: Path, samples: list[tuple[str, bytes, int]] = SAMPLES) -> ShardWriter:
    with ShardWriter(path) as writer:
        for key, data, label in samples:
            writer.add(key, data, label)
    return writer


def foreign_shard(
    path: Path, members: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT
) -> Path:
    """Write a tar as other programs do."""
    with tarfile.open(path, "w", format=kind) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_tarfile_reads_what_was_written(tmp_path: Path) -> None:
    writer = write_shard(tmp_path / "000000.tar")
    with tarfile.open(tmp_path / "000000.tar") as tar:
        members = tar.getmembers()
        found = [(m.name, tar.extractfile(m).read()) for m in members]  # type: ignore[union-attr]
    assert found == [
        pair
        for key, data, label in SAMPLES
        for pair in ((f"{key}.jpg", data), (f"{key}.cls", str(label).encode()))
    ]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {
        (0, 0, 0, "", "", 0o444)
    }
    assert writer.info is not None
    assert writer.info.num_samples == len(SAMPLES)
    assert writer.info.num_bytes == (tmp_path / "000000.tar").stat().st_size
    assert writer.info.sha256 == snapshot(tmp_path)["000000.tar"]


def test_the_rows_point_at_the_images(tmp_path: Path) -> None:
    rows = write_shard(tmp_path / "000000.tar").rows()
    content = (tmp_path / "000000.tar").read_bytes()
    assert rows.dtype == SAMPLE_DTYPE
    assert rows["label"].tolist() == [label for _, _, label in SAMPLES]
    for (key, data, _), row in zip(SAMPLES, rows, strict=True):
        assert content[row["offset"] : row["offset"] + row["length"]] == data
        assert member_name(tmp_path / "000000.tar", int(row["offset"])) == f"{key}.jpg"


def test_our_reader_gives_the_samples_back(tmp_path: Path) -> None:
    rows = write_shard(tmp_path / "000000.tar").rows()
    found = list(read_samples(tmp_path / "000000.tar"))
    assert [(s.key, s.label) for s in found] == [(key, label) for key, _, label in SAMPLES]
    assert [(s.offset, s.length) for s in found] == rows[["offset", "length"]].tolist()


def test_webdataset_reads_equal_keys_labels_and_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "dotted.folder"
    folder.mkdir()
    write_shard(folder / "000000.tar")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # webdataset's own, at import and on open files
        wds = pytest.importorskip("webdataset")
        with (folder / "000000.tar").open("rb") as stream:
            members = wds.tariterators.tar_file_expander([{"url": "x", "stream": stream}])
            found = list(wds.tariterators.group_by_keys(members))
    assert [(s["__key__"], s["jpg"], int(s["cls"])) for s in found] == SAMPLES


def test_equal_samples_give_equal_bytes(tmp_path: Path) -> None:
    write_shard(tmp_path / "a")
    write_shard(tmp_path / "b")
    assert len(set(snapshot(tmp_path).values())) == 1


def abort_in(path: Path) -> None:
    with ShardWriter(path) as writer:
        writer.add(*SAMPLES[0])
        raise RuntimeError("stop")


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        abort_in(tmp_path / "000000.tar")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_samples_leaves_no_file(tmp_path: Path) -> None:
    writer = write_shard(tmp_path / "000000.tar", [])
    assert writer.info is None
    assert list(tmp_path.iterdir()) == []


def test_an_old_shard_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    write_shard(tmp_path / "000000.tar")
    before = snapshot(tmp_path)
    with pytest.raises(RuntimeError, match="stop"):
        abort_in(tmp_path / "000000.tar")
    assert snapshot(tmp_path) == before


class FailingFile(io.FileIO):
    """A file on a disk that takes only so many writes."""

    writes_left = 0
    error = OSError()

    def write(self, data: object) -> int:
        if FailingFile.writes_left == 0:
            raise FailingFile.error
        FailingFile.writes_left -= 1
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(22, "Invalid argument")]
)
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_failed_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, error: OSError
) -> None:
    monkeypatch.setattr(io, "FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "writes_left", nth)
    monkeypatch.setattr(FailingFile, "error", error)
    samples = [(f"k{number}", bytes(600_000), 0) for number in range(8)]
    with pytest.raises(OSError, match=error.strerror):
        write_shard(tmp_path / "000000.tar", samples)
    assert list(tmp_path.iterdir()) == []


def test_a_key_with_a_dot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"000000\.tar: key 'a\.b' holds a dot"):
        write_shard(tmp_path / "000000.tar", [("a.b", b"x", 0)])


def test_shard_names_sort_as_their_numbers() -> None:
    names = [shard_name(number) for number in (0, 9, 10, 123_456)]
    assert names == sorted(names)
    assert names[0] == "000000.tar"


def test_keys_are_the_stems_where_those_are_unique_and_safe() -> None:
    paths = ["train/a/n1_1.JPEG", "train/b/n1_2.png", "train/b/ünï_数据.jpg"]
    assert keys_for(paths) == ["n1_1", "n1_2", "ünï_数据"]


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (["train/a/1.jpg", "train/b/1.jpg"], ["a_1_jpg", "b_1_jpg"]),
        (["train/a/x.jpg", "train/a/X.jpg"], ["a_x_jpg", None]),
        (["train/a/x.jpg", "train/a/x.png", "train/a/x"], ["a_x_jpg", "a_x_png", "a_x"]),
        (["train/a/my.photo.v2.jpg"], ["my_photo_v2"]),
        (["train/a/a b?.jpg", "train/a/.jpg"], ["a_b_", None]),
    ],
)
def test_keys_of_doubled_or_unsafe_stems(paths: list[str], wanted: list[str | None]) -> None:
    for key, want in zip(keys_for(paths), wanted, strict=True):
        assert want is None or key == want


path_parts = st.text(
    st.one_of(st.sampled_from("aAbB._ -\\:*?\"<>|'&#%\u00e9\u0301\udcff"), st.characters()),
    min_size=1,
    max_size=120,
).filter(lambda part: "/" not in part and part not in (".", ".."))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.tuples(path_parts, path_parts).map("/".join), unique=True, max_size=12))
def test_keys_are_unique_safe_and_short_for_any_names(parts: list[str]) -> None:
    paths = [f"train/{part}" for part in parts]
    keys = keys_for(paths)
    assert len({key.casefold() for key in keys}) == len(paths)
    for key in keys:
        assert 0 < len(key.encode("utf-8")) <= MAX_KEY_BYTES
        assert not set(key) & set(' ./\\:*?"<>|\0')
        assert PurePosixPath(key).name == key
    assert keys_for(paths) == keys


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_of_other_programs_are_read(tmp_path: Path, kind: int) -> None:
    long_name = "deep.folder/" + "x" * 85
    path = foreign_shard(
        tmp_path / "s.tar",
        [
            ("./a.JPEG", b"1"),
            ("./a.cls", b" 12\n"),
            ("b.json", b"{}"),
            ("b.cls", b"3"),
            ("b.jpg", b"22"),
            ("b.txt", b"t"),
            (f"{long_name}.jpeg", b"333"),
            (f"{long_name}.cls", b"0"),
        ],
        kind,
    )
    content = path.read_bytes()
    found = list(read_samples(path))
    assert [(s.key, s.label) for s in found] == [("./a", 12), ("b", 3), (long_name, 0)]
    assert [content[s.offset :][: s.length] for s in found] == [b"1", b"22", b"333"]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        (["0.jpg", "1.jpg", "0.cls", "1.cls"], "key '0' has ['jpg'] only, or not adjacent"),
        (["0.jpg", "1.jpg", "1.cls"], "key '0' has ['jpg'] only, or not adjacent"),
        (["0.jpg", "0.cls", "1.cls"], "key '1' has ['cls'] only"),
        (["0.jpg", "0.cls", "0.jpg", "0.cls"], "key '0' comes twice"),
        (["0.jpg", "0.jpeg", "0.cls"], "key '0' comes twice"),
        (["0.jpg", "0.cls", "1.jpg", "1.cls", "0.jpg", "0.cls"], "key '0' comes twice"),
    ],
)
def test_half_samples_are_refused_with_shard_and_key(
    tmp_path: Path, members: list[str], text: str
) -> None:
    path = foreign_shard(tmp_path / "s.tar", [(name, b"1") for name in members])
    with pytest.raises(ShardError, match=re.escape(f"{path}: {text}")):
        list(read_samples(path))


@pytest.mark.parametrize("label", [b"", b"cat", b"-1", b"1.5", b"2147483648", b"9" * 5000, b"\xff"])
def test_a_label_that_is_no_number_is_refused(tmp_path: Path, label: bytes) -> None:
    path = foreign_shard(tmp_path / "s.tar", [("0.jpg", b"1"), ("0.cls", label)])
    with pytest.raises(ShardError, match=r"key '0' has the label .*, not a number"):
        list(read_samples(path))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9])
def test_a_cut_shard_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "000000.tar"
    rows = write_shard(path).rows()
    content = path.read_bytes()[: int(rows["offset"][-1] + rows["length"][-1])]
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ShardError, match=re.escape(str(path))):
        list(read_samples(path))


def test_a_shard_cut_between_two_samples_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "000000.tar"
    rows = write_shard(path).rows()
    cut = int(rows["offset"][3]) - tarfile.BLOCKSIZE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ShardError, match="the archive has no end: it was cut"):
        list(read_samples(path))


def test_a_member_whose_header_is_gone_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x01" * 2000)
    assert member_name(tmp_path / "x", 600) == "the member at byte 600"
    assert member_name(tmp_path / "nowhere", 600) == "the member at byte 600"


@settings(
    deadline=None,
    max_examples=250,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4
    ),
    st.booleans(),
    st.booleans(),
)
def test_a_damaged_tar_gives_samples_or_a_shard_error(
    tmp_path: Path, changes: list[tuple[float, bytes]], in_headers: bool, cut: bool
) -> None:
    path = tmp_path / "s.tar"
    if not path.with_suffix(".whole").exists():
        foreign_shard(
            path.with_suffix(".whole"),
            [(f"{'k' * 120}{i}.{kind}", b"7" * 700) for i in range(3) for kind in ("jpg", "cls")],
        )
    content = bytearray(path.with_suffix(".whole").read_bytes())
    for place, junk in changes:
        offset = int(place * len(content))
        offset = offset // 512 * 512 + offset % 160 if in_headers else offset
        content[offset : offset + len(junk)] = junk
    path.write_bytes(bytes(content[: int(changes[0][0] * len(content))] if cut else content))
    try:
        found = list(read_samples(path))
    except ShardError:
        return
    np.array([(0, s.offset, s.length, s.label) for s in found], dtype=SAMPLE_DTYPE)
    assert all(s.offset + s.length <= len(content) for s in found)


@settings(
    deadline=None,
    max_examples=300,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(
        [(100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (257, 8), (0, 100)]
    ),
    st.integers(0, 11),
    st.one_of(
        st.binary(min_size=1, max_size=12),
        st.sampled_from(list(b"0123456789xgLKSDV")).map(lambda c: bytes([c])),
    ),
)
def test_a_header_that_lies_under_a_right_checksum_gives_samples_or_a_shard_error(
    tmp_path: Path, field: tuple[int, int], which: int, junk: bytes
) -> None:
    path = tmp_path / "s.tar"
    foreign_shard(path, [(f"{i}.{kind}", b"7") for i in range(3) for kind in ("jpg", "cls")])
    content = bytearray(path.read_bytes())
    header = which % 6 * 1024
    start, width = field
    content[header + start : header + start + min(width, len(junk))] = junk[:width]
    content[header + 148 : header + 156] = b" " * 8
    checksum = sum(content[header : header + 512])
    content[header + 148 : header + 156] = b"%06o\0 " % checksum
    path.write_bytes(content)
    try:
        found = list(read_samples(path))
    except ShardError:
        return
    np.array([(0, s.offset, s.length, s.label) for s in found], dtype=SAMPLE_DTYPE)
    assert all(s.offset + s.length <= len(content) for s in found)
