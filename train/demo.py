"""Two minutes from a folder with damaged files to a trained network, every step a real one."""

from __future__ import annotations

import colorsys
import io
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from prep.files import local_path, shown
from train.bench import bench
from train.config import FitConfig, default_threads
from train.fit import fit
from train.options import BenchConfig, DemoConfig

NUM_CLASSES: Final = 10
NUM_TRAIN: Final = 40
NUM_VAL: Final = 10
"""Of each class."""
WANTED_TOP1_PCT: Final = 80.0
EPOCHS: Final = 5
BATCH_SIZE: Final = 32

Say = Callable[[str], None]


def demo(config: DemoConfig, say: Say) -> None:
    """Make images, pack them, train with a stop on the way, and measure.

    Args:
        config: Options.
        say: Takes the lines of the result.

    Raises:
        ValueError: The folder is not empty, or the network did not learn what it should.
    """
    started = time.perf_counter()
    out = local_path(config.out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out '{shown(out)}' is not empty: give a new folder")
    say(f"1. making images of {NUM_CLASSES} classes, some of them damaged: {shown(out / 'source')}")
    make_images(out)
    say("2. packing them")
    pack(out, say)
    say(f"3. training ResNet-18 at 64 px for {EPOCHS} epochs, stopped and resumed on the way")
    top1_pct = train(out, say)
    say("4. measuring the loader against the raw folder, on these pictures; yours: `train bench`")
    threads = default_threads()
    rows = bench(
        BenchConfig(
            out=out / "bench",
            shards=out / "shards",
            src=out / "clean",
            num_threads=(threads,),
            num_workers=threads,
            num_images=NUM_CLASSES * NUM_TRAIN,
            batch_size=BATCH_SIZE,
            passes=3,
        ),
        say,
    )
    seconds = time.perf_counter() - started
    say(
        f"done in {seconds:.0f} s: top-1 {top1_pct:.1f} %, loader x{rows[-1]['ratio']} of the raw "
        f"folder; everything is in {shown(out)}, which you may delete"
    )
    if top1_pct < WANTED_TOP1_PCT:
        raise ValueError(
            f"top-1 {top1_pct:.1f} % is below {WANTED_TOP1_PCT} %: something is wrong with this "
            "installation; please report it with the output above"
        )


def make_images(out: Path) -> None:
    """Write `clean` (train only) and `source`: the same, a flat val, and damaged files."""
    rng = np.random.default_rng(0)
    clean, source = out / "clean" / "train", out / "source"
    for label in range(NUM_CLASSES):
        folder = clean / _wnid(label)
        folder.mkdir(parents=True)
        for number in range(NUM_TRAIN):
            (folder / f"{_wnid(label)}_{number}.JPEG").write_bytes(_jpeg(_picture(label, rng)))
    shutil.copytree(clean, source / "train")
    (source / "val").mkdir()
    lines = []
    for number in range(NUM_VAL * NUM_CLASSES):
        label = int(rng.integers(NUM_CLASSES))
        name = f"demo_val_{number:08d}.JPEG"
        (source / "val" / name).write_bytes(_jpeg(_picture(label, rng)))
        lines.append(f"{name} {label}\n")
    (source / "val_label.txt").write_text("".join(lines), encoding="utf-8")
    _damage(source / "train", rng)


def _damage(folder: Path, rng: np.random.Generator) -> None:
    """Add what real image folders hold: cut, empty, disguised and odd files."""
    whole = _jpeg(_picture(0, rng))
    cmyk, png = io.BytesIO(), io.BytesIO()
    _picture(1, rng).convert("CMYK").save(cmyk, "JPEG")
    _picture(2, rng).save(png, "PNG")
    files = {
        (0, "truncated"): whole[: len(whole) * 2 // 3],
        (0, "last_bytes_missing"): whole[:-60],
        (0, "end_marker_missing"): whole[:-2],
        (0, "trailing_bytes"): whole + b"garbage" * 20,
        (1, "cmyk"): cmyk.getvalue(),
        (2, "png_in_disguise"): png.getvalue(),
        (3, "empty"): b"",
        (3, "web_page"): b"<html>404 not found</html>",
    }
    for (label, name), data in files.items():
        (folder / _wnid(label) / f"{name}.JPEG").write_bytes(data)


def _wnid(label: int) -> str:
    return f"n{90_000_000 + label}"


def _picture(label: int, rng: np.random.Generator) -> Image.Image:
    """Draw an ellipse in the hue of its class on a grey, uneven ground, sized as on ImageNet."""
    width, height = (int(side) for side in rng.integers(300, 500, 2))
    ground = rng.integers(60, 200, (6, 8), dtype=np.uint8)
    image = Image.fromarray(ground).resize((width, height), Image.Resampling.BICUBIC)
    image = image.convert("RGB")
    hue = (label + float(rng.uniform(-0.2, 0.2))) / NUM_CLASSES
    colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1.0, 0.9, 0.9))
    w, h = rng.integers(width // 2, width), rng.integers(height // 2, height)
    x, y = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
    ImageDraw.Draw(image).ellipse([int(x), int(y), int(x + w), int(y + h)], fill=colour)
    return image


def _jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def pack(out: Path, say: Say) -> None:
    """Run `prep shard` as a user would and show its report."""
    arguments = ["shard", "--src", str(out / "source"), "--dst", str(out / "shards")]
    done = subprocess.run(
        [sys.executable, "-m", "prep", *arguments],
        check=False,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    for line in done.stdout.splitlines():
        say(f"   {line}")
    if done.returncode:
        raise ValueError("prep shard failed; its own message stands above")
    for line in (out / "shards" / "report.csv").read_text(encoding="utf-8").splitlines():
        say(f"   {line}")


def train(out: Path, say: Say) -> float:
    """Train, stop in the second epoch, resume to the end; gives the best top-1 in percent."""
    result = fit(_fit_config(out, stop_after_steps=18), say)
    result = fit(_fit_config(out, stop_after_steps=None), say)
    return result.best_top1_pct


def _fit_config(out: Path, stop_after_steps: int | None) -> FitConfig:
    return FitConfig(
        shards=out / "shards",
        out=out / "run",
        model="resnet18",
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        warmup_epochs=1,
        train_crop_size=64,
        val_crop_size=64,
        val_resize_size=73,
        stop_after_steps=stop_after_steps,
    )
