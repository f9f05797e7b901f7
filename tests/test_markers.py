from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import encoded, jpeg, pixels, with_segments
from prep.markers import BASELINE, PROGRESSIVE, JpegError, read_structure


@pytest.mark.parametrize(
    ("data", "kind", "num_components"),
    [
        (jpeg(1, 40, 56), BASELINE, 3),
        (jpeg(1, 40, 56, progressive=True), PROGRESSIVE, 3),
        (jpeg(1, 40, 56, restart_marker_blocks=1), BASELINE, 3),
        (encoded(pixels(1, 40, 56)[..., 0]), BASELINE, 1),
    ],
)
def test_the_structure_of_a_whole_jpeg(data: bytes, kind: int, num_components: int) -> None:
    found = read_structure(data)
    assert (found.kind, found.num_components, found.precision) == (kind, num_components, 8)
    assert (found.height, found.width, found.end) == (40, 56, len(data))
    assert found.has_end_marker
    assert found.all_scans_present
    assert found.all_components_present


@pytest.mark.parametrize("surplus", [b"", b"\xff", b"\xff\xd9", jpeg(2), b"\xff\xda\x00\x00"])
def test_the_first_picture_ends_at_its_own_marker(surplus: bytes) -> None:
    assert read_structure(jpeg(1) + surplus).end == len(jpeg(1))


def test_a_thumbnail_in_exif_is_not_the_picture() -> None:
    found = read_structure(with_segments(jpeg(1, 40, 56), (0xE1, b"Exif\0\0" + jpeg(2, 8, 8))))
    assert (found.height, found.width) == (40, 56)


def test_fill_bytes_before_a_marker_are_passed_over() -> None:
    data = jpeg(1)
    scan = data.index(b"\xff\xda")
    filled = data[:scan] + b"\xff\xff\xff" + data[scan:-2] + b"\xff\xff" + data[-2:]
    assert read_structure(filled).end == len(filled)


@pytest.mark.parametrize("lost", [1, 2, 3, 100])
def test_a_missing_end_marker_is_told(lost: int) -> None:
    data = jpeg(1)[:-lost]
    found = read_structure(data)
    assert not found.has_end_marker
    assert found.end == len(data)


def test_each_missing_scan_of_a_progressive_jpeg_is_noticed() -> None:
    data = jpeg(1, progressive=True)
    scan = len(data)
    for _ in range(data.count(b"\xff\xda") - 1):
        scan = data.rindex(b"\xff\xda", 0, scan)
        assert not read_structure(data[:scan]).all_scans_present


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no JPEG start marker"),
        (b"\x89PNG", "no JPEG start marker"),
        (b"\xff\xd8", "ends before its picture data"),
        (b"\xff\xd8\xff\xd9", "no picture data"),
        (b"\xff\xd8\xff\xe0\x00\x10", "segment E0 at byte 2 runs past the end"),
        (b"\xff\xd8\xff\xe0\x00\x01\x00", "segment E0 at byte 2 runs past the end"),
        (b"\xff\xd8\xff\xc0\x00\x04\x08\x00\xff\xda\x00\x02", "its frame header is too short"),
    ],
)
def test_what_is_no_jpeg_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(JpegError, match=text):
        read_structure(data)


def require_structure_or_error(data: bytes) -> None:
    try:
        found = read_structure(data)
    except JpegError:
        return
    assert 2 < found.end <= len(data)
    assert found.has_end_marker == (data[found.end - 2 : found.end] == b"\xff\xd9")


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.sampled_from([b"\xff", b"\xc0", b"\xda", b"\xd9", b"\x00\x08", b"\x03", b"\x11"]))
)
def test_any_sequence_of_markers_gives_a_structure_or_an_error(parts: list[bytes]) -> None:
    require_structure_or_error(b"\xff\xd8" + b"".join(parts))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.sampled_from([False, True]), st.integers(0, 2000), st.binary(max_size=6))
def test_any_damage_gives_a_structure_or_an_error(
    progressive: bool, place: int, junk: bytes
) -> None:
    data = jpeg(1, progressive=progressive)
    require_structure_or_error(data[:place] + junk + data[place + len(junk) :])
