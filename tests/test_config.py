from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import train.config
import train.options
from train.config import FitConfig, flag, to_dict
from train.options import EvalConfig, PlotConfig, PredictConfig


def fit_config(**changes: Any) -> FitConfig:
    return FitConfig(**({"out": Path("run"), "shards": Path("shards")} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, got 0"),
        ({"epochs": -1}, "--epochs must be at least 1, got -1"),
        ({"prefetch": 0}, "--prefetch must be at least 1, got 0"),
        ({"num_threads": 0}, "--num-threads must be at least 1, got 0"),
        ({"num_workers": -1}, "--num-workers must be at least 0, got -1"),
        ({"seed": -1}, "--seed must be at least 0, got -1"),
        ({"samples_per_class": 0}, "--samples-per-class must be at least 1, got 0"),
        ({"checkpoint_every_steps": 0}, "--checkpoint-every-steps must be at least 1, got 0"),
        ({"lr": 0.0}, "--lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "--lr must be above 0, got nan"),
        ({"final_lr": -0.1}, "--final-lr must be at least 0, got -0.1"),
        ({"momentum": 1.0}, "--momentum must be at least 0 and below 1, got 1.0"),
        ({"label_smoothing": 1.5}, "--label-smoothing must be at least 0 and below 1, got 1.5"),
        (
            {"epochs": 3},
            "--warmup-epochs must be at least 0 and below --epochs 3, got 5.0; "
            "for a short run give --warmup-epochs 0",
        ),
        (
            {"val_crop_size": 300},
            "--val-crop-size must be at most --val-resize-size 256, got 300",
        ),
        ({"grad_accum": 0}, "--grad-accum must be at least 1, got 0"),
        ({"keep": 0}, "--keep must be at least 1, got 0"),
        ({"clip_norm": 0.0}, "--clip-norm must be above 0, got 0.0"),
        ({"ema_decay": 1.0}, "--ema-decay must be at least 0 and below 1, got 1.0"),
        ({"mixup_alpha": -1.0}, "--mixup-alpha must be at least 0, got -1.0"),
        (
            {"crop_size_start": 256, "crop_ramp_end": 3},
            "--crop-size-start must be at most --train-crop-size 224, got 256",
        ),
        (
            {"crop_size_start": 128, "crop_ramp_start": 4, "crop_ramp_end": 4},
            "--crop-size-start needs a --crop-ramp-end above --crop-ramp-start 4, got 4",
        ),
        (
            {"batch_size": 1, "train_crop_size": 32},
            "--batch-size 1 needs crops above 32 pixels, got 32: BatchNorm in training needs more "
            "than one value a channel in the last stage",
        ),
        ({"shards": None}, "give either --shards or --src, got neither"),
        ({"src": Path("raw")}, "give either --shards or --src, got both"),
    ],
)
def test_a_value_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="--") as caught:
        fit_config(**changes)
    assert str(caught.value) == message


def test_eval_refuses_a_crop_larger_than_the_resize() -> None:
    with pytest.raises(ValueError, match="--val-crop-size must be at most --val-resize-size 32"):
        EvalConfig(checkpoint=Path("x"), src=Path("y"), val_crop_size=33, val_resize_size=32)


def test_a_config_becomes_plain_values() -> None:
    values = to_dict(fit_config())
    assert values["out"] == "run"
    assert values["src"] is None
    assert set(values) == {field.name for field in fields(FitConfig)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: PredictConfig(images=(), checkpoint=Path("x")), "give one IMAGE or more"),
        (
            lambda: PredictConfig(images=(Path("a"),), checkpoint=Path("x"), top=0),
            "--top must be at least 1, got 0",
        ),
        (lambda: PlotConfig(run=()), "give one --run or more"),
    ],
)
def test_an_option_of_another_command_out_of_range_is_refused(
    options: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        options()


@pytest.mark.parametrize("module", [train.config, train.options])
def test_every_option_is_described(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    assert {"FitConfig", "EvalConfig"} & {c.name for c in classes}
    for body in (c.body for c in classes):
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(text, ast.Expr), ast.unparse(field)


def test_a_flag_is_the_name_of_its_field() -> None:
    assert flag("val_crop_size") == "--val-crop-size"
