from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

from runs import BLUE, GREEN, RED, colour_checkpoint, picture, swapped_state
from train.model import build_model
from train.options import PredictConfig
from train.predict import list_pictures, predict, top_classes


def run(checkpoint: Path, *images: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    config = PredictConfig(images=images, checkpoint=checkpoint, device="cpu", **options)
    predict(config, lines.append)
    return lines


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return colour_checkpoint(tmp_path / "last.pt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures whose colour is surely named, in several formats, and what is no picture."""
    folder = tmp_path / "pictures"
    (folder / "b").mkdir(parents=True)
    picture(GREEN).save(folder / "c.JPG", quality=95)
    picture(RED).save(folder / "a.png")
    picture(BLUE).save(folder / "b" / "z.webp", lossless=True)
    (folder / "notes.txt").write_text("no picture", encoding="utf-8")
    (folder / ".hidden.png").write_bytes(b"no picture")
    return folder


def test_each_picture_gets_its_classes_likeliest_first(checkpoint: Path, folder: Path) -> None:
    lines = run(checkpoint, folder / "c.JPG", folder, top=1)
    sure = ["  100.00 %  green", "  100.00 %  red, crimson", "  100.00 %  n02"]
    names = [str(folder / name) for name in ("c.JPG", "a.png", "b/z.webp", "c.JPG")]
    assert lines[0::2] == names
    assert lines[1::2] == [sure[0], sure[1], sure[2], sure[0]]


def test_percentages_are_the_softmax_of_the_scores(tmp_path: Path) -> None:
    """Brightness b scores 8 * ((b / 255 - mean) / std + 3), up to the epsilon of BatchNorm."""
    picture((130, 110, 90)).save(tmp_path / "grey.png")
    checkpoint = colour_checkpoint(tmp_path / "last.pt")
    means, stds = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    levels = zip((130, 110, 90), means, stds, strict=True)
    scores = np.array([8 * ((level / 255 - mean) / std) for level, mean, std in levels])
    shares = 100 * np.exp(scores) / np.exp(scores).sum()
    lines = run(checkpoint, tmp_path / "grey.png")
    found = {line.split(" %  ")[1]: float(line.split(" %  ")[0]) for line in lines[1:]}
    assert list(found) == ["red, crimson", "green", "n02"]  # --top 5 of three classes
    assert list(found.values()) == pytest.approx(shares, abs=0.011)
    assert sum(found.values()) == pytest.approx(100, abs=0.02)


def test_every_picture_of_several_batches_is_named(checkpoint: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    colours = {"red, crimson": RED, "green": GREEN, "n02": BLUE}
    wanted = []
    for number in range(70):
        name = list(colours)[number * 7 % 3]
        picture(colours[name]).save(many / f"{number:03d}.png")
        wanted += [str(many / f"{number:03d}.png"), f"  100.00 %  {name}"]
    assert run(checkpoint, many, top=1) == wanted


def test_a_file_that_does_not_decode_is_named_and_the_others_go_on(
    checkpoint: Path, folder: Path
) -> None:
    whole = (folder / "c.JPG").read_bytes()
    (folder / "b.jpg").write_bytes(whole[: len(whole) // 2])  # Pillow's words for it differ
    (folder / "d.png").write_bytes(b"<html>")
    (folder / "e.gif").write_bytes(b"")
    lines: list[str] = []
    config = PredictConfig(images=(folder,), checkpoint=checkpoint, device="cpu", top=1)
    with pytest.raises(ValueError, match=r"^3 of 6 pictures do not decode; see the lines$"):
        predict(config, lines.append)
    failed = [line for line in lines if "decode" in line]
    assert failed[0].startswith(f"{folder / 'b.jpg'}: does not decode (")
    assert failed[1:] == [
        f"{folder / 'd.png'}: does not decode (not an image in a known format)",
        f"{folder / 'e.gif'}: does not decode (not an image in a known format)",
    ]
    assert len(lines) == 3 * 2 + 3


def test_pictures_come_in_every_mode(checkpoint: Path, tmp_path: Path) -> None:
    """Grey, palette, alpha and CMYK become RGB, as for training from a raw folder."""
    modes = {"L": "png", "P": "png", "RGBA": "png", "CMYK": "jpg"}
    for mode, suffix in modes.items():
        picture(GREEN).convert(mode).save(tmp_path / f"{mode}.{suffix}")
        assert len(run(checkpoint, tmp_path / f"{mode}.{suffix}", top=2)) == 3


def test_averaged_weights_are_taken_unless_refused(tmp_path: Path, folder: Path) -> None:
    checkpoint = colour_checkpoint(tmp_path / "last.pt", ema=swapped_state())
    assert run(checkpoint, folder / "c.JPG", top=1)[1] == "  100.00 %  n02"
    assert run(checkpoint, folder / "c.JPG", top=1, ema=False)[1] == "  100.00 %  green"
    with pytest.raises(ValueError, match=r"^--ema: the checkpoint holds no averaged weights"):
        run(colour_checkpoint(tmp_path / "other.pt"), folder, ema=True)


@pytest.mark.parametrize("flip", [False, True])
def test_sizes_and_flip_are_those_of_the_run(tmp_path: Path, flip: bool) -> None:
    torch.manual_seed(0)
    network = build_model("resnet18", 3).eval()
    state = dict(network.state_dict())
    checkpoint = colour_checkpoint(
        tmp_path / "last.pt", state=state, val_flip=flip, val_crop_size=40, val_resize_size=50
    )
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (60, 80, 3), dtype=np.uint8))
    image.save(tmp_path / "noise.png")
    prepare = transforms.Compose(
        [
            transforms.Resize(50),
            transforms.CenterCrop(40),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    pixels: Tensor = prepare(image)[None]
    with torch.no_grad():
        scores = network(pixels)
        if flip:
            scores = (scores + network(pixels.flip(3))) / 2
    wanted = sorted((100 * scores.softmax(1)[0]).tolist(), reverse=True)
    lines = run(checkpoint, tmp_path / "noise.png")
    found = [float(line.split(" %")[0]) for line in lines[1:]]
    assert found == pytest.approx(wanted, abs=0.006)


def test_equal_scores_go_to_the_lower_label() -> None:
    rows = top_classes(torch.tensor([[1.0, 2, 2, 0], [0.0, 0, 0, 0]]), 3)
    assert [[label for _, label in row] for row in rows] == [[1, 2, 0], [0, 1, 2]]
    assert [percent for percent, _ in rows[1]] == [25, 25, 25]


def test_half_precision_scores_are_widened_first() -> None:
    rows = top_classes(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), 1)
    assert rows[0][0][0] == pytest.approx(73.10586, abs=1e-4)


def test_what_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jpg: no such file or folder$"):
        run(checkpoint, tmp_path / "none.jpg")
    with pytest.raises(ValueError, match=r"folder; patterns are not expanded, give the folder$"):
        run(checkpoint, tmp_path / "*.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds no image \(\.bmp, \.gif, \.jfif, \.jpe, "):
        run(checkpoint, tmp_path / "empty")
    with pytest.raises(ValueError, match=r"none\.pt: no such checkpoint$"):
        run(tmp_path / "none.pt", tmp_path / "last.pt")


def test_pictures_keep_the_names_that_were_typed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    names = [name for name, _ in list_pictures((Path("pictures"), Path("pictures/a.png")))]
    typed = [Path("pictures") / name for name in ("a.png", "b/z.webp", "c.JPG", "a.png")]
    assert names == [str(path) for path in typed]
