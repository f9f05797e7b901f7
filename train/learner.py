"""Make what learns: the network in the device's memory, its optimizer, rate and extras."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.average import WeightAverage
from train.blocks import forget_activations
from train.config import FitConfig
from train.loop import Learner, Mix
from train.model import build_model, parameter_groups, refuse_softmax
from train.precision import Precision
from train.schedule import lr_at, scaled_lr
from train.world import World


def new_model(
    config: FitConfig,
    num_classes: int,
    precision: Precision,
    *,
    weights: str | None,
    wnids: Sequence[str] | None = None,
) -> nn.Module:
    """Build the network that `config` names, on the device; the seed decides its first weights.

    Raises:
        ValueError: Its weights do not fit, or an option does not suit it or the device.
    """
    torch.manual_seed(config.seed)
    model = build_model(
        config.model,
        num_classes,
        weights,
        wnids=wnids,
        zero_init=config.zero_init,
        blurpool=config.blurpool,
    )
    return place_model(config, model, precision)


def place_model(config: FitConfig, model: nn.Module, precision: Precision) -> nn.Module:
    """Check a model, rebuild it as the options say and bring it to the device.

    Raises:
        ValueError: It ends in softmax, or an option does not suit it or the device.
    """
    refuse_softmax(model, config.train_crop_size)
    if config.sync_bn:
        if precision.device.type != "cuda":
            raise ValueError("--sync-bn needs CUDA: torch shares BatchNorm between cards only")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.grad_checkpoint:
        forget_activations(model)
    return model.to(precision.device, memory_format=precision.memory_format)  # type: ignore[no-any-return, call-overload]


def new_learner(
    config: FitConfig,
    model: nn.Module,
    precision: Precision,
    world: World,
    *,
    num_steps: int,
    num_classes: int,
) -> Learner:
    """Give a placed model an optimizer, a rate for each step, an average and, if need be, ranks.

    Args:
        config: Options.
        model: On its device; compiled in place where the options say so.
        precision: Of the steps.
        world: Place among the ranks.
        num_steps: Steps of one epoch.
        num_classes: Of the labels.

    Raises:
        ValueError: Compiling is not possible here.
    """
    peak_lr = scaled_lr(config.lr, config.images_a_step(world.world_size))
    warmup_steps = int(config.warmup_epochs * num_steps)
    rate = partial(
        lr_at,
        total_steps=config.epochs * num_steps,
        warmup_steps=warmup_steps,
        peak_lr=peak_lr,
        final_lr=config.final_lr,
        schedule=config.schedule,
        drop_steps=config.lr_step_epochs * num_steps,
    )
    optimizer = torch.optim.SGD(
        parameter_groups(model, config.weight_decay),
        lr=peak_lr,
        momentum=config.momentum,
        fused=precision.device.type == "cuda",
    )
    ema = None if config.ema_decay is None else WeightAverage(model, config.ema_decay)
    return Learner(
        model=_wrapped(config, model, precision, world),
        optimizer=optimizer,
        scaler=precision.grad_scaler(),
        precision=precision,
        lr_at=rate,
        grad_accum=config.grad_accum,
        label_smoothing=config.label_smoothing,
        mix=_new_mix(config, num_classes),
        clip_norm=config.clip_norm,
        ema=ema,
        ema_start_step=warmup_steps,
    )


def _wrapped(config: FitConfig, model: nn.Module, precision: Precision, world: World) -> nn.Module:
    if config.compile:
        if sys.platform == "win32" and importlib.util.find_spec("triton") is None:
            raise ValueError("--compile needs triton: pip install triton-windows, or leave it out")
        model.compile()
    if world.world_size == 1:
        return model
    devices = [precision.device] if precision.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def _new_mix(config: FitConfig, num_classes: int) -> Mix | None:
    """Give torchvision's mixup, cutmix or a choice of both, batch by batch."""
    if not (config.mixup_alpha or config.cutmix_alpha):
        return None
    from torchvision.transforms import v2  # slow to import

    kinds: list[nn.Module] = []
    if config.mixup_alpha:
        kinds.append(v2.MixUp(alpha=float(config.mixup_alpha), num_classes=num_classes))
    if config.cutmix_alpha:
        kinds.append(v2.CutMix(alpha=float(config.cutmix_alpha), num_classes=num_classes))
    mix: Mix = v2.RandomChoice(kinds)
    return mix
