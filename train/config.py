"""What a run is told: the options of `fit` and `eval`, their checks and the named recipes.

One field is one flag. Nothing here imports torch, so `train fit --help` is quick.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from prep.execute import default_workers

ModelName = Literal[
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
RecipeName = Literal["classic-60"]
DeviceName = Literal["auto", "cpu", "cuda"]
AmpDtypeName = Literal["auto", "bfloat16", "float16"]


MAX_DEFAULT_THREADS: Final = 8


def default_threads() -> int:
    """Count decode threads: one a core that this process may use, at most 8."""
    return min(MAX_DEFAULT_THREADS, default_workers())


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Train a ResNet from packed shards, or from a raw image folder to compare with."""

    out: Path
    """Run folder: last.pt, best.pt, log.csv and config.json are written there."""
    shards: Path | None = None
    """Folder of packed shards, with its index.json. Either this or --src."""
    src: Path | None = None
    """Raw folder (train/<wnid>/*.JPEG, val/...), read as torchvision's ImageFolder does it."""
    recipe: RecipeName = "classic-60"
    """Named settings; any flag given beside it wins."""
    model: ModelName = "resnet50"
    """Network, as torchvision names it."""
    weights: str | None = None
    """Start from these weights: a torchvision name such as DEFAULT or IMAGENET1K_V2, or a file.
    The head is replaced when its number of classes differs. Lower --lr (0.01 to 0.05) with it."""
    epochs: int = 60
    """Passes over the train split."""
    batch_size: int = 256
    """Images per step on each rank."""
    train_crop_size: int = 224
    """Side of the random training crop, in pixels."""
    val_crop_size: int = 224
    """Side of the centre crop for evaluation, in pixels."""
    val_resize_size: int = 256
    """Shorter side before the centre crop, in pixels."""
    samples_per_class: int | None = None
    """Train on the first so many samples of each class only."""
    lr: float = 0.1
    """Peak learning rate for 256 images a step; scaled linearly by the global batch size."""
    final_lr: float = 1e-6
    """Learning rate of the last step (not scaled)."""
    warmup_epochs: float = 5.0
    """Epochs of linear warmup, step by step, before the cosine."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Decay of the weights with more than one dimension; norms and biases have none."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes, in training only."""
    seed: int = 0
    """Seed of the order, the crops and the first weights."""
    num_threads: int = field(default_factory=default_threads)
    """Decode threads per rank (shards only)."""
    num_workers: int = 0
    """Loader processes per rank; 0 decodes in this process."""
    prefetch: int = 2
    """Finished batches that wait per rank (per worker for --src)."""
    window_mb: int = 1024
    """Shards held in memory, inside which samples are permuted, in MB."""
    device: DeviceName = "auto"
    """Where to compute; auto takes CUDA when it is there."""
    amp: bool | None = None
    """Mixed precision. Without this flag: on with CUDA, off on the CPU."""
    amp_dtype: AmpDtypeName = "auto"
    """Half type of mixed precision; auto is bfloat16 where the card has it."""
    channels_last: bool | None = None
    """Keep images and weights in channels_last memory. Without this flag: with CUDA only, for it
    makes float32 on the CPU two to three times slower."""
    checkpoint_every_steps: int | None = None
    """Save last.pt every so many steps too, not only at each epoch's end."""
    resume: str = "auto"
    """auto continues from last.pt in --out if there is one; none starts over; or a FILE."""
    stop_after_steps: int | None = None
    """Save and end after so many steps of this start; the same command continues."""

    def __post_init__(self) -> None:
        _check_source(self.shards, self.src)
        _check_sizes(self.val_crop_size, self.val_resize_size)
        for name in ("epochs", "batch_size", "train_crop_size", "num_threads", "prefetch"):
            _at_least(name, getattr(self, name), 1)
        for name in ("samples_per_class", "checkpoint_every_steps", "stop_after_steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("window_mb", "num_workers", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("final_lr", "weight_decay"):
            _at_least(name, getattr(self, name), 0.0)
        for name in ("momentum", "label_smoothing"):
            _below(name, getattr(self, name), 1.0)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"--lr must be above 0, got {self.lr!r}")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"--warmup-epochs must be at least 0 and below --epochs {self.epochs}, "
                f"got {self.warmup_epochs!r}; for a short run give --warmup-epochs 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Top-1 and top-5 of a checkpoint on the val split."""

    checkpoint: Path
    """last.pt or best.pt of a run; model and classes come from it."""
    shards: Path | None = None
    """Folder of packed shards. Either this or --src."""
    src: Path | None = None
    """Raw folder with train and val."""
    batch_size: int = 256
    """Images per step on each rank; the figures do not depend on it."""
    val_crop_size: int | None = None
    """Side of the centre crop, in pixels; without it, as in the checkpoint's run."""
    val_resize_size: int | None = None
    """Shorter side before the crop, in pixels; without it, as in the checkpoint's run."""
    num_threads: int = field(default_factory=default_threads)
    """Decode threads per rank (shards only)."""
    num_workers: int = 0
    """Loader processes per rank; 0 decodes in this process."""
    prefetch: int = 2
    """Finished batches that wait per rank (per worker for --src)."""
    device: DeviceName = "auto"
    """Where to compute; auto takes CUDA when it is there."""
    amp: bool | None = None
    """Mixed precision. Without this flag: on with CUDA, off on the CPU."""
    amp_dtype: AmpDtypeName = "auto"
    """Half type of mixed precision; auto is bfloat16 where the card has it."""
    channels_last: bool | None = None
    """Keep images and weights in channels_last memory. Without this flag: with CUDA only, for it
    makes float32 on the CPU two to three times slower."""

    def __post_init__(self) -> None:
        _check_source(self.shards, self.src)
        _check_sizes(self.val_crop_size, self.val_resize_size)
        for name in ("batch_size", "num_threads", "prefetch"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_workers", self.num_workers, 0)


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
            _at_least(name, getattr(self, name), 1)
        for count in self.num_threads:
            _at_least("num_threads", count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Make a small set with damaged files, pack it, train, stop, resume and measure."""

    out: Path = Path("shardlane-demo")
    """New folder for the images, the shards, the run and the figures."""


RECIPES: Final[dict[RecipeName, dict[str, object]]] = {
    # ResNet as He et al. trained it (arXiv 1512.03385), with warmup and cosine instead of steps.
    # torchvision publishes 76.1 % top-1 for ResNet-50 with a like recipe of 90 epochs; we have not
    # run this one on ImageNet.
    "classic-60": {
        "epochs": 60,
        "batch_size": 256,
        "lr": 0.1,
        "final_lr": 1e-6,
        "warmup_epochs": 5.0,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.0,
    },
}


def to_dict(config: FitConfig | EvalConfig) -> dict[str, str | int | float | bool | None]:
    """Fields by name, paths as text: fit for JSON and for a `weights_only` checkpoint."""
    pairs = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return {name: str(value) if isinstance(value, Path) else value for name, value in pairs}


def recipe_flags(name: str) -> list[str]:
    """Spell a recipe as the flags that it stands for; none for an unknown name."""
    flags: list[str] = []
    for recipe, settings in RECIPES.items():
        for option, value in settings.items() if recipe == name else ():
            if isinstance(value, bool):
                flags.append(flag(option) if value else flag(f"no_{option}"))
            else:
                flags += [flag(option), str(value)]
    return flags


def flag(name: str) -> str:
    """`--kebab-case` spelling of a field's name."""
    return "--" + name.replace("_", "-")


def _check_source(shards: Path | None, src: Path | None) -> None:
    if (shards is None) == (src is None):
        given = "neither" if shards is None else "both"
        raise ValueError(f"give either --shards or --src, got {given}")


def _check_sizes(crop_size: int | None, resize_size: int | None) -> None:
    _at_least("val_crop_size", crop_size, 1)
    _at_least("val_resize_size", resize_size, 1)
    if crop_size is not None and resize_size is not None and crop_size > resize_size:
        raise ValueError(
            f"--val-crop-size must be at most --val-resize-size {resize_size}, got {crop_size}"
        )


def _at_least(name: str, value: float | None, low: float) -> None:
    if value is not None and not (math.isfinite(value) and value >= low):
        raise ValueError(f"{flag(name)} must be at least {low:g}, got {value!r}")


def _below(name: str, value: float, high: float) -> None:
    if not 0 <= value < high:
        raise ValueError(f"{flag(name)} must be at least 0 and below {high:g}, got {value!r}")
