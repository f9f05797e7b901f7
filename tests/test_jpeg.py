from __future__ import annotations

import io
import itertools
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from prep import jpeg
from prep.jpeg import cut_region, image_size, recut, warm_up

Pixels = npt.NDArray[np.uint8]

ROOT = Path(__file__).parents[1]
REAL = ROOT.parent / "shared" / "data" / "imagenet-samples.tar"
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")
PILLOW_SAMPLINGS = (0, 1, 2, None)
SIZES = ((1, 1), (1, 40), (7, 8), (8, 9), (16, 17), (23, 5), (40, 120), (65, 130), (136, 137))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    random.seed(0)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (3 + 5 * c) + y / (9 - 2 * c) + c) for c in range(3)]
    noise = rng.normal(0, 12, (height, width, 3))
    return np.clip(128 + 90 * np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)


def encode(height: int, width: int, sampling: str = "420", quality: int = 85) -> bytes:
    pixels = picture(height, width, seed=height * 1000 + width)
    space = "RGB"
    if sampling == "Gray":
        pixels, space = np.ascontiguousarray(pixels[:, :, :1]), "GRAY"
    return bytes(simplejpeg.encode_jpeg(pixels, quality, space, sampling))


def encode_pillow(height: int, width: int, sampling: int | None = 2, **options: Any) -> bytes:
    image, file = Image.fromarray(picture(height, width)), io.BytesIO()
    if sampling is None:
        image, sampling = image.convert("L"), 0
    image.save(file, "JPEG", subsampling=sampling, **options)
    return file.getvalue()


def decode(data: bytes | memoryview, *, strict: bool = True) -> Pixels:
    return np.asarray(simplejpeg.decode_jpeg(data, strict=strict))


def decodes(data: bytes) -> bool:
    try:
        decode(data)
    except ValueError:
        return False
    return True


def pillow(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def new_file(data: bytes) -> bytes:
    result = recut(data)
    assert (result.status, result.reason) == ("recut", "")
    assert result.data is not None
    return result.data


def assert_same_picture(data: bytes, *, restarts_due: bool = True) -> None:
    out = new_file(data)
    assert np.array_equal(decode(out), decode(data))
    assert np.array_equal(pillow(out), pillow(data))
    assert b"\xff\xdd\x00\x04" in out or not restarts_due
    assert new_file(out) == out


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """Marker, start and stop of each segment up to the scan header."""
    found: list[tuple[int, int, int]] = []
    at = 2
    while not found or found[-1][0] != 0xDA:
        stop = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((data[at + 1], at, stop))
        at = stop
    return found


def segment(data: bytes, marker: int) -> tuple[int, int]:
    return next((start, stop) for found, start, stop in segments(data) if found == marker)


def insert(data: bytes, at: int, piece: bytes) -> bytes:
    return data[:at] + piece + data[at:]


def replace(data: bytes, at: int, *values: int) -> bytes:
    return data[:at] + bytes(values) + data[at + len(values) :]


# --------------------------------------------------------------------------------- equal pixels


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_recut_file_decodes_to_the_same_pixels(sampling: str) -> None:
    for (height, width), quality in itertools.product(SIZES, (5, 60, 100)):
        assert_same_picture(encode(height, width, sampling, quality))


@pytest.mark.parametrize("sampling", PILLOW_SAMPLINGS)
@pytest.mark.parametrize(
    "options",
    [
        {"optimize": True},
        {"restart_marker_blocks": 1},
        {"restart_marker_blocks": 7},
        {"restart_marker_rows": 1},
        {"restart_marker_rows": 3, "optimize": True},
        {"quality": 100, "optimize": True},
    ],
    ids=str,
)
def test_any_tables_and_restart_interval_are_taken(
    sampling: int | None, options: dict[str, Any]
) -> None:
    for height, width in SIZES:
        assert_same_picture(encode_pillow(height, width, sampling, **options))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 90),
    st.integers(1, 150),
    st.sampled_from(SAMPLINGS),
    st.integers(1, 100),
)
def test_any_picture_comes_out_the_same(
    height: int, width: int, sampling: str, quality: int
) -> None:
    assert_same_picture(encode(height, width, sampling, quality))


