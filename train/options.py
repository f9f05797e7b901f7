"""Options of the commands beside `fit`: one dataclass each, one flag a field.

Nothing here imports torch, so `--help` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from train.config import DeviceName, InputConfig, at_least, check_sizes, default_threads

ExportFormat = Literal["auto", "state-dict", "exported-program", "onnx"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(InputConfig):
    """Top-1 and top-5 of a checkpoint on the val split."""

    checkpoint: Path
    """last.pt or best.pt of a run; model and classes come from it."""
    ema: bool | None = None
    """Use the averaged weights. Without this flag: where the checkpoint holds them."""
    val_crop_size: int | None = None
    """Side of the centre crop, in pixels; without it, as in the checkpoint's run."""
    val_resize_size: int | None = None
    """Shorter side before the crop, in pixels; without it, as in the checkpoint's run."""
    val_flip: bool | None = None
    """Average the scores with those of the mirror image; without it, as in the checkpoint's run."""
    out: Path | None = None
    """Folder for confusion.csv and classes.csv (top-1, top-5 and usual mistake of each class)."""
    worst: int = 5
    """Classes with the lowest top-1 to print."""

    def __post_init__(self) -> None:
        self.check_input()
        check_sizes(self.val_crop_size, self.val_resize_size)
        at_least("worst", self.worst, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """Name what is on pictures, with a trained checkpoint."""

    images: Positional[tuple[Path, ...]]
    """Files, or folders of which all images are taken."""
    checkpoint: Path
    """last.pt or best.pt of a run; model, classes and sizes come from it."""
    top: int = 5
    """Classes to print for each picture."""
    ema: bool | None = None
    """Use the averaged weights. Without this flag: where the checkpoint holds them."""
    device: DeviceName = "auto"
    """Where to compute; auto takes CUDA when it is there."""

    def __post_init__(self) -> None:
        at_least("top", self.top, 1)
        if not self.images:
            raise ValueError("give one IMAGE or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Write a checkpoint's network for other programs, load it back and compare."""

    checkpoint: Path
    """last.pt or best.pt of a run."""
    out: Path
    """File to write: .pth or .pt (state dict), .pt2 (exported program) or .onnx."""
    format: ExportFormat = "auto"
    """auto goes by the suffix of --out."""
    ema: bool | None = None
    """Use the averaged weights. Without this flag: where the checkpoint holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotConfig:
    """Draw log.csv and steps.csv of one run, or of several to compare."""

    run: tuple[Path, ...]
    """Run folders."""
    out: Path | None = None
    """PNG to write; without it, plot.png in the first run's folder."""

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("give one --run or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Measure the loader in turn with the raw folder and webdataset; batches are thrown away.

    The raw folder is read by ImageFolder, Pillow and a DataLoader with pinned memory, persistent
    workers and prefetch 2.
    """

    out: Path = Path("bench")
    """Folder for bench.json, bench.csv and, with the extra `plot`, bench.png."""
    shards: Path | None = None
    """Packed set to read with webdataset and with our loader."""
    src: Path | None = None
    """Raw folder to compare with; the ratios are to its first row."""
    num_threads: tuple[int, ...] = field(default_factory=lambda: (default_threads(),))
    """Decode threads of ours, processes of the others; several may be given."""
    num_workers: int = 8
    """DataLoader processes for the raw folder's first row."""
    batch_size: int = 64
    """Images per batch."""
    crop_size: int = 224
    """Side of the random crop, in pixels."""
    peers: tuple[Literal["timm", "ffcv", "dali"], ...] = ()
    """Other loaders to measure too, where they are installed; ffcv and dali read --src."""
    num_images: int = 2000
    """Images of one pass, at most those that there are."""
    passes: int = 5
    """Turns that count; one more warms up."""

    def __post_init__(self) -> None:
        if self.shards is None and self.src is None:
            raise ValueError("give --shards, --src or both, got neither")
        for name in ("num_workers", "batch_size", "crop_size", "num_images", "passes"):
            at_least(name, getattr(self, name), 1)
        for count in self.num_threads:
            at_least("num_threads", count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Make a small set with damaged files, pack it, train, stop, resume and measure."""

    out: Path = Path("shardlane-demo")
    """New folder for the images, the shards, the run and the figures."""
