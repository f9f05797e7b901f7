"""Crop boxes as torchvision draws them; pixels as a full decode and torchvision's resize give."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import simplejpeg
import torch
import torchvision.transforms.functional as TF
from numpy.typing import NDArray
from torchvision.transforms import RandomResizedCrop

from helpers import encoded, jpeg, pixels
from prep.jpeg import recut
from train.decode import (
    NUM_UNIFORMS,
    Decoder,
    eval_view,
    is_flipped,
    train_box,
)
from train.order import uniforms

SIZES = [(375, 500), (500, 333), (64, 64), (31, 200), (200, 17), (1, 1), (480, 640)]


def as_array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def torch_image(data: bytes) -> torch.Tensor:
    return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)


def numbers(seed: int) -> list[float]:
    row: list[float] = uniforms(seed, 0, np.array([seed]), NUM_UNIFORMS)[0].tolist()
    return row


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_boxes_lie_inside_the_picture(height: int, width: int) -> None:
    for seed in range(300):
        box = train_box(height, width, numbers(seed))
        assert box.height > 0
        assert box.width > 0
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (31, 200)])
def test_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)],
        dtype=float,
    )
    ours = np.array([train_box(height, width, numbers(seed)) for seed in range(4000)], float)
    for column in range(4):
        spread = theirs[:, column].std() + 1
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) < 0.08 * spread
        assert abs(ours[:, column].std() - theirs[:, column].std()) < 0.08 * spread


def test_a_worked_example_of_a_box() -> None:
    row = [0.5] * NUM_UNIFORMS
    area, ratio = 100 * 200 * (0.08 + 0.5 * 0.92), 1.0
    side = round(math.sqrt(area * ratio))
    assert side == 104  # higher than the picture: the fallback, a centred box of ratio 4/3
    assert train_box(100, 200, row) == (0, 33, 100, 133)
    row[0] = 0.0
    assert train_box(100, 200, row) == (30, 80, 40, 40)


def test_half_of_the_samples_are_flipped() -> None:
    flips = sum(is_flipped(row) for row in uniforms(0, 0, np.arange(4000), NUM_UNIFORMS).tolist())
    assert 1880 < flips < 2120


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}])
def test_training_pixels_equal_torchvisions_within_one_level(
    restarts: bool, options: dict[str, int]
) -> None:
    decoder = Decoder()
    for seed, (height, width) in enumerate(SIZES):
        source = jpeg(seed, height, width, quality=90, **options)
        data = recut(source).data if restarts else source
        assert data is not None
        for number in range(4):
            row = numbers(100 * seed + number)
            out = np.empty((224, 224, 3), np.uint8)
            decoder.train(as_array(data), row, out)
            box = train_box(height, width, row)
            wanted = TF.resized_crop(torch_image(source), *box, [224, 224], antialias=True)
            wanted = wanted.flip(2) if is_flipped(row) else wanted
            got = torch.from_numpy(out).permute(2, 0, 1)
            assert (got.int() - wanted.int()).abs().max() <= 1


def test_a_crop_twice_the_target_is_decoded_smaller_and_stays_close() -> None:
    source = jpeg(3, 480, 640, quality=90)
    data = recut(source).data
    assert data is not None
    decoder = Decoder()
    for seed in range(6):
        row = numbers(seed)
        row[0] = 0.9
        out = np.empty((64, 64, 3), np.uint8)
        decoder.train(as_array(data), row, out)
        box = train_box(480, 640, row)
        wanted = TF.resized_crop(torch_image(source), *box, [64, 64], antialias=True)
        wanted = wanted.flip(2) if is_flipped(row) else wanted
        difference = (torch.from_numpy(out).permute(2, 0, 1).int() - wanted.int()).abs()
        assert difference.float().mean() < 1.0
        assert difference.max() <= 16


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (73, 64), (64, 64), (40, 64), (41, 64)])
def test_evaluation_pixels_equal_torchvisions_within_one_level(
    restarts: bool, resize: int, crop: int
) -> None:
    decoder = Decoder()
    for seed, (height, width) in enumerate(SIZES):
        source = jpeg(seed, height, width, quality=90)
        data = recut(source).data if restarts else source
        assert data is not None
        out = np.empty((crop, crop, 3), np.uint8)
        decoder.evaluate(as_array(data), resize, out)
        image = TF.resize(torch_image(source), [resize], antialias=True)
        wanted = TF.center_crop(image, [crop])
        got = torch.from_numpy(out).permute(2, 0, 1)
        assert (got.int() - wanted.int()).abs().max() <= 1


@pytest.mark.parametrize("height", [50, 333, 500])
@pytest.mark.parametrize("width", [51, 334, 640])
def test_evaluation_sizes_are_torchvisions(height: int, width: int) -> None:
    view = eval_view(height, width, 256, 224)
    image = TF.resize(torch.empty(3, height, width), [256], antialias=True)
    assert (view.height, view.width) == image.shape[1:]


def test_grey_and_progressive_files_come_out_as_colour() -> None:
    decoder = Decoder()
    grey = encoded(pixels(1)[:, :, 0])
    progressive = jpeg(2, progressive=True)
    for source in (grey, progressive):
        out = np.empty((48, 48, 3), np.uint8)
        decoder.evaluate(as_array(source), 48, out)
        wanted = TF.center_crop(torch_image(source), [48]).permute(1, 2, 0).numpy()
        assert np.abs(out.astype(int) - wanted).max() <= 1


def test_damaged_bytes_raise_value_error_or_give_pixels() -> None:
    rng = random.Random(0)
    source = recut(jpeg(5, 100, 140)).data
    assert source is not None
    decoder = Decoder()
    out = np.empty((64, 64, 3), np.uint8)
    num_refused = 0
    for seed in range(300):
        data = bytearray(source)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cut = data[: rng.randrange(len(data))] if seed % 3 == 0 else data
        try:
            decoder.train(as_array(bytes(cut)), numbers(seed), out)
        except ValueError:
            num_refused += 1
    assert num_refused > 50