def test_pure_noise_and_flat_grey_come_out_the_same() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 72, 3), np.uint8)
    for pixels, quality in itertools.product((noise, noise * 0, noise | 255), (1, 100)):
        assert_same_picture(bytes(simplejpeg.encode_jpeg(pixels, quality, "RGB", "444")))


def relabelled(data: bytes, factors: tuple[int, ...]) -> bytes | None:
    """Tell the six blocks of a 4:2:0 MCU apart anew; None if one component would mix two tables."""
    (frame, _), (scan, _) = segment(data, 0xC0), segment(data, 0xDA)
    cols, rows = max(f >> 4 for f in factors), max(f & 15 for f in factors)
    data, start = replace(data, frame + 5, 0, 16 * rows, 0, 16 * cols), 0
    for c, factor in enumerate(factors):
        stop = start + (factor >> 4) * (factor & 15)
        if start < 4 < stop:
            return None
        data = replace(data, frame + 11 + 3 * c, factor)
        data = replace(data, scan + 6 + 2 * c, 0x11 if start >= 4 else 0)
        start = stop
    return data if start == 6 else None


def test_exotic_sampling_is_recut_exactly_if_it_decodes() -> None:
    data, taken = encode(32, 32, "420"), set()
    for factors in itertools.product((0x11, 0x12, 0x21, 0x22, 0x31, 0x13, 0x41), repeat=3):
        odd = relabelled(data, factors)
        if odd is None:
            continue
        result = recut(odd)
        assert (result.status == "recut") == decodes(odd), factors
        if result.data is not None:
            taken.add(factors)
            assert np.array_equal(decode(result.data), decode(odd)), factors
    assert taken == {(0x22, 0x11, 0x11), (0x41, 0x11, 0x11), (0x12,) * 3, (0x21,) * 3}


def test_two_hundred_mcus_in_a_row_are_cut_in_columns_and_a_prime_number_in_rows() -> None:
    for width, interval in ((1600, 8), (8 * 37, 37), (8, 1), (8 * 38, 19)):
        out = new_file(encode(16, width, "444"))
        start, _ = segment(out, 0xDD)
        assert int.from_bytes(out[start + 4 : start + 6], "big") == interval


def test_threads_get_the_same_bytes() -> None:
    files = [encode(50 + i, 90, SAMPLINGS[i % 6]) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(new_file, files)) == [new_file(data) for data in files]


# ------------------------------------------------------------------------------------ structure


def test_metadata_is_dropped_and_what_settles_the_colours_is_kept() -> None:
    data = encode(20, 20)
    exif = b"\xff\xe1\x00\x0aExif\0\0xx"
    icc = b"\xff\xe2\x00\x0dICC_PROFILE"
    comment = b"\xff\xfe\x00\x04hi"
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
    thumbnail = b"\xff\xe0\x00\x13JFIF\0\1\1\0\0\1\0\1\1\1\xab\xcd\xef"
    plain = new_file(data)
    assert new_file(insert(data, 2, exif + icc)) == plain
    assert new_file(insert(data, segment(data, 0xDA)[0], comment)) == plain
    start, stop = segment(data, 0xE0)
    no_jfif = data[:start] + data[stop:]
    assert b"JFIF" not in new_file(no_jfif)
    for front in (adobe, thumbnail, thumbnail + adobe):
        assert_same_picture(insert(no_jfif, 2, front), restarts_due=False)
    as_rgb = new_file(insert(no_jfif, 2, adobe))
    assert adobe in as_rgb
    assert not np.array_equal(decode(as_rgb), decode(plain))
    assert b"\xab\xcd\xef" not in new_file(insert(no_jfif, 2, thumbnail))


