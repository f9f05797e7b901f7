"""What a run is told: the options of `fit`, what `eval` shares with it, and their checks.

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
RecipeName = Literal["classic-60", "rn50-16", "rn50-88", "rn18-16", "rn18-88", "tv-90", "finetune"]
ScheduleName = Literal["cosine", "linear", "step"]
OnNan = Literal["stop", "rollback"]
DeviceName = Literal["auto", "cpu", "cuda"]
AmpDtypeName = Literal["auto", "bfloat16", "float16"]


MAX_DEFAULT_THREADS: Final = 8


def default_threads() -> int:
    """Count decode threads: one a core that this process may use, at most 8."""
    return min(MAX_DEFAULT_THREADS, default_workers())


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    """Where images come from and how to compute: what `fit` and `eval` share."""

    shards: Path | None = None
    """Folder of packed shards, with its index.json. Either this or --src."""
    src: Path | None = None
    """Raw folder (train/<wnid>/*.JPEG, val/...), read as torchvision's ImageFolder does it."""
    batch_size: int = 256
    """Images of one forward pass on each rank."""
    val_samples_per_class: int | None = None
    """Evaluate the first so many samples of each class only."""
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
    """Keep images and weights in channels_last memory.
    Without this flag: with CUDA only (float32 on the CPU gets two to three times slower)."""

    def check_input(self) -> None:
        """Check the shared options.

        Raises:
            ValueError: One is out of its range, or there is not exactly one source.
        """
        if (self.shards is None) == (self.src is None):
            given = "neither" if self.shards is None else "both"
            raise ValueError(f"give either --shards or --src, got {given}")
        for name in ("batch_size", "num_threads", "prefetch"):
            at_least(name, getattr(self, name), 1)
        at_least("num_workers", self.num_workers, 0)
        at_least("val_samples_per_class", self.val_samples_per_class, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig(InputConfig):
    """Train a ResNet from packed shards, or from a raw image folder to compare with."""

    out: Path
    """Run folder: last.pt, best.pt, log.csv, steps.csv and config.json are written there."""
    recipe: RecipeName = "classic-60"
    """Named settings; any flag given beside it wins."""
    model: ModelName = "resnet50"
    """Network, as torchvision names it."""
    weights: str | None = None
    """Start from these weights: a torchvision name such as DEFAULT or IMAGENET1K_V2, or a file.
    The head is replaced when its classes differ. Lower --lr (0.01 to 0.05) with it."""
    zero_init: bool = False
    """Start the scale of the last BatchNorm of each block at zero."""
    blurpool: bool = False
    """Blur before each convolution with a stride, except on the three colour channels."""
    epochs: int = 60
    """Passes over the train split."""
    grad_accum: int = 1
    """Batches whose gradients are averaged in one step; --batch-size times this is the step's."""
    train_crop_size: int = 224
    """Side of the random training crop, in pixels; of the last epochs with --crop-size-start."""
    crop_size_start: int | None = None
    """Progressive resizing: side of the training crop in the first epochs, in pixels."""
    crop_ramp_start: int = 0
    """Last epoch, counted from 0, that trains at --crop-size-start."""
    crop_ramp_end: int = 0
    """First epoch, counted from 0, that trains at --train-crop-size; linear in between."""
    val_crop_size: int = 224
    """Side of the centre crop for evaluation, in pixels."""
    val_resize_size: int = 256
    """Shorter side before the centre crop, in pixels."""
    val_flip: bool = False
    """Average the scores of each evaluated image with those of its mirror image."""
    samples_per_class: int | None = None
    """Train on the first so many samples of each class only."""
    lr: float = 0.1
    """Peak learning rate for 256 images a step; scaled linearly by the images of a step."""
    final_lr: float = 1e-6
    """Learning rate of the last step of cosine and linear (not scaled)."""
    schedule: ScheduleName = "cosine"
    """After warmup: half a cosine or a line to --final-lr, or a tenth every --lr-step-epochs."""
    warmup_epochs: float = 5.0
    """Epochs of linear warmup, step by step."""
    lr_step_epochs: int = 30
    """Epochs between two drops of --schedule step."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 1e-4
    """Decay of the weights with more than one dimension; norms and biases have none."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes, in training only."""
    mixup_alpha: float = 0.0
    """Mix pairs of images by a share drawn from Beta(alpha, alpha); 0 does not."""
    cutmix_alpha: float = 0.0
    """Paste a box of one image into another, sized by Beta(alpha, alpha); 0 does not.
    With --mixup-alpha too, each batch gets one of the two."""
    ema_decay: float | None = None
    """Average the weights, forgetting 1 - decay at each step; evaluated beside the raw ones.
    0.9999 suits ImageNet, 0.99 a run of some hundred steps."""
    clip_norm: float | None = None
    """Scale the gradient of a step down to this norm, over all weights."""
    seed: int = 0
    """Seed of the order, the crops and the first weights."""
    window_mb: int = 1024
    """Shards held in memory, inside which samples are permuted, in MB."""
    compile: bool = False
    """Compile the network with torch.compile (the first steps of a start take a minute)."""
    sync_bn: bool = False
    """Share BatchNorm's statistics over the ranks (CUDA only)."""
    grad_checkpoint: bool = False
    """Forget activations inside each block: less memory for one more forward pass."""
    checkpoint_every_steps: int | None = None
    """Save last.pt every so many steps too, not only at each epoch's end."""
    keep: int = 1
    """Best epochs to keep: best.pt, and with more than 1 epoch-NNNN.pt of each."""
    resume: str = "auto"
    """auto continues from last.pt in --out if there is one; none starts over; or a FILE."""
    resume_anyway: bool = False
    """Continue although settings or data differ from the checkpoint's; the run is another one."""
    on_nan: OnNan = "stop"
    """When the loss is no longer finite: stop, or go back to last.pt and halve the rate."""
    max_rollbacks: int = 3
    """Times that --on-nan rollback may go back."""
    stop_after_steps: int | None = None
    """Save and end after so many steps of this start; the same command continues."""
    log_every_steps: int = 20
    """Steps between two rows of steps.csv, looks at the loss and agreements of ranks."""
    tensorboard: bool = False
    """Write the figures of steps.csv and log.csv for TensorBoard too (extra `tensorboard`)."""
    one_card_img_per_s: float | None = None
    """Throughput of one card alone; the run then prints how well its ranks scale."""
    dry_run: bool = False
    """Print the resolved settings, steps, peak rate and a memory estimate, and end."""
    find_batch_size: bool = False
    """Try --batch-size, then half of it and so on until a step fits, print the result, and end."""
    smoke: bool = False
    """Try the whole chain on ten images a class: two epochs, stopped and resumed, evaluated."""

    def images_a_step(self, world_size: int) -> int:
        """Count the images of one optimizer update, over all ranks."""
        return self.batch_size * self.grad_accum * world_size

    def __post_init__(self) -> None:
        self.check_input()
        check_sizes(self.val_crop_size, self.val_resize_size)
        self._check_ranges()
        self._check_crops()
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"--warmup-epochs must be at least 0 and below --epochs {self.epochs}, "
                f"got {self.warmup_epochs!r}; for a short run give --warmup-epochs 0"
            )

    def _check_ranges(self) -> None:
        for name in ("epochs", "train_crop_size", "grad_accum", "lr_step_epochs", "keep"):
            at_least(name, getattr(self, name), 1)
        for name in ("samples_per_class", "checkpoint_every_steps"):
            at_least(name, getattr(self, name), 1)
        for name in ("stop_after_steps", "log_every_steps", "max_rollbacks"):
            at_least(name, getattr(self, name), 1)
        for name in ("window_mb", "seed", "crop_ramp_start"):
            at_least(name, getattr(self, name), 0)
        for name in ("final_lr", "weight_decay", "mixup_alpha", "cutmix_alpha"):
            at_least(name, getattr(self, name), 0.0)
        for name in ("momentum", "label_smoothing"):
            _below(name, getattr(self, name), 1.0)
        if self.ema_decay is not None:
            _below("ema_decay", self.ema_decay, 1.0)
        for name in ("lr", "clip_norm", "one_card_img_per_s"):
            _above_zero(name, getattr(self, name))

    def _check_crops(self) -> None:
        start, end = self.crop_size_start, self.train_crop_size
        at_least("crop_size_start", start, 1)
        if start is not None and start > end:
            raise ValueError(
                f"--crop-size-start must be at most --train-crop-size {end}, got {start}"
            )
        if start is not None and self.crop_ramp_end <= self.crop_ramp_start:
            raise ValueError(
                f"--crop-size-start needs a --crop-ramp-end above --crop-ramp-start "
                f"{self.crop_ramp_start}, got {self.crop_ramp_end}"
            )
        if self.batch_size == 1 and min(start or end, end) <= SMALLEST_ALONE:
            raise ValueError(
                f"--batch-size 1 needs crops above {SMALLEST_ALONE} pixels, got {start or end}: "
                "BatchNorm in training needs more than one value a channel in the last stage"
            )


SMALLEST_ALONE: Final = 32
"""Side in pixels of which the last stage of a ResNet, with its stride of 32, leaves one value."""


def to_dict(config: InputConfig) -> dict[str, str | int | float | bool | None]:
    """Fields by name, paths as text: fit for JSON and for a `weights_only` checkpoint."""
    pairs = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return {name: str(value) if isinstance(value, Path) else value for name, value in pairs}


def flag(name: str) -> str:
    """`--kebab-case` spelling of a field's name."""
    return "--" + name.replace("_", "-")


def check_sizes(crop_size: int | None, resize_size: int | None) -> None:
    """Check the sizes of an evaluation, as far as they are given.

    Raises:
        ValueError: One is below 1, or the crop is larger than the resized picture.
    """
    at_least("val_crop_size", crop_size, 1)
    at_least("val_resize_size", resize_size, 1)
    if crop_size is not None and resize_size is not None and crop_size > resize_size:
        raise ValueError(
            f"--val-crop-size must be at most --val-resize-size {resize_size}, got {crop_size}"
        )


def at_least(name: str, value: float | None, low: float) -> None:
    """Refuse an option below `low`, by the name of its field; None passes.

    Raises:
        ValueError: It is too small, or not finite.
    """
    if value is not None and not (math.isfinite(value) and value >= low):
        raise ValueError(f"{flag(name)} must be at least {low:g}, got {value!r}")


def _below(name: str, value: float, high: float) -> None:
    if not 0 <= value < high:
        raise ValueError(f"{flag(name)} must be at least 0 and below {high:g}, got {value!r}")


def _above_zero(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError(f"{flag(name)} must be above 0, got {value!r}")
