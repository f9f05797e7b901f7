from __future__ import annotations

import io
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile

from helpers import decoded, encoded, jpeg, pixels, with_segments
from prep.images import (
    KEPT,
    MAX_PIXELS,
    REJECTED,
    REPAIRED,
    ImageSettings,
    judge,
)

ADOBE = b"Adobe\x00\x64\x00\x00\x00\x00"


def smooth(seed: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """Give a picture without noise, which JPEG keeps within a level or two."""
    corners = Image.fromarray(pixels(seed, 3, 3))
    return np.asarray(corners.resize((width, height), Image.Resampling.BILINEAR))


def as_cmyk(seed: int = 3, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(smooth(seed)).convert("CMYK").save(buffer, "JPEG", quality=95, **options)
    return buffer.getvalue()


def without_adobe(data: bytes) -> bytes:
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def as_ycck(data: bytes) -> bytes:
    start = data.index(b"Adobe")
    return data[: start + 11] + b"\x02" + data[start + 12 :]


def as_pillow(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def require_close(data: bytes, wanted: NDArray[np.uint8], levels: float = 1.5) -> None:
    """Compare with the wanted pixels; JPEG at quality 95 costs a level or so."""
    found = decoded(data).astype(int)
    assert found.shape == wanted.shape
    difference = np.abs(found - wanted)
    assert difference.mean() <= levels
    assert np.quantile(difference, 0.99) <= 8 * levels


@pytest.mark.parametrize(
    "data",
    [
        jpeg(1),
        jpeg(1, optimize=True),
        jpeg(1, progressive=True),
        jpeg(1, subsampling=0),
        jpeg(1, subsampling=1),
        jpeg(1, restart_marker_blocks=2),
        jpeg(1, 1, 1),
        jpeg(1, 17, 3),
        encoded(pixels(1)[..., 0]),
        encoded(pixels(1)[..., 0], progressive=True),
        with_segments(jpeg(1), (0xE1, b"Exif\x00\x00" + bytes(500)), (0xED, b"Photoshop" * 40)),
    ],
    ids=[
        "baseline",
        "optimal tables",
        "progressive",
        "4:4:4",
        "4:2:2",
        "restarts",
        "one pixel",
        "narrow",
        "grey",
        "grey progressive",
        "EXIF",
    ],
)
def test_a_whole_jpeg_is_kept_with_the_same_pixels(data: bytes) -> None:
    verdict = judge(data)
    assert (verdict.action, verdict.reason) == (KEPT, "")
    np.testing.assert_array_equal(decoded(verdict.data), decoded(data))


@pytest.mark.parametrize("surplus", [b"\0", b"\r\n", bytes(5000), b"<html>", b"\xff\xd9\xff\xd9"])
def test_trailing_bytes_are_cut(surplus: bytes) -> None:
    verdict = judge(jpeg(1) + surplus)
    assert (verdict.action, verdict.reason) == (KEPT, f"trailing bytes cut: {len(surplus)}")
    np.testing.assert_array_equal(decoded(verdict.data), decoded(jpeg(1)))


def test_the_first_picture_of_a_camera_file_is_kept() -> None:
    buffer = io.BytesIO()
    second = Image.fromarray(pixels(2))
    Image.fromarray(pixels(1)).save(buffer, "MPO", save_all=True, append_images=[second])
    with Image.open(buffer) as image:
        assert image.format == "MPO"
    verdict = judge(buffer.getvalue())
    assert verdict.action == KEPT
    assert " cut: " in verdict.reason
    np.testing.assert_array_equal(decoded(verdict.data), as_pillow(buffer.getvalue()))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_end_marker_alone_is_mended(missing: int) -> None:
    verdict = judge(jpeg(1)[:-missing])
    assert (verdict.action, verdict.reason) == (KEPT, "end marker added")
    np.testing.assert_array_equal(decoded(verdict.data), decoded(jpeg(1)))


@pytest.fixture(params=[False, True], ids=["strict", "caller allows cut images"])
def truncated_allowed(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Try what a caller's global switch changes: nothing."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = request.param
    yield request.param
    ImageFile.LOAD_TRUNCATED_IMAGES = before


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("lost", [60, "30%", "90%"])
def test_a_cut_jpeg_is_rejected_whatever_the_global_switch_says(
    lost: int | str, progressive: bool, truncated_allowed: bool
) -> None:
    data = jpeg(1, progressive=progressive)
    num_lost = lost if isinstance(lost, int) else len(data) * int(lost[:-1]) // 100
    verdict = judge(data[:-num_lost])
    assert (verdict.action, verdict.data) == (REJECTED, b"")
    assert verdict.reason.startswith(("truncated", "damaged JPEG"))
    assert truncated_allowed is ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_cut_picture_of_another_kind_is_rejected(kind: str, truncated_allowed: bool) -> None:
    data = encoded(smooth(1), kind)
    verdict = judge(data[: len(data) // 2])
    assert verdict.action == REJECTED
    assert verdict.reason
    assert truncated_allowed is ImageFile.LOAD_TRUNCATED_IMAGES


def test_a_cut_cmyk_jpeg_is_rejected(truncated_allowed: bool) -> None:
    assert judge(as_cmyk()[:-60]).action == REJECTED
    assert truncated_allowed is ImageFile.LOAD_TRUNCATED_IMAGES


@pytest.mark.parametrize("progressive", [False, True])
def test_no_cut_anywhere_lets_a_changed_picture_in(progressive: bool) -> None:
    data = jpeg(1, 24, 24, progressive=progressive)
    whole = decoded(data)
    for stop in range(len(data)):
        verdict = judge(data[:stop])
        if verdict.action != REJECTED:
            np.testing.assert_array_equal(decoded(verdict.data), whole, f"cut at {stop}")


def test_the_global_switch_is_off_after_our_import() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def scans_of(*pictures: bytes) -> bytes:
    """Join grey JPEGs of one size and quality to a colour JPEG with a scan for each component."""
    first = pictures[0]
    frame, tables, scan = (
        first.index(marker) for marker in (b"\xff\xc0", b"\xff\xc4", b"\xff\xda")
    )
    head = first[frame + 4 : frame + 9]
    components = b"".join(bytes((number, 0x11, 0)) for number in (1, 2, 3))
    body = head + b"\x03" + components
    out = first[:frame] + b"\xff\xc0" + (len(body) + 2).to_bytes(2, "big") + body
    out += first[tables:scan]
    for number, picture in enumerate(pictures, start=1):
        start = picture.index(b"\xff\xda")
        out += b"\xff\xda\x00\x08\x01" + bytes((number,)) + b"\x00\x00\x3f\x00"
        out += picture[start + 10 : -2]
    return out + b"\xff\xd9"


def test_a_jpeg_with_one_scan_a_component_is_kept_only_with_all_of_them() -> None:
    grey = [encoded(pixels(1)[..., channel]) for channel in range(3)]
    whole = judge(scans_of(*grey))
    assert (whole.action, whole.reason) == (KEPT, "")
    assert decoded(whole.data).std() > 5
    for num_scans in (1, 2):
        verdict = judge(scans_of(*grey[:num_scans]))
        assert verdict.action == REJECTED
        assert verdict.reason == "truncated: a colour component has no scan"


@pytest.mark.parametrize("with_end_marker", [False, True])
def test_a_progressive_jpeg_without_its_last_scans(with_end_marker: bool) -> None:
    data = jpeg(1, progressive=True)
    last_scan = data.rindex(b"\xff\xda")
    cut = data[: data.rindex(b"\xff\xc4", 0, last_scan)]
    verdict = judge(cut + b"\xff\xd9" * with_end_marker)
    if with_end_marker:
        assert verdict.action == KEPT, "coarser on purpose: every decoder takes it"
    else:
        assert verdict.reason == "truncated: scans of a progressive JPEG are missing"


def test_corrupt_entropy_data_is_rejected() -> None:
    data = jpeg(1, 64, 64)
    middle = (data.index(b"\xff\xda") + len(data)) // 2
    verdict = judge(data[:middle] + b"\xff\x00" * 20 + data[middle + 40 :])
    assert verdict.action == REJECTED
    assert verdict.reason.startswith("corrupt")


def test_surplus_bytes_inside_the_picture_data_are_rejected() -> None:
    data = jpeg(1)
    assert judge(data[:-2] + b"\x55" * 40 + data[-2:]).reason.startswith("corrupt")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (bytes(4096), "4096 zero bytes"),
        (b"<!DOCTYPE html><html>gone</html>", "an HTML or XML page, not an image"),
        (b"\n <?xml version='1.0'?>", "an HTML or XML page, not an image"),
        (b"\xff\xd8\xff\xe0", "truncated in the header"),
        (b"\xff\xd8", None),
        (b"\xff\xd8\xff\xd9", None),
        (b"abcd", "not an image in a known format"),
        (b"%PDF-1.4\n" + bytes(range(256)), "not an image in a known format"),
        (b"RIFF\x10\x00\x00\x00WEBPVP8 ", None),
        (b"\x89PNG\r\n\x1a\n", None),
        (b"GIF89a", None),
    ],
)
def test_what_is_no_image_is_rejected_with_its_reason(data: bytes, reason: str | None) -> None:
    verdict = judge(data)
    assert (verdict.action, verdict.data) == (REJECTED, b"")
    assert verdict.reason
    assert reason is None or verdict.reason == reason


@pytest.mark.parametrize(
    "data",
    [as_cmyk(), without_adobe(as_cmyk()), as_ycck(as_cmyk()), as_cmyk(progressive=True)],
    ids=["Adobe", "no Adobe", "YCCK", "progressive"],
)
def test_cmyk_becomes_the_rgb_that_pillow_gives(data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == "CMYK"
    verdict = judge(data)
    assert (verdict.action, verdict.reason) == (REPAIRED, "CMYK JPEG, now RGB JPEG")
    require_close(verdict.data, as_pillow(data))


def test_cmyk_keeps_its_content_not_only_its_size() -> None:
    require_close(judge(as_cmyk(3)).data, smooth(3))


def test_the_known_odd_files_of_imagenet_come_out_repaired() -> None:
    known = {name: as_cmyk(number) for number, name in enumerate(IMAGENET_CMYK)}
    assert len(known) == 23
    known["n02105855_2933.JPEG"] = encoded(smooth(1), "PNG")
    for name, data in known.items():
        verdict = judge(data)
        assert verdict.action == REPAIRED, name
        require_close(verdict.data, as_pillow(data))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_another_format_under_a_jpeg_name_is_repaired(kind: str) -> None:
    data = encoded(smooth(1), kind)
    verdict = judge(data)
    assert verdict.action == REPAIRED
    assert verdict.reason == f"{kind} under a JPEG name, now RGB JPEG"
    assert verdict.data[:2] == b"\xff\xd8"
    require_close(verdict.data, as_pillow(data))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGBA", "PNG"),
        ("RGBA", "TIFF"),
        ("RGBA", "WEBP"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("P", "GIF"),
    ],
)
def test_transparency_lies_over_white(mode: str, kind: str) -> None:
    red = np.zeros((32, 32, 4), np.uint8)
    red[..., 0] = 200
    red[:, :16, 3] = 255
    options: dict[str, object] = {"lossless": True} if kind == "WEBP" else {}
    image = Image.fromarray(red)
    if mode == "P":
        image = Image.fromarray(red[..., 3] // 255)
        image.putpalette([0, 0, 0, 200, 0, 0])
        options["transparency"] = 0
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, kind, **options)
    found = decoded(judge(buffer.getvalue()).data)
    assert found[:, 18:].min() >= 250
    assert found[:, :14].min() < 100


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "RGB"])
def test_png_of_any_depth_keeps_its_levels(mode: str) -> None:
    ramp = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (16, 1))
    image = Image.fromarray(ramp)
    if mode == "I;16":
        image = Image.fromarray(ramp.astype(np.uint16) << 8)
    elif mode == "1":
        image = Image.fromarray((ramp > 127).astype(np.uint8) * 255).convert("1")
    else:
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    wanted = np.repeat((ramp > 127) * 255 if mode == "1" else ramp, 3).reshape(16, 64, 3)
    require_close(judge(buffer.getvalue()).data, wanted.astype(np.uint8), levels=2)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF"])
def test_the_first_frame_of_several_is_used(kind: str) -> None:
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:])
    assert decoded(judge(buffer.getvalue()).data).mean((0, 1)).round(-1).tolist() == [250, 0, 0]


