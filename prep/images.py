"""One file's bytes in -> bytes that every trainer can decode, or the reason why there are none.

A full decode decides, always strict about missing data: Pillow's switch LOAD_TRUNCATED_IMAGES is
never trusted, whatever the caller set.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, UnidentifiedImageError

from prep.jpeg import recut
from prep.markers import BASELINE, JpegError, JpegStructure, read_structure

MAX_PIXELS = 100_000_000
"""Larger pictures are rejected unread: none of ImageNet's comes near, one would fill the memory."""
REPAIR_QUALITY = 95
KEPT, REPAIRED, REJECTED = "kept", "repaired", "rejected"
OTHER_FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF")
END_MARKER = b"\xff\xd9"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """How accepted images are written."""

    short_side: int = 0
    """Shrink so that the shorter side has this many pixels; 0 keeps the size."""
    quality: int = 90
    """JPEG quality of shrunk images."""
    restarts: bool = True
    """Write baseline JPEGs again with restart markers, so that regions can be decoded alone."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.short_side <= 65_500:
            raise ValueError(f"--short-side must be in 0..65500, got {self.short_side}")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"--quality must be in 1..100, got {self.quality}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of one file."""

    action: str
    """`kept`, `repaired` or `rejected`."""
    reason: str
    """Why; empty for a file that was fine as it was."""
    data: bytes
    """The JPEG to pack; empty if rejected."""


class _RejectedError(Exception):
    """Carries the reason out of the depths of one judgement."""


def judge(data: bytes, settings: ImageSettings | None = None) -> Verdict:
    """Judge one image file by decoding it whole.

    Args:
        data: The file's bytes, whatever its name says they are.
        settings: How accepted images are written; by default as they are.

    Returns:
        A verdict whose `data`, unless rejected, is one baseline or progressive JPEG, grey or
        colour, that libjpeg-turbo decodes without a warning.
    """
    settings = settings or ImageSettings()
    try:
        if data[:2] == b"\xff\xd8":
            verdict = _judge_jpeg(data, restarts=settings.restarts)
        else:
            verdict = _judge_other(data)
        if settings.short_side:
            return _shrink(verdict, settings)
    except _RejectedError as error:
        return Verdict(action=REJECTED, reason=str(error), data=b"")
    return verdict


def _judge_jpeg(data: bytes, *, restarts: bool) -> Verdict:
    found = recut(data, restarts=restarts)
    if found.height and found.width:
        _check_size(found.width, found.height)
    if found.data is not None:
        return Verdict(action=KEPT, reason="; ".join(found.notes), data=found.data)
    if found.status == "sound" and not found.notes:
        return Verdict(action=KEPT, reason="", data=data)
    if found.status in ("truncated", "corrupt"):
        raise _RejectedError(found.reason)
    return _judge_by_decoding(data)


def _judge_by_decoding(data: bytes) -> Verdict:
    """Judge a JPEG that the re-cut does not cover, or that has a surplus, by a full decode."""
    try:
        structure = read_structure(data)
    except JpegError as error:
        raise _RejectedError(f"damaged JPEG: {error}") from error
    _check_size(structure.width, structure.height)
    if not structure.all_components_present:
        raise _RejectedError("truncated: a colour component has no scan")
    if not structure.has_end_marker and not structure.all_scans_present:
        raise _RejectedError("truncated: scans of a progressive JPEG are missing")
    picture, notes = _trim(data, structure)
    if structure.num_components == 4:
        _decode_strictly(picture, "CMYK")
        return _reencode(picture, "CMYK JPEG", ("JPEG",))
    if structure.num_components in (1, 3) and structure.precision == 8 and _is_known(picture):
        _decode_strictly(picture, "GRAY" if structure.num_components == 1 else "RGB")
        return Verdict(action=KEPT, reason="; ".join(notes), data=picture)
    return _repair_rare_jpeg(picture, structure)


