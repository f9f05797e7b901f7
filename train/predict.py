"""Name what is on pictures, with a trained checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from PIL import UnidentifiedImageError
from torch import Tensor, nn
from torchvision.datasets.folder import default_loader

from prep.files import local_path
from prep.sources import IMAGE_SUFFIXES, is_stray
from train.checkpoint import load_checkpoint, trained_network
from train.options import PredictConfig
from train.precision import Precision, normalise
from train.raw import val_transform
from train.run import Say
from train.score import at_least_float32, scores_of
from train.world import World, pick_device

BATCH_SIZE: Final = 32
"""Pictures decoded and scored at a time; more are never in memory."""

Picture = tuple[str, Path]
"""The name to print, as it was typed, and the path to open."""
Guess = tuple[float, int]
"""Percent and label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A trained network and what has to be done to a picture before it."""

    network: nn.Module
    """On the device of `precision`, in evaluation mode."""
    precision: Precision
    transform: Callable[[Any], Tensor]
    """Makes `(3, S, S)` uint8 of an RGB picture."""
    flip: bool
    """Average the scores of each picture with those of its mirror image."""
    class_names: Sequence[str]
    top: int
    """Classes to name, at most all."""


def predict(config: PredictConfig, say: Say) -> None:
    """Print the most likely classes of each picture, likeliest first.

    Pictures are read, cropped and normalised as the checkpoint's run evaluated a raw folder.

    Args:
        config: Options.
        say: Takes a line with each picture's name, and one for each of its classes.

    Raises:
        ValueError: The checkpoint cannot be used, there are no pictures, or some do not decode;
            these are named among the lines, after which the others went on.
    """
    pictures = list_pictures(config.images)
    device = pick_device(config.device, World())
    checkpoint = load_checkpoint(local_path(config.checkpoint))
    run = checkpoint.config
    predictor = Predictor(
        network=trained_network(checkpoint, ema=config.ema).to(device),
        precision=Precision(device=device, channels_last=False),
        transform=val_transform(run["val_crop_size"], run["val_resize_size"]),
        flip=run["val_flip"],
        class_names=checkpoint.class_names,
        top=config.top,
    )
    num_failed = 0
    for start in range(0, len(pictures), BATCH_SIZE):
        for name, found in _predict_batch(predictor, pictures[start : start + BATCH_SIZE]):
            num_failed += isinstance(found, str)
            for line in _lines(name, found, predictor.class_names):
                say(line)
    if num_failed:
        raise ValueError(f"{num_failed} of {len(pictures)} pictures do not decode; see the lines")


def list_pictures(given: Sequence[Path]) -> list[Picture]:
    """List files as they are given, and all image files below folders, sorted.

    Raises:
        ValueError: A path is not there, or a folder holds no image.
    """
    pictures: list[Picture] = []
    for typed in given:
        path = local_path(typed)
        if path.is_dir():
            pictures += _in_folder(typed, path)
        elif path.exists():
            pictures.append((str(typed), path))
        else:
            hint = "; patterns are not expanded, give the folder" if "*" in typed.name else ""
            raise ValueError(f"{typed}: no such file or folder{hint}")
    return pictures


def top_classes(scores: Tensor, num_best: int) -> list[list[Guess]]:
    """Give the likeliest classes of each row by softmax in float32; ties go to the lower label.

    Args:
        scores: `(N, C)` logits, any float dtype.
        num_best: Classes a row, at most all.
    """
    shares = at_least_float32(scores).softmax(dim=1)
    best, labels = shares.sort(dim=1, descending=True, stable=True)
    rows = zip((100 * best[:, :num_best]).tolist(), labels[:, :num_best].tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def _in_folder(typed: Path, folder: Path) -> list[Picture]:
    inside = (
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()
    )
    kept = [path for path in inside if not any(map(is_stray, path.parts))]
    if not kept:
        raise ValueError(f"{typed}: holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    kept.sort(key=lambda path: path.as_posix())
    return [(str(typed / path), folder / path) for path in kept]


def _predict_batch(
    predictor: Predictor, pictures: Sequence[Picture]
) -> Iterator[tuple[str, list[Guess] | str]]:
    """Give for each picture its name and guesses, or the reason why it does not decode."""
    read = [_read(path, predictor.transform) for _, path in pictures]
    pixels = [found for found in read if isinstance(found, Tensor)]
    scores = _score(predictor, torch.stack(pixels)) if pixels else torch.empty(0, 1)
    guesses = iter(top_classes(scores, predictor.top))
    for (name, _), found in zip(pictures, read, strict=True):
        yield name, found if isinstance(found, str) else next(guesses)


def _read(path: Path, transform: Callable[[Any], Tensor]) -> Tensor | str:
    """Give `(3, S, S)` uint8 pixels, or the reason why there are none."""
    try:
        return _decode(path, transform)
    except ValueError as error:
        return str(error)


def _decode(path: Path, transform: Callable[[Any], Tensor]) -> Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about metadata and very large pictures
            return transform(default_loader(str(path)))
    except UnidentifiedImageError as error:
        raise ValueError("not an image in a known format") from error
    except Exception as error:  # Pillow raises many classes for damaged files
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(" ".join(text.split()) or type(error).__name__) from error


def _score(predictor: Predictor, pixels: Tensor) -> Tensor:
    """Give `(N, C)` float32 scores of `(N, 3, S, S)` uint8 pixels."""
    images = normalise(pixels.to(predictor.precision.device), predictor.precision)
    with torch.no_grad():
        return scores_of(predictor.network, images, predictor.precision, flip=predictor.flip)


def _lines(name: str, found: list[Guess] | str, class_names: Sequence[str]) -> Iterator[str]:
    if isinstance(found, str):
        yield f"{name}: does not decode ({found})"
        return
    yield name
    for percent, label in found:
        yield f"  {percent:6.2f} %  {class_names[label]}"