def with_size(data: bytes, height: int, width: int) -> bytes:
    frame = data.index(b"\xff\xc0")
    sides = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return data[: frame + 5] + sides + data[frame + 9 :]


def claiming_png(height: int, width: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
        )

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x00\x00\x00\x00"
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "data",
    [
        with_size(jpeg(1), 65_000, 65_000),
        with_size(jpeg(1), 10_001, 10_000),
        claiming_png(10_001, 10_000),
        claiming_png(60_000, 60_000),
    ],
)
def test_a_picture_over_the_pixel_limit_is_rejected_unread(data: bytes) -> None:
    start = time.perf_counter()
    verdict = judge(data)
    assert verdict.action == REJECTED
    assert f"limit of {MAX_PIXELS}" in verdict.reason
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("sides", [(0, 64), (48, 0)])
def test_a_picture_without_a_side_is_rejected(sides: tuple[int, int]) -> None:
    for data in (jpeg(1), as_cmyk()):
        verdict = judge(with_size(data, *sides))
        assert verdict.action == REJECTED
        assert verdict.reason


DAMAGED_EXIF = (
    b"Exif\x00\x00",
    b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff" + b"\x12\x01\x03\x00\xff\xff\xff\x7f" * 8,
    b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + b"\xff" * 100,
    b"Exif\x00\x00junk",
)