def _check_size(width: int, height: int) -> None:
    if width == 0 or height == 0:
        raise _RejectedError(f"damaged: {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise _RejectedError(f"{width} x {height} pixels are over the limit of {MAX_PIXELS}")


def _trim(data: bytes, structure: JpegStructure) -> tuple[bytes, list[str]]:
    """Cut what follows the picture (garbage, a second frame), add an end marker it lacks."""
    if not structure.has_end_marker:
        return data.rstrip(b"\xff") + END_MARKER, ["end marker added"]
    surplus = len(data) - structure.end
    if not surplus:
        return data, []
    what = (
        "second picture cut" if b"\xff\xd8\xff" in data[structure.end :] else "trailing bytes cut"
    )
    return data[: structure.end], [f"{what}: {surplus} bytes"]


def _is_known(picture: bytes) -> bool:
    """Tell whether libjpeg-turbo's own interface, which the loader uses, takes the file at all."""
    try:
        simplejpeg.decode_jpeg_header(picture, strict=False)
    except (ValueError, KeyError):  # KeyError: a colour space or sampling it has no name for
        return False
    return True


def _decode_strictly(picture: bytes, colorspace: str) -> None:
    """Decode whole; any complaint of libjpeg-turbo about missing or corrupt data rejects."""
    try:
        simplejpeg.decode_jpeg(picture, colorspace=colorspace, strict=True)
    except (ValueError, KeyError, MemoryError) as error:
        reason = str(error).removeprefix("Corrupt JPEG data: ")
        kind = "truncated" if "premature" in reason.lower() else "corrupt"
        raise _RejectedError(f"{kind}: {reason}") from error


def _repair_rare_jpeg(picture: bytes, structure: JpegStructure) -> Verdict:
    """Rewrite what only Pillow decodes: odd sampling factors, two components."""
    kind = f"JPEG of kind {structure.kind:02X}" if structure.kind != BASELINE else "JPEG"
    return _reencode(
        picture,
        f"{kind} with {structure.num_components} components that common decoders refuse",
        ("JPEG",),
    )


def _judge_other(data: bytes) -> Verdict:
    if not data:
        raise _RejectedError("empty file")
    if not data.strip(b"\0"):
        raise _RejectedError(f"{len(data)} zero bytes")
    if data.lstrip()[:1] == b"<":
        raise _RejectedError("an HTML or XML page, not an image")
    return _reencode(data, "", OTHER_FORMATS)


def _reencode(data: bytes, what: str, formats: tuple[str, ...]) -> Verdict:
    """Decode with Pillow and write an RGB JPEG."""
    with _strict_pillow():
        try:
            with Image.open(io.BytesIO(data), formats=formats) as image:
                what = what or f"{image.format} under a JPEG name"
                _check_size(*image.size)
                rgb = _to_rgb(image)
        except UnidentifiedImageError as error:
            raise _RejectedError("not an image in a known format") from error
        except Image.DecompressionBombError as error:
            raise _RejectedError(f"over the limit of {MAX_PIXELS} pixels: {error}") from error
        except _RejectedError:
            raise
        except Exception as error:
            raise _RejectedError(f"undecodable {what or 'image'}: {error}") from error
    return Verdict(
        action=REPAIRED, reason=f"{what}, now RGB JPEG", data=_encode(rgb, REPAIR_QUALITY, "444")
    )


@contextmanager
def _strict_pillow() -> Iterator[None]:
    """Make Pillow refuse truncated data and keep its warnings (EXIF, sizes) off the console."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _to_rgb(image: Image.Image) -> Image.Image:
    """Give the first frame as RGB, transparency over white."""
    image.load()
    if image.mode.startswith("I;16") or image.mode == "I":
        levels = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        front = image.convert("RGBA")
        white = Image.new("RGBA", front.size, "white")
        return Image.alpha_composite(white, front).convert("RGB")
    return image.convert("RGB")


def _encode(rgb: Image.Image, quality: int, subsampling: str) -> bytes:
    return bytes(
        simplejpeg.encode_jpeg(
            np.ascontiguousarray(np.asarray(rgb)), quality, "RGB", colorsubsampling=subsampling
        )
    )


def _shrink(verdict: Verdict, settings: ImageSettings) -> Verdict:
    """Write the image again with `short_side` pixels at its shorter side, never larger."""
    with _strict_pillow(), Image.open(io.BytesIO(verdict.data), formats=("JPEG",)) as image:
        shorter = min(image.size)
        if shorter <= settings.short_side:
            return verdict
        scale = settings.short_side / shorter
        width, height = (max(1, round(side * scale)) for side in image.size)
        small = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    return Verdict(
        action=verdict.action,
        reason=verdict.reason,
        data=_encode(small, settings.quality, "420"),
    )