def test_fill_bytes_and_split_or_doubled_tables_are_taken() -> None:
    data = encode_pillow(40, 50, restart_marker_rows=1)
    plain = new_file(data)
    start, stop = segment(data, 0xC4)
    filled = insert(data[:-2], start, b"\xff\xff\xff") + b"\xff\xff\xff\xd9"
    assert new_file(filled) == plain
    assert new_file(data.replace(b"\xff\xd0", b"\xff\xff\xd0", 1)) == plain
    assert new_file(insert(data, start, data[start:stop])) == plain
    first, last = segments(data)[1][1], segment(data, 0xDA)[0]
    tables = [data[a + 4 : b] for marker, a, b in segments(data) if marker == 0xC4]
    joined = b"".join(tables)
    others = b"".join(data[a:b] for m, a, b in segments(data)[1:] if m not in (0xC4, 0xDA))
    one = data[:first] + others + b"\xff\xc4" + (len(joined) + 2).to_bytes(2, "big") + joined
    assert new_file(one + data[last:]) == plain


def test_16_bit_quantisation_tables_and_extended_frames_are_taken() -> None:
    data = encode(24, 24, "444")
    start, stop = segment(data, 0xDB)
    wide = b"\x10" + b"".join(bytes((0, value)) for value in data[start + 5 : start + 69])
    rest = data[start + 69 : stop]
    table = b"\xff\xdb" + (len(wide) + len(rest) + 2).to_bytes(2, "big") + wide + rest
    frame = segment(data, 0xC0)[0] + 1
    extended = replace(data, frame, 0xC1)
    assert_same_picture(extended)
    assert_same_picture(extended[:start] + table + extended[stop:])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: encode_pillow(20, 20, progressive=True), "progressive"),
        (lambda: encode_cmyk(), "4 components"),
        (lambda: replace(encode(20, 20), segment(encode(20, 20), 0xC0)[0] + 1, 0xC9), "arithmetic"),
        (lambda: replace(encode(20, 20), segment(encode(20, 20), 0xC0)[0] + 1, 0xC3), "lossless"),
        (lambda: replace(encode(20, 20), segment(encode(20, 20), 0xC0)[0] + 4, 12), "not 8 bits"),
        (lambda: with_arithmetic_conditioning(), "arithmetic"),
        (lambda: several_scans(), "more than one scan"),
    ],
    ids=["progressive", "cmyk", "arithmetic", "lossless", "12-bit", "conditioning", "scans"],
)
def test_what_the_recut_does_not_cover_is_said(make: Callable[[], bytes], reason: str) -> None:
    result = recut(make())
    assert result.status == "unsupported"
    assert reason in result.reason
    assert result.data is None
    assert (result.height, result.width) == (20, 20)


def with_arithmetic_conditioning() -> bytes:
    data = encode(20, 20)
    return insert(data, segment(data, 0xDA)[0], b"\xff\xcc\x00\x04\x00\x10")


def encode_cmyk() -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture(20, 20)).convert("CMYK").save(file, "JPEG")
    return file.getvalue()


def several_scans() -> bytes:
    """Three scans of one component each, as `jpegtran -scans` would make."""
    data = encode(20, 20, "444")
    grey = encode(20, 20, "Gray")
    start, stop = segment(data, 0xDA)
    body = grey[segment(grey, 0xDA)[1] : -2]
    ids = data[start + 5 : stop - 3 : 2]
    scans = [b"\xff\xda\x00\x08\x01" + bytes((i, 0, 0, 63, 0)) + body for i in ids]
    return data[:start] + b"".join(scans) + b"\xff\xd9"


# -------------------------------------------------------------------------------------- verdicts


def test_a_lost_end_marker_is_added_and_trailing_bytes_are_cut() -> None:
    data = encode(30, 40)
    plain = recut(data)
    assert plain.notes == ()
    for cut in (1, 2):
        mended = recut(data[:-cut])
        assert (mended.data, mended.notes) == (plain.data, ("end marker added",))
    longer = recut(data + bytes(512))
    assert (longer.data, longer.notes) == (plain.data, ("trailing bytes cut: 512",))
    assert recut(data + data).notes == (f"trailing bytes cut: {len(data)}",)
    assert recut(data + b"x", restarts=False).notes == ("trailing bytes cut: 1",)


