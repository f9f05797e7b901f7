"""The resize agrees with torch's antialiased bilinear one within one level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prep.resize import Span, needed, resize

side = st.integers(1, 90)


def torch_resize(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    resized = F.interpolate(image, (height, width), mode="bilinear", antialias=True)
    result: NDArray[np.uint8] = resized[0].permute(1, 2, 0).numpy()
    return result


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@given(
    height=side,
    width=side,
    out_height=side,
    out_width=side,
    seed=st.integers(0, 9),
    flip=st.booleans(),
)
@example(height=20, width=56, out_height=40, out_width=2, seed=2, flip=False)
@example(height=36, width=2335, out_height=71, out_width=1, seed=0, flip=True)
@settings(deadline=None, max_examples=150)
def test_a_whole_picture_comes_out_as_from_torch(
    height: int, width: int, out_height: int, out_width: int, seed: int, flip: bool
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = np.empty((out_height, out_width, 3), np.uint8)
    resize(pixels, Span(0, height, out_height, 0), Span(0, width, out_width, 0), out, flip=flip)
    wanted = torch_resize(pixels, out_height, out_width)
    assert difference(out, wanted[:, ::-1] if flip else wanted) <= 1


@pytest.mark.parametrize("size", [224, 64, 7])
def test_a_box_is_resized_as_if_cut_out_first(size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    out = np.empty((size, size, 3), np.uint8)
    resize(pixels, Span(20, 250, size, 0), Span(31, 117, size, 0), out)
    assert difference(out, torch_resize(pixels[20:270, 31:148], size, size)) <= 1


def test_a_part_of_the_output_needs_only_the_rows_and_columns_it_names() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (333, 251, 3), dtype=np.uint8)
    whole = torch_resize(pixels, 128, 96)
    rows, columns = Span(0, 333, 128, 16), Span(0, 251, 96, 7)
    top, bottom = needed(rows, 80, 333)
    left, right = needed(columns, 60, 251)
    part = np.ascontiguousarray(pixels[top:bottom, left:right])
    out = np.empty((80, 60, 3), np.uint8)
    resize(part, rows._replace(start=-top), columns._replace(start=-left), out)
    assert difference(out, whole[16:96, 7:67]) <= 1


def test_a_slot_with_gaps_is_filled() -> None:
    pixels = np.full((10, 10, 3), 77, np.uint8)
    frame = np.zeros((8, 9, 3), np.uint8)
    resize(pixels, Span(0, 10, 4, 0), Span(0, 10, 5, 0), frame[2:6, 3:8])
    assert (frame[2:6, 3:8] == 77).all()
    assert frame.sum() == 77 * 4 * 5 * 3


def test_a_box_between_pixels_keeps_a_ramp() -> None:
    ramp = np.arange(200, dtype=np.uint8)[None, :, None].repeat(20, 0).repeat(3, 2)
    ramp = np.ascontiguousarray(ramp)
    out = np.empty((4, 40, 3), np.uint8)
    resize(ramp, Span(0, 20, 4, 0), Span(10.5, 80, 40, 0), out)
    centres = 10.5 + 2 * (np.arange(40) + 0.5) - 0.5
    assert np.abs(out[2, 1:-1, 0] - centres[1:-1]).max() <= 1


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_a_picture_shrunk_strongly_stays_within_one_level(size: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (300, 900, 3), dtype=np.uint8)
    out = np.empty((size, size, 3), np.uint8)
    resize(pixels, Span(0, 300, size, 0), Span(0, 900, size, 0), out, flip=True)
    assert difference(out, torch_resize(pixels, size, size)[:, ::-1]) <= 1
