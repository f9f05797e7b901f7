"""Crop box -> pixels at the target size.

Boxes are drawn as torchvision draws them; pixels are decoded by libjpeg-turbo and resized with the
antialiased bilinear filter that torchvision uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from prep.jpeg import SCRATCH_BYTES, cut_region, image_size
from prep.resize import Span, needed, resize

Bytes = NDArray[np.uint8]

SCALE = (0.08, 1.0)
"""Share of the picture's area that a training crop covers."""
RATIO = (3 / 4, 4 / 3)
"""Width over height of a training crop."""
TRIES = 10
NUM_UNIFORMS = 2 * TRIES + 3
"""Random numbers that one training crop may use: two a try, two for the place, one for the flip."""


class Box(NamedTuple):
    """A rectangle of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


def train_box(height: int, width: int, uniforms: Sequence[float]) -> Box:
    """Draw the box of RandomResizedCrop, as `torchvision.transforms.RandomResizedCrop` does.

    Args:
        height: Of the picture.
        width: Of the picture.
        uniforms: `NUM_UNIFORMS` numbers in [0, 1).
    """
    area = height * width
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for attempt in range(TRIES):
        target = area * (SCALE[0] + uniforms[2 * attempt] * (SCALE[1] - SCALE[0]))
        ratio = math.exp(low + uniforms[2 * attempt + 1] * (high - low))
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniforms[2 * TRIES] * (height - h + 1))
            left = int(uniforms[2 * TRIES + 1] * (width - w + 1))
            return Box(top, left, h, w)
    ratio = min(max(width / height, RATIO[0]), RATIO[1])
    h = min(height, round(width / ratio))
    w = min(width, round(height * ratio))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def is_flipped(uniforms: Sequence[float]) -> bool:
    """Tell whether a training crop is mirrored: every second one."""
    return uniforms[NUM_UNIFORMS - 1] < 0.5


class EvalView(NamedTuple):
    """How a picture is seen in evaluation."""

    height: int
    """Of the whole picture after the resize."""
    width: int
    top: int
    """Of the centre crop in the resized picture; negative where that is smaller."""
    left: int


def eval_view(height: int, width: int, resize: int, crop: int) -> EvalView:
    """Give the sizes of `Resize(resize)` and the place of `CenterCrop(crop)`, as torchvision's."""
    if width <= height:
        new_width, new_height = resize, int(resize * height / width)
    else:
        new_width, new_height = int(resize * width / height), resize
    return EvalView(new_height, new_width, _centred(new_height, crop), _centred(new_width, crop))


def _centred(size: int, crop: int) -> int:
    """Give the start of a centred crop; negative where it is larger than the picture."""
    return round((size - crop) / 2.0) if size >= crop else -((crop - size) // 2)


class Decoder:
    """Decodes samples into slots of a batch; one for each thread, for it owns scratch memory."""

    def __init__(self) -> None:
        self._jpeg = np.empty(0, np.uint8)
        self._pixels = np.empty(0, np.uint8)

    def train(self, jpeg: Bytes, uniforms: Sequence[float], out: Bytes) -> None:
        """Decode one training sample: random crop, resize, flip.

        Args:
            jpeg: `(n,)` bytes of the file.
            uniforms: `NUM_UNIFORMS` numbers that decide the crop.
            out: `(S, S, 3)` uint8; is filled.

        Raises:
            ValueError: The bytes under the crop are not a whole JPEG.
        """
        height, width = _size(jpeg)
        box = train_box(height, width, uniforms)
        reduce = _reduction(box, out.shape[0])
        pixels, top, left, scale = self._decode(jpeg, (height, width), box, reduce)
        resize(
            pixels,
            Span(top, box.height * scale, out.shape[0], 0),
            Span(left, box.width * scale, out.shape[1], 0),
            out,
            flip=is_flipped(uniforms),
        )

    def evaluate(self, jpeg: Bytes, resize_size: int, out: Bytes) -> None:
        """Decode one evaluation sample: shorter side to a size, centre crop, black around it.

        Args:
            jpeg: `(n,)` bytes of the file.
            resize_size: Shorter side before the crop, in pixels.
            out: `(S, S, 3)` uint8; is filled.

        Raises:
            ValueError: The bytes under the crop are not a whole JPEG.
        """
        height, width = _size(jpeg)
        view = eval_view(height, width, resize_size, out.shape[0])
        rows = Span(0.0, height, view.height, max(view.top, 0))
        columns = Span(0.0, width, view.width, max(view.left, 0))
        part = _inside(view, out)
        top, bottom = needed(rows, part.shape[0], height)
        left, right = needed(columns, part.shape[1], width)
        box = Box(top, left, bottom - top, right - left)
        pixels, y, x, _ = self._decode(jpeg, (height, width), box, 1)
        resize(
            pixels,
            rows._replace(start=float(y - top)),
            columns._replace(start=float(x - left)),
            part,
        )

    def _decode(
        self, jpeg: Bytes, size: tuple[int, int], box: Box, reduce: int
    ) -> tuple[Bytes, float, float, float]:
        """Decode what lies under a box, by its restart segments where the file has them.

        Returns:
            The pixels, the box's top and left in them, and the scale, 1 or a half and so on.
        """
        if len(self._jpeg) < len(jpeg) + SCRATCH_BYTES:
            self._jpeg = np.empty(2 * (len(jpeg) + SCRATCH_BYTES), np.uint8)
        region = cut_region(jpeg, box, self._jpeg, reduce=reduce)
        if region is None:
            pixels = self._pixels_of(jpeg, size, reduce)
            return pixels, box.top / reduce, box.left / reduce, 1 / reduce
        pixels = self._pixels_of(self._jpeg[: region.size], (region.height, region.width), reduce)
        return pixels, region.top / reduce, region.left / reduce, 1 / reduce

    def _pixels_of(self, jpeg: Bytes, size: tuple[int, int], reduce: int) -> Bytes:
        height, width = -(-size[0] // reduce), -(-size[1] // reduce)
        if len(self._pixels) < 3 * height * width:
            self._pixels = np.empty(2 * 3 * height * width, np.uint8)
        pixels: Bytes = simplejpeg.decode_jpeg(
            jpeg,
            min_height=height if reduce > 1 else 0,
            min_width=width if reduce > 1 else 0,
            min_factor=reduce,
            buffer=self._pixels,
        )
        return pixels


def _size(jpeg: Bytes) -> tuple[int, int]:
    size = image_size(jpeg)
    if size is None:
        raise ValueError("no JPEG header")
    return size


def _reduction(box: Box, size: int) -> int:
    """Give how often the box may be halved by the decoder and still be `size` pixels or more."""
    times = min(box.height, box.width) // size
    return 8 if times >= 8 else 4 if times >= 4 else 2 if times >= 2 else 1


def _inside(view: EvalView, out: Bytes) -> Bytes:
    """Give the part of a slot that the picture covers; what is around it turns black."""
    size = out.shape[0]
    if view.height >= size and view.width >= size:
        return out
    out[:] = 0
    row, column = max(-view.top, 0), max(-view.left, 0)
    return out[row : row + min(view.height, size), column : column + min(view.width, size)]