def test_the_check_alone_gives_no_file() -> None:
    result = recut(encode(30, 41), restarts=False)
    assert (result.status, result.reason, result.data) == ("sound", "", None)
    assert (result.height, result.width, result.num_components) == (30, 41, 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_cut_at_any_byte_is_noticed(restarts: bool) -> None:
    options: dict[str, Any] = {"restart_marker_blocks": 2} if restarts else {}
    data = encode_pillow(40, 41, **options)
    scan = segment(data, 0xDA)[1]
    for size in range(len(data) - 2):
        for tail in (b"", b"\xff\xd9"):
            result = recut(data[:size] + tail)
            assert result.data is None
            assert result.status in ("truncated", "corrupt"), (size, tail, result)
            if size >= scan and not restarts:
                assert result.status == "truncated"
                assert result.reason.startswith("truncated at MCU ")
                assert result.reason.endswith(" of 9")


def test_restart_markers_out_of_order_are_refused() -> None:
    data = encode_pillow(40, 120, restart_marker_blocks=1)
    swapped = data.replace(b"\xff\xd1", b"\xff\xd8", 1)
    for other in (b"\xff\xd2", b"\xff\xd0", b"\xff\xd9", b"\xff\xc0", b""):
        result = recut(data.replace(b"\xff\xd1", other, 1))
        assert result.status in ("corrupt", "truncated")
    assert recut(swapped).reason == "corrupt at MCU 2 of 24: marker missing or out of place"


@pytest.mark.parametrize("count", [1, 2, 5, 600])
def test_zero_bytes_before_the_end_marker_are_cut(count: int) -> None:
    source = encode(40, 56)
    result = recut(insert(source, len(source) - 2, bytes(count)))
    assert result.notes == ("zero bytes before the end marker cut",)
    assert result.data == recut(source).data


def test_surplus_entropy_bytes_are_refused() -> None:
    data = encode(40, 120)
    result = recut(insert(data, len(data) - 2, b"\x37" * 20))
    assert result.reason == "corrupt at MCU 24 of 24: surplus bytes"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d[:0], "not a JPEG"),
        (lambda d: b"\x89PNG" + d, "not a JPEG"),
        (lambda d: bytes(len(d)), "not a JPEG"),
        (lambda d: replace(d, segment(d, 0xDB)[0] + 2, 0xFF, 0xFF), "truncated in the header"),
        (lambda d: replace(d, segment(d, 0xDB)[0] + 2, 0, 1), "segment that lies"),
        (lambda d: replace(d, segment(d, 0xC0)[0] + 5, 0, 0), "zero height or width"),
        (lambda d: replace(d, segment(d, 0xC0)[0] + 7, 0, 0), "zero height or width"),
        (lambda d: replace(d, segment(d, 0xC0)[0] + 11, 0x50), "sampling factor"),
        (lambda d: replace(d, segment(d, 0xC0)[0] + 11, 0x02), "sampling factor"),
        (lambda d: replace(d, segment(d, 0xC0)[0] + 12, 3), "a table is missing"),
        (lambda d: replace(d, segment(d, 0xDA)[0] + 6, 0x33), "a table is missing"),
        (lambda d: replace(d, segment(d, 0xC4)[0] + 5, 255, 255), "invalid table"),
        (lambda d: replace(d, segment(d, 0xC4)[0] + 5, 2), "invalid table"),
        (lambda d: replace(d, segment(d, 0xC4)[0] + 4, 0x25), "invalid table"),
        (lambda d: insert(d, segment(d, 0xC4)[0], b"xyz"), "stray bytes"),
        (lambda d: replace(d, segment(d, 0xDA)[0] + 4, 0), "invalid scan header"),
        (lambda d: d[:2] + d[segment(d, 0xDA)[0] :], "invalid scan header"),
    ],
)
def test_a_lying_header_is_named(change: Callable[[bytes], bytes], reason: str) -> None:
    data = change(encode(30, 40))
    result = recut(data)
    assert reason in result.reason
    assert result.status in ("corrupt", "truncated")
    assert not decodes(data)