@pytest.mark.parametrize("exif", DAMAGED_EXIF)
@pytest.mark.parametrize("base", [jpeg(1), as_cmyk()], ids=["RGB", "CMYK"])
def test_damaged_exif_is_accepted_without_a_word(
    base: bytes, exif: bytes, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    verdict = judge(with_segments(base, (0xE1, exif)))
    assert verdict.action == judge(base).action
    np.testing.assert_array_equal(decoded(verdict.data), decoded(judge(base).data))
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_an_orientation_is_not_applied() -> None:
    turned = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06"
    verdict = judge(with_segments(jpeg(1), (0xE1, turned + bytes(6))))
    np.testing.assert_array_equal(decoded(verdict.data), decoded(jpeg(1)))


@pytest.mark.parametrize(("height", "width", "wanted"), [(96, 64, (48, 32)), (64, 90, (32, 45))])
def test_short_side_shrinks_and_keeps_the_aspect(
    height: int, width: int, wanted: tuple[int, int]
) -> None:
    verdict = judge(jpeg(1, height, width), ImageSettings(short_side=32))
    found = decoded(verdict.data)
    assert (verdict.action, found.shape[:2]) == (KEPT, wanted)
    small = Image.fromarray(decoded(jpeg(1, height, width))).resize(wanted[::-1])
    assert np.abs(found.astype(int) - np.asarray(small)).mean() < 12


def test_short_side_never_enlarges_and_rejects_as_before() -> None:
    settings_now = ImageSettings(short_side=500)
    assert judge(jpeg(1), settings_now) == judge(jpeg(1))
    assert judge(jpeg(1)[:-60], ImageSettings(short_side=8)).action == REJECTED
    assert judge(as_cmyk(), ImageSettings(short_side=8)).action == REPAIRED


def test_quality_changes_the_size_of_shrunk_images_only() -> None:
    low, high = (
        judge(jpeg(1, 64, 64), ImageSettings(short_side=32, quality=quality)).data
        for quality in (20, 95)
    )
    assert len(low) < len(high)
    assert judge(jpeg(1), ImageSettings(quality=20)) == judge(jpeg(1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"short_side": -1}, "--short-side must be in 0..65500, got -1"),
        ({"short_side": 65_501}, "--short-side must be in 0..65500, got 65501"),
        ({"quality": 0}, "--quality must be in 1..100, got 0"),
        ({"quality": 101}, "--quality must be in 1..100, got 101"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ImageSettings(**options)


BASES = (
    jpeg(1, 16, 24),
    jpeg(1, 16, 24, progressive=True),
    jpeg(1, 16, 24, restart_marker_blocks=1),
    with_segments(jpeg(1, 16, 16), (0xE1, DAMAGED_EXIF[1])),
    as_cmyk(),
    *(encoded(pixels(1, 16, 16), kind) for kind in ("PNG", "WEBP", "BMP", "GIF", "TIFF")),
    encoded(pixels(1, 16, 16), "TIFF", compression="tiff_lzw"),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("set", "cut", "insert", "drop"))):
            case "set":
                data[place : place + 1] = bytes((draw(st.integers(0, 255)),))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=8))
            case _:
                del data[place : place + draw(st.integers(1, 40))]
    return bytes(data)


