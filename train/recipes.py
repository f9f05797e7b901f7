"""Named settings of `fit`, each with its source and what is known of its result."""

from __future__ import annotations

from typing import Final

from train.config import RecipeName, flag

_FFCV: Final[dict[str, object]] = {
    "train_crop_size": 192,
    "crop_size_start": 160,
    "val_crop_size": 256,
    "val_resize_size": 293,  # 256 x 256/224
    "val_flip": True,
    "schedule": "linear",
    "warmup_epochs": 2.0,
    "final_lr": 0.0,
    "momentum": 0.9,
    "label_smoothing": 0.1,
    "blurpool": True,
}
_FFCV_50: Final[dict[str, object]] = {
    **_FFCV,
    "model": "resnet50",
    "batch_size": 512,
    "lr": 0.10625,  # 1.7 at 8 x 512 images
    "weight_decay": 1e-4,
}
_FFCV_18: Final[dict[str, object]] = {
    **_FFCV,
    "model": "resnet18",
    "batch_size": 1024,
    "lr": 0.125,  # 0.5 at 1,024 images
    "weight_decay": 5e-5,
}
_LONG: Final[dict[str, object]] = {"epochs": 88, "crop_ramp_start": 65, "crop_ramp_end": 76}
_SHORT: Final[dict[str, object]] = {"epochs": 16, "crop_ramp_start": 11, "crop_ramp_end": 13}

RECIPES: Final[dict[RecipeName, dict[str, object]]] = {
    # ResNet as He et al. trained it (arXiv 1512.03385), with warmup and cosine instead of steps.
    # torchvision publishes 76.1 % top-1 for ResNet-50 with a like recipe of 90 epochs; we have not
    # run this one on ImageNet.
    "classic-60": {
        "epochs": 60,
        "batch_size": 256,
        "lr": 0.1,
        "final_lr": 1e-6,
        "schedule": "cosine",
        "warmup_epochs": 5.0,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.0,
    },
    # The settings of libffcv/ffcv-imagenet (rn50_configs, rn18_configs). Published top-1, at 256 px
    # with mirror images averaged: rn50 73.8 % (16 epochs) and 78.4 % (88) on 8 cards of 512 images
    # each; rn18 66.9 % and 72.4 % on one card. Theirs train on pictures stored at 500 or 400 px;
    # we have not run these on ImageNet.
    "rn50-16": {**_FFCV_50, **_SHORT},
    "rn50-88": {**_FFCV_50, **_LONG},
    "rn18-16": {**_FFCV_18, **_SHORT},
    "rn18-88": {**_FFCV_18, **_LONG},
    # torchvision's references/classification as its first ResNet weights were trained: 256 images a
    # step, a tenth of the rate every 30 epochs. Published top-1: 76.13 % for ResNet-50, 69.76 % for
    # ResNet-18. Theirs also decays norms and biases; we have not run it on ImageNet.
    "tv-90": {
        "epochs": 90,
        "batch_size": 256,
        "lr": 0.1,
        "schedule": "step",
        "lr_step_epochs": 30,
        "warmup_epochs": 0.0,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.0,
    },
    # From ImageNet weights to classes of your own: a low rate with next to no warmup. No published
    # figure belongs to it.
    "finetune": {
        "weights": "DEFAULT",
        "epochs": 15,
        "batch_size": 64,
        "lr": 0.04,
        "final_lr": 0.0,
        "schedule": "cosine",
        "warmup_epochs": 1.0,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "label_smoothing": 0.1,
    },
}


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
