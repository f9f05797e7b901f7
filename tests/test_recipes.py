from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from train.__main__ import parse_options
from train.config import FitConfig, RecipeName
from train.recipes import RECIPES, recipe_flags
from train.run import train_crop_size
from train.schedule import scaled_lr


def resolved(recipe: str, *flags: str) -> FitConfig:
    options = parse_options(
        "fit", FitConfig, ["--out", "x", "--src", "y", "--recipe", recipe, *flags]
    )
    assert isinstance(options, FitConfig)
    return options


def test_every_name_has_its_settings() -> None:
    assert set(RECIPES) == set(get_args(RecipeName))


def test_the_defaults_are_the_default_recipe() -> None:
    config = FitConfig(out=Path("run"), shards=Path("shards"))
    assert all(getattr(config, name) == value for name, value in RECIPES[config.recipe].items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_flags_of_a_recipe_are_its_settings_and_nothing_else(recipe: RecipeName) -> None:
    found = resolved(recipe)
    plain = FitConfig(out=Path("x"), src=Path("y"), recipe=recipe)
    for field in fields(FitConfig):
        wanted = RECIPES[recipe].get(field.name, getattr(plain, field.name))
        assert getattr(found, field.name) == wanted, field.name


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_flag_wins_over_a_recipe(recipe: RecipeName) -> None:
    found = resolved(recipe, "--epochs", "95", "--model", "resnet101", "--no-blurpool")
    assert (found.epochs, found.model, found.blurpool) == (95, "resnet101", False)


def test_a_recipe_is_spelled_as_flags() -> None:
    assert recipe_flags("classic-60")[:4] == ["--epochs", "60", "--batch-size", "256"]
    assert "--val-flip" in recipe_flags("rn50-16")
    assert recipe_flags("no such recipe") == []


def test_the_published_rates_come_out() -> None:
    assert scaled_lr(resolved("rn50-88").lr, 8 * 512) == pytest.approx(1.7)
    assert scaled_lr(resolved("rn18-16").lr, 1024) == pytest.approx(0.5)
    assert scaled_lr(resolved("tv-90").lr, 256) == pytest.approx(0.1)
    assert 0.01 <= scaled_lr(resolved("finetune").lr, 64) <= 0.05


def test_the_published_crops_come_out() -> None:
    short, long = resolved("rn50-16"), resolved("rn18-88")
    assert [train_crop_size(short, epoch) for epoch in (0, 11, 12, 15)] == [160, 160, 192, 192]
    assert [train_crop_size(long, epoch) for epoch in (0, 65, 70, 71, 87)] == [
        *(160, 160, 160, 192, 192)
    ]
    assert (short.val_crop_size, short.val_resize_size) == (256, 293)