def require_sound(data: bytes) -> None:
    verdict = judge(data)
    if verdict.action == REJECTED:
        assert verdict.reason
        assert verdict.data == b""
    else:
        assert decoded(verdict.data).size
        again = judge(verdict.data)
        assert (again.action, again.reason) == (KEPT, "")
        np.testing.assert_array_equal(decoded(again.data), decoded(verdict.data))


QUIET = settings(
    deadline=None,
    max_examples=150,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@QUIET
@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    require_sound(data)
    require_sound(b"\xff\xd8" + data)


@QUIET
@given(damaged())
def test_damaged_files_never_raise_and_what_is_accepted_decodes(data: bytes) -> None:
    require_sound(data)


IMAGENET_CMYK = (
    "n01739381_1309.JPEG",
    "n02077923_14822.JPEG",
    "n02447366_23489.JPEG",
    "n02492035_15739.JPEG",
    "n02747177_10752.JPEG",
    "n03018349_4028.JPEG",
    "n03062245_4620.JPEG",
    "n03347037_9675.JPEG",
    "n03467068_12171.JPEG",
    "n03529860_11437.JPEG",
    "n03544143_17228.JPEG",
    "n03633091_5218.JPEG",
    "n03710637_5125.JPEG",
    "n03961711_5286.JPEG",
    "n04033995_2932.JPEG",
    "n04258138_17003.JPEG",
    "n04264628_27969.JPEG",
    "n04336792_7448.JPEG",
    "n04371774_5854.JPEG",
    "n04596742_4225.JPEG",
    "n07583066_647.JPEG",
    "n13037406_4650.JPEG",
    "ILSVRC2012_val_00019877.JPEG",
)