def test_a_giant_claim_costs_nothing() -> None:
    data = encode(30, 40)
    giant = replace(data, segment(data, 0xC0)[0] + 5, 0xFF, 0xDC, 0xFF, 0xDC)
    assert recut(giant).reason.startswith("truncated at MCU ")
    assert image_size(giant) == (65500, 65500)


# -------------------------------------------------------------------------------- damaged files


def mutants(data: bytes, count: int, rng: random.Random) -> list[bytes]:
    """Files with flipped bits, changed bytes, swapped markers, cuts, doubled and lost pieces."""
    made = []
    for _ in range(count):
        new = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            kind, at = rng.randrange(8), rng.randrange(len(new))
            if rng.random() < 0.3:
                at = rng.randrange(min(len(new), 640))
            other = min(len(new), at + rng.randrange(1, 40))
            if kind <= 1:
                new[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                new[at] = rng.choice((0, 0xFF, 0xD0, 0xD9, 0xDA, rng.randrange(256)))
            elif kind == 3:
                del new[at:other]
            elif kind == 4:
                new[at:at] = new[at:other]
            elif kind == 5:
                new[at:other] = rng.randbytes(other - at)
            elif kind == 6:
                new[at : at + 2] = bytes((0xFF, rng.randrange(0xC0, 256)))
            else:
                del new[at:]
            new = new or bytearray(b"\xff")
        made.append(bytes(new))
    return made


def mutation_sources() -> list[bytes]:
    files = [encode(40, 56, sampling, 60) for sampling in SAMPLINGS]
    files += [encode_pillow(40, 56, restart_marker_blocks=2), encode_pillow(17, 9, optimize=True)]
    return files + [new_file(data) for data in files[:4]]


def assert_same_pixels(result: jpeg.Recut, data: bytes) -> None:
    assert result.data is not None
    pixels = decode(result.data)
    if "JFIF or Adobe marker mended" in result.notes:  # simplejpeg refuses these, strict or not
        assert np.array_equal(pillow(result.data), pillow(data))
    else:
        assert np.array_equal(pixels, decode(data, strict=not result.notes))


def check_mutant(data: bytes, rng: random.Random) -> str:
    result = recut(data)
    if result.data is not None:
        assert_same_pixels(result, data)
    size = image_size(data)
    height, width = size or (40, 56)
    box = rng.randrange(min(height, 60)), rng.randrange(min(width, 60)), 5, 7
    out = np.empty(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
    region = cut_region(np.frombuffer(data, np.uint8), box, out)
    if region is not None and result.data is not None:
        top, left = region.top, region.left
        part = decode(out[: region.size].data)[top : top + 5, left : left + 7]
        whole = decode(result.data)[box[0] : box[0] + 5, box[1] : box[1] + 7]
        assert np.array_equal(part, whole)
    return result.status


def check_mutants(count: int) -> set[str]:
    rng = random.Random(5)
    statuses = set()
    for data in mutation_sources():
        for mutant in mutants(data, count, rng):
            statuses.add(check_mutant(mutant, rng))
    return statuses


def test_damaged_files_are_refused_or_decode_strictly_to_the_same_pixels() -> None:
    assert check_mutants(800) == {"recut", "truncated", "corrupt", "unsupported"}


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert recut(data).data is None
    assert recut(b"\xff\xd8" + data).data is None
    out = np.empty(len(data) + 2 + jpeg.SCRATCH_BYTES, np.uint8)
    assert cut_region(np.frombuffer(b"\xff\xd8" + data, np.uint8), (0, 0, 1, 1), out) is None


@pytest.mark.slow
def test_no_kernel_reads_or_writes_outside_its_arrays(tmp_path: Path) -> None:
    code = "from test_jpeg import *; print(sorted(check_mutants(60))); check_regions(40)"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "truncated" in run.stdout


# --------------------------------------------------------------------------------------- regions


def assert_region_equals(data: bytes, box: tuple[int, int, int, int]) -> None:
    top, left, height, width = box
    source = np.frombuffer(data, np.uint8)
    out = np.empty(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
    region = cut_region(source, box, out)
    assert region is not None
    part = decode(out[: region.size].data)
    assert part.shape[:2] == (region.height, region.width)
    part = part[region.top : region.top + height, region.left : region.left + width]
    assert np.array_equal(part, decode(data)[top : top + height, left : left + width]), box


def random_box(height: int, width: int, rng: random.Random) -> tuple[int, int, int, int]:
    top, left = rng.randrange(height), rng.randrange(width)
    high = rng.choice((1, rng.randrange(1, height - top + 1), height - top))
    wide = rng.choice((1, rng.randrange(1, width - left + 1), width - left))
    return top, left, high, wide


def check_regions(count: int) -> None:
    rng = random.Random(3)
    for _ in range(count):
        sampling = rng.choice(SAMPLINGS)
        height, width = (
            rng.randrange(1, 150),
            rng.choice((rng.randrange(1, 60), 256, 259, 385, 514)),
        )
        data = new_file(encode(height, width, sampling))
        if data.count(b"\xff\xdd") and b"\xff\xdd" in data[: segment(data, 0xDA)[0]]:
            for _ in range(4):
                assert_region_equals(data, random_box(height, width, rng))


def test_pixels_under_a_random_box_equal_those_of_the_whole_picture() -> None:
    check_regions(400)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_box_edge_near_a_cut_is_exact(sampling: str) -> None:
    data = new_file(encode(67, 259, sampling))
    edges = [0, 1, 2, 3, 62, 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 258]
    for left, right in itertools.combinations([*edges, 259], 2):
        assert_region_equals(data, (20, left, 9, right - left))
    for top, bottom in itertools.combinations(
        [0, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 64, 66, 67], 2
    ):
        assert_region_equals(data, (top, 100, bottom - top, 9))


@pytest.mark.parametrize("sampling", PILLOW_SAMPLINGS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_restart_markers_of_others_serve_too(sampling: int | None, rows: int) -> None:
    rng = random.Random(rows)
    data = encode_pillow(100, 90, sampling, restart_marker_rows=rows)
    for _ in range(20):
        assert_region_equals(data, random_box(100, 90, rng))


def decode_scaled(data: bytes | memoryview, reduce: int) -> Pixels:
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    height, width = (height - 1) // reduce + 1, (width - 1) // reduce + 1
    pixels = np.asarray(simplejpeg.decode_jpeg(data, min_height=height, min_width=width))
    assert pixels.shape[:2] == (height, width)
    return pixels


@pytest.mark.parametrize("reduce", [2, 4, 8])
def test_a_scaled_decode_of_a_region_is_exact_too(reduce: int) -> None:
    boxes = (32, 64, 32, 64), (16, 192, 64, 64), (64, 128, 8, 8), (64, 184, 40, 64)
    for sampling, (top, left, height, width) in itertools.product(SAMPLINGS, boxes):
        data = new_file(encode(128, 512, sampling))
        whole = decode_scaled(data, reduce)[top // reduce :, left // reduce :]
        out = np.empty(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
        box = top, left, height, width
        region = cut_region(np.frombuffer(data, np.uint8), box, out, reduce=reduce)
        assert region is not None
        part = decode_scaled(out[: region.size].data, reduce)
        part = part[region.top // reduce :, region.left // reduce :]
        height, width = height // reduce, width // reduce
        assert np.array_equal(part[:height, :width], whole[:height, :width]), (sampling, box)


def test_a_small_region_takes_few_bytes() -> None:
    data = new_file(encode(256, 512, "444"))
    out = np.empty(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
    region = cut_region(np.frombuffer(data, np.uint8), (100, 70, 20, 50), out)
    assert region is not None
    assert (region.height, region.width, region.top, region.left) == (24, 57, 4, 6)
    assert region.size < len(data) // 10


def test_a_file_without_usable_restart_markers_is_left_to_the_caller() -> None:
    files = [encode(40, 80), encode_pillow(40, 80, restart_marker_blocks=3), b"", b"\xff\xd8\xff"]
    files += [encode_pillow(40, 80, progressive=True), new_file(encode(40, 80))[:-300]]
    for data in files:
        out = np.zeros(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
        assert cut_region(np.frombuffer(data, np.uint8), (10, 10, 30, 20), out) is None


def test_a_box_outside_the_picture_gives_none() -> None:
    data = new_file(encode(40, 80))
    out = np.zeros(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
    for box in (
        (-1, 0, 5, 5),
        (0, -1, 5, 5),
        (0, 0, 0, 5),
        (0, 0, 5, 0),
        (36, 0, 5, 5),
        (0, 76, 5, 5),
    ):
        assert cut_region(np.frombuffer(data, np.uint8), box, out) is None


def test_a_scratch_buffer_that_is_too_short_is_refused() -> None:
    data = np.zeros(100, np.uint8)
    with pytest.raises(ValueError, match="out must hold at least 2148 bytes, got 2147"):
        cut_region(data, (0, 0, 1, 1), np.zeros(2147, np.uint8))


def test_a_reduction_that_no_decoder_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce must be 1, 2, 4 or 8, got 3"):
        cut_region(b"", (0, 0, 1, 1), np.zeros(2148, np.uint8), reduce=3)


def test_any_kind_of_buffer_will_do() -> None:
    data = new_file(encode(40, 80))
    out = np.zeros(len(data) + jpeg.SCRATCH_BYTES, np.uint8)
    writable = np.frombuffer(bytearray(data), np.uint8)
    kinds = data, bytearray(data), memoryview(data), writable, np.frombuffer(data, np.uint8)
    assert len({recut(kind).data for kind in kinds}) == 1
    assert {image_size(kind) for kind in kinds} == {(40, 80)}
    assert len({cut_region(kind, (10, 10, 20, 20), out) for kind in kinds}) == 1
    assert writable.flags.writeable


def test_the_size_is_read_from_any_kind_of_jpeg() -> None:
    assert image_size(encode(31, 17)) == (31, 17)
    assert image_size(np.frombuffer(encode_pillow(9, 300, progressive=True), np.uint8)) == (9, 300)
    assert image_size(encode_cmyk()) == (20, 20)
    for data in (b"", b"\xff", b"\xff\xd8\xff\xc0\x00", b"GIF89a", bytes(99)):
        assert image_size(data) is None


# ------------------------------------------------------------------------------- its surroundings


def test_warming_up_twice_does_no_harm() -> None:
    warm_up()
    warm_up()


def test_importing_is_cheap_and_a_closed_cache_folder_does_no_harm(tmp_path: Path) -> None:
    closed = tmp_path / "file"
    closed.write_text("not a folder")
    code = (
        "import sys, prep.jpeg; print('numba' in sys.modules, 'torch' in sys.modules);"
        "print(prep.jpeg.image_size(b'x'), 'torch' in sys.modules)"
    )
    env = os.environ | {"NUMBA_CACHE_DIR": str(closed), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["False", "False", "None", "False"]), (
        run.stderr
    )


@pytest.mark.slow
def test_all_real_files_are_recut_to_equal_pixels_and_no_more_bytes() -> None:
    if not REAL.exists():
        pytest.skip(f"{REAL} is not here")
    rng, before, after = random.Random(0), 0, 0
    with tarfile.open(REAL) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".JPEG") else None
            if file is None:
                continue
            data = file.read()
            out = new_file(data)
            before, after = before + len(data), after + len(out)
            pixels = decode(data)
            assert np.array_equal(decode(out), pixels), member.name
            box = random_box(pixels.shape[0], pixels.shape[1], rng)
            assert_region_equals(out, box)
    assert 0 < after <= before
