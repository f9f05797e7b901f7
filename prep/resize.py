"""The antialiased bilinear resize, written straight into a slot of a batch.

It lives beside the packer so that packing compiles it and the first training run need not. The
filter is the triangle that Pillow and torch use (`antialias=True`): its support grows with the
reduction. Rows are weighed first, in float32, then columns, in integers where few pixels are
weighed. A value differs by at most 1 from torch's, which rounds to whole levels in between.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
QUARTERS = np.float32(4.0)
"""Rows are weighed to a quarter of a level, columns with weights of 1/2048: 8 + 2 + 11 bits a
channel, so that three fit into one 64-bit integer."""
ONE = 2048
_GREEN, _BLUE, _SHIFT = np.uint64(21), np.uint64(42), np.uint64(13)
_HALF = np.uint64(1 << 12 | 1 << 33 | 1 << 54)


class Span(NamedTuple):
    """One axis of a resize: which part of which grid is wanted, from which part of the source."""

    start: float
    """Where the source box begins, in pixels of the array; may lie between two."""
    length: float
    """Length of the source box, in pixels of the array."""
    size: int
    """Number of output pixels that the whole box is resized to."""
    first: int
    """First of them that is wanted."""


def resize(pixels: Pixels, rows: Span, columns: Span, out: Pixels, *, flip: bool = False) -> None:
    """Resize a box of a picture into `out`.

    Args:
        pixels: `(h, w, 3)` uint8, C-contiguous.
        rows: The vertical axis.
        columns: The horizontal axis.
        out: `(H, W, 3)` uint8, is filled. It holds the output pixels
            `first..first+H-1` and `first..first+W-1` of the two axes.
        flip: Mirror the columns of `out`.
    """
    whole = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
    # Plain tuples: numba's cache on disk must not name a class that a later version may lack.
    _resize(
        pixels.reshape(len(pixels), -1),
        (float(rows.start), float(rows.length), int(rows.size), int(rows.first)),
        (float(columns.start), float(columns.length), int(columns.size), int(columns.first)),
        whole.reshape(len(out), -1),
        flip,
    )
    if whole is not out:
        out[:] = whole


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache."""
    pixels = np.zeros((2, 2, 3), np.uint8)
    resize(pixels, Span(0, 2, 2, 0), Span(0, 2, 2, 0), pixels.copy())


def needed(span: Span, count: int, limit: int) -> tuple[int, int]:
    """Give the half-open range of source pixels that `count` outputs of an axis depend on."""
    scale = span.length / span.size
    support = max(scale, 1.0)
    low = span.start + scale * (span.first + 0.5) - support
    high = span.start + scale * (span.first + count - 0.5) + support
    return max(0, math.floor(low)), min(limit, math.ceil(high))


def _kernel(function: Any) -> Any:
    return numba.njit(function, nogil=True, cache=True, fastmath=True, error_model="numpy")


@_kernel
def _weigh(span, count, limit, weights, starts):  # type: ignore[no-untyped-def]
    """Fill the weights and first source pixel of each output; gives the number of taps.

    Taps end at the box, as torch's end at the edge of the cropped picture.
    """
    start, length, size, first = span
    scale = length / size
    support = max(scale, 1.0)
    low_limit, high_limit = max(int(start), 0), min(math.ceil(start + length), limit)
    taps = 1
    for i in range(count):
        centre = scale * (first + i + 0.5) + start
        low = max(low_limit, int(centre - support + 0.5))
        high = min(high_limit, int(centre + support + 0.5))
        taps = max(taps, high - low)
        starts[i] = low
    for i in range(count):
        centre = scale * (first + i + 0.5) + start
        high = min(high_limit, int(centre + support + 0.5))
        low = max(min(starts[i], limit - taps), 0)
        total = 0.0
        for k in range(taps):
            weight = 1.0 - abs((low + k + 0.5 - centre) / support)
            if weight < 0.0 or low + k < starts[i] or low + k >= high:
                weight = 0.0
            weights[i, k] = weight
            total += weight
        for k in range(taps):
            weights[i, k] /= total
        starts[i] = low
    return taps


@_kernel
def _quantise(weights, taps, whole):  # type: ignore[no-untyped-def]
    """Give the weights as integers whose sum is `ONE`: what rounding loses, the largest gets."""
    for i in range(len(weights)):
        rest, largest = ONE, 0
        for k in range(taps):
            whole[i, k] = round(weights[i, k] * ONE)
            rest -= int(whole[i, k])
            if weights[i, k] > weights[i, largest]:
                largest = k
        whole[i, largest] += np.uint64(rest)


