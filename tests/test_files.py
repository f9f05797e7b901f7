from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from prep.files import (
    RENAME_TRIES,
    local_path,
    native_path,
    portable_name,
    put_in_place,
    shown,
    write_text_whole,
    write_whole,
)

ON_WINDOWS = os.name == "nt"
ODD_NAMES = ("a b", "it's", "50%20", "a&b", "x#1", "ends in a dot.", "数据 集", "{0..9}", "ab=c;d")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note the waits between two tries instead of waiting."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("place", ["E:\\x", "E:/x", "e:\\shards\\train"])
def test_a_drive_letter_is_no_address(place: str) -> None:
    path = local_path(place)
    assert path.is_absolute()
    if ON_WINDOWS:
        assert shown(path).lower() == place.replace("/", "\\").lower()
    else:
        assert path == Path.cwd() / place


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_file_address_names_the_same_place_as_its_path(tmp_path: Path, name: str) -> None:
    address = (tmp_path / name).as_uri()
    assert shown(local_path(address)) == shown(local_path(tmp_path / name))
    assert shown(local_path(Path(address))) == shown(local_path(tmp_path / name))


@pytest.mark.parametrize(
    "address", ["http://host/x.tar?a=1&b=2", "s3://bucket/x", "https:/host/x", "gs://b"]
)
def test_an_address_elsewhere_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not on this machine: give a folder or a file: addr"):
        local_path(address)
    with pytest.raises(ValueError, match="is not on this machine"):
        local_path(Path(address))


@pytest.mark.skipif(ON_WINDOWS, reason="a colon cannot be in a Windows name")
def test_a_colon_in_a_relative_path_is_no_address() -> None:
    assert local_path("run:1") == Path.cwd() / "run:1"


def test_a_relative_path_becomes_absolute_and_dots_are_resolved() -> None:
    assert shown(local_path("a/../b")) == str(Path.cwd() / "b")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\\\\?\\E:\\x", "E:\\x"),
        ("\\\\?\\UNC\\server\\share\\x", "\\\\server\\share\\x"),
        ("plain", "plain"),
    ],
)
def test_shown_paths_have_no_prefix(text: str, wanted: str) -> None:
    assert shown(Path(text)) == wanted


@pytest.mark.skipif(not ON_WINDOWS, reason="the prefix is for Windows paths")
def test_windows_paths_carry_the_prefix_that_lifts_the_limit() -> None:
    assert str(local_path("E:/a/b")) == "\\\\?\\E:\\a\\b"
    assert str(local_path("//server/share/a")) == "\\\\?\\UNC\\server\\share\\a"
    assert local_path(local_path("E:/a")) == local_path("E:/a")


def test_files_under_a_path_over_260_characters_are_written_and_read(tmp_path: Path) -> None:
    folder = local_path(tmp_path).joinpath(
        *["a folder of fifty characters, give or take one or two"] * 6
    )
    assert len(str(folder)) > 300
    folder.mkdir(parents=True)
    write_text_whole(folder / "x.txt", "whole")
    assert (folder / "x.txt").read_text(encoding="utf-8") == "whole"


def test_text_is_utf8_with_plain_line_feeds(tmp_path: Path) -> None:
    write_text_whole(tmp_path / "x", "数据\nü\n")
    assert (tmp_path / "x").read_bytes() == "数据\nü\n".encode()


def test_text_with_undecodable_bytes_of_a_name_is_written_escaped(tmp_path: Path) -> None:
    write_text_whole(tmp_path / "x", "a\udcff")
    assert (tmp_path / "x").read_bytes() == b"a\\udcff"


@pytest.mark.parametrize("name", ["n01440764", "数据 集", "a\udcffb"])
def test_a_portable_name_opens_the_same_file(name: str) -> None:
    if ON_WINDOWS or os.fsencode("ü") == "ü".encode():
        assert portable_name(name) == name
    assert native_path(portable_name(name)) == name


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fill(file: BinaryIO) -> None:
        file.write(b"half")
        file.flush()
        assert path.read_bytes() == b"old"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_whole(path, fill)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


class HeldPath(type(Path())):  # type: ignore[misc]  # the class of this system's paths
    """A temporary file whose target is held by another program for a while."""

    num_refusals = 0

    def replace(self, target: Path) -> Path:
        if HeldPath.num_refusals > 0:
            HeldPath.num_refusals -= 1
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        return Path(self).replace(target)


def test_a_held_target_is_tried_again(tmp_path: Path, no_waiting: list[float]) -> None:
    HeldPath.num_refusals = 2
    (tmp_path / "x.tmp").write_bytes(b"new")
    put_in_place(HeldPath(tmp_path / "x.tmp"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert no_waiting == [0.1, 0.2]


def test_a_target_that_stays_held_ends_in_one_clear_error(
    tmp_path: Path, no_waiting: list[float]
) -> None:
    HeldPath.num_refusals = 99
    (tmp_path / "x.tmp").write_bytes(b"new")
    with pytest.raises(PermissionError, match="still open in another program: close it") as caught:
        put_in_place(HeldPath(tmp_path / "x.tmp"), tmp_path / "x")
    assert caught.value.filename == str(tmp_path / "x")
    assert len(no_waiting) == RENAME_TRIES - 1
    assert 2 < sum(no_waiting) < 5


@pytest.mark.skipif(not ON_WINDOWS, reason="elsewhere an open file can be replaced")
def test_an_open_target_is_never_damaged_on_windows(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with (tmp_path / "x").open("rb"), pytest.raises(PermissionError, match="still open"):
        write_text_whole(tmp_path / "x", "new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]