@_kernel
def _add_rows(pixels, start, weights, taps, row):  # type: ignore[no-untyped-def]
    """Weigh the rows of one output row into float32, in quarters of a level."""
    source, weight = pixels[start], QUARTERS * weights[0]
    for j in range(len(row)):
        row[j] = np.float32(0.5) + np.float32(source[j]) * weight
    for k in range(1, taps):
        source, weight = pixels[start + k], QUARTERS * weights[k]
        if weight != 0.0:
            for j in range(len(row)):
                row[j] += np.float32(source[j]) * weight


@_kernel
def _pack(row, packed):  # type: ignore[no-untyped-def]
    """Put the channels of each pixel into one integer, 21 bits each, to weigh them at once."""
    for i in range(len(packed)):
        packed[i] = (
            np.uint64(np.int32(row[3 * i]))
            | np.uint64(np.int32(row[3 * i + 1])) << _GREEN
            | np.uint64(np.int32(row[3 * i + 2])) << _BLUE
        )


def _column_adder(num_taps: int) -> Any:
    """Compile the weighing of columns for one number of taps, which the compiler unrolls."""

    @_kernel
    def add(packed, starts, weights, line):  # type: ignore[no-untyped-def]
        for i in range(len(starts)):
            start, total = starts[i], _HALF
            for k in range(num_taps):
                total += packed[start + k] * weights[i, k]
            line[3 * i] = np.uint8(total >> _SHIFT)
            line[3 * i + 1] = np.uint8(total >> _SHIFT + _GREEN)
            line[3 * i + 2] = np.uint8(total >> _SHIFT + _BLUE)

    return add


_add_2, _add_3, _add_4, _add_5 = (_column_adder(num_taps) for num_taps in (2, 3, 4, 5))


@_kernel
def _add_many(row, starts, weights, taps, line):  # type: ignore[no-untyped-def]
    """Weigh the columns in float32: over many taps the rounding of integer weights adds up."""
    for i in range(len(starts)):
        red = green = blue = np.float32(1.5)  # rounds; `row` holds half a quarter already
        for k in range(taps):
            j, weight = 3 * (starts[i] + k), weights[i, k]
            red += row[j] * weight
            green += row[j + 1] * weight
            blue += row[j + 2] * weight
        line[3 * i] = np.uint8(red / QUARTERS)
        line[3 * i + 1] = np.uint8(green / QUARTERS)
        line[3 * i + 2] = np.uint8(blue / QUARTERS)


@_kernel
def _add_few(packed, starts, weights, taps, line):  # type: ignore[no-untyped-def]
    """Weigh the columns of one row into bytes; each number of taps has a loop of its own."""
    if taps == 2:
        _add_2(packed, starts, weights, line)
    elif taps == 3:
        _add_3(packed, starts, weights, line)
    elif taps == 4:
        _add_4(packed, starts, weights, line)
    else:
        _add_5(packed, starts, weights, line)


@_kernel
def _resize(pixels, rows, columns, out, flip):  # type: ignore[no-untyped-def]
    height, width = len(pixels), pixels.shape[1] // 3
    num_rows, num_columns = len(out), out.shape[1] // 3
    most_row_taps = 2 * math.ceil(max(rows[1] / rows[2], 1.0)) + 1
    most_column_taps = 2 * math.ceil(max(columns[1] / columns[2], 1.0)) + 1
    row_weights = np.empty((num_rows, most_row_taps), np.float32)
    column_weights = np.empty((num_columns, most_column_taps), np.float32)
    row_starts, column_starts = np.empty(num_rows, np.uint32), np.empty(num_columns, np.uint32)
    row_taps = _weigh(rows, num_rows, height, row_weights, row_starts)
    column_taps = min(_weigh(columns, num_columns, width, column_weights, column_starts), width)
    first = column_starts[0]
    used = pixels[:, 3 * first : 3 * (column_starts[num_columns - 1] + column_taps)]
    for i in range(num_columns):
        column_starts[i] -= np.uint32(first)
    whole = np.empty(column_weights.shape, np.uint64)
    _quantise(column_weights, column_taps, whole)
    if flip:
        column_starts, whole = column_starts[::-1].copy(), whole[::-1].copy()
        column_weights = column_weights[::-1].copy()
    row = np.empty(used.shape[1], np.float32)
    packed = np.empty(used.shape[1] // 3, np.uint64)
    for y in range(num_rows):
        _add_rows(used, row_starts[y], row_weights[y], row_taps, row)
        if 2 <= column_taps <= 5:
            _pack(row, packed)
            _add_few(packed, column_starts, whole, column_taps, out[y])
        else:
            _add_many(row, column_starts, column_weights, column_taps, out[y])
