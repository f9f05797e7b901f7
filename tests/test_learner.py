from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import config, net, rows, run, same, source, weights
from train.config import FitConfig
from train.fit import fit_sources
from train.learner import new_learner, new_model, place_model
from train.model import build_model
from train.precision import Precision
from train.world import World

CPU = Precision(device=torch.device("cpu"), channels_last=False)


def options(**changes: Any) -> FitConfig:
    settings: dict[str, Any] = {"out": Path("x"), "src": Path("y"), "model": "resnet18"}
    return FitConfig(**(settings | {"train_crop_size": 32} | changes))


def learner(**changes: Any) -> Any:
    return new_learner(options(**changes), net(), CPU, World(), num_steps=4, num_classes=3)


def test_the_last_norm_of_each_block_starts_at_zero_when_asked_for() -> None:
    for zero_init in (False, True):
        model = new_model(options(zero_init=zero_init), 3, CPU, weights=None)
        scales = [p for name, p in model.named_parameters() if name.endswith("bn2.weight")]
        assert len(scales) == 8
        assert all(bool((scale == 0).all()) is zero_init for scale in scales)


def test_the_seed_decides_the_first_weights() -> None:
    some, others, third = (
        new_model(options(seed=seed), 3, CPU, weights=None).state_dict() for seed in (1, 1, 2)
    )
    assert same(some, others)
    assert not same(some, third)


def test_norms_shared_between_ranks_need_cards() -> None:
    with pytest.raises(ValueError, match="--sync-bn needs CUDA"):
        place_model(options(sync_bn=True), net(), CPU)


def test_the_settings_reach_the_optimizer() -> None:
    made = learner(momentum=0.5, weight_decay=0.25, grad_accum=3, batch_size=64, clip_norm=2.0)
    decayed, plain = made.optimizer.param_groups
    assert (decayed["momentum"], decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.25, 0)
    assert (made.grad_accum, made.clip_norm, made.ema, made.mix) == (3, 2.0, None, None)
    assert made.lr(5 * 4 - 1) == pytest.approx(0.1 * 64 * 3 / 256)  # the last of 5 warmup epochs


@pytest.mark.parametrize(
    "alphas", [{"mixup_alpha": 0.5}, {"cutmix_alpha": 1.0}, {"mixup_alpha": 1.0, "cutmix_alpha": 1}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_labels_are_the_shares_of_the_mixed_images(
    alphas: dict[str, float], dtype: torch.dtype
) -> None:
    mix = learner(**alphas).mix
    torch.manual_seed(0)
    labels = torch.arange(6) % 3
    pixels = labels.view(6, 1, 1, 1).expand(6, 3, 16, 16).to(dtype).contiguous()
    for _ in range(8):
        mixed, shares = mix(pixels, labels)
        assert mixed.dtype is dtype
        assert shares.shape == (6, 3)
        torch.testing.assert_close(shares.sum(1), torch.ones(6))
        means = mixed.float().mean(dim=(1, 2, 3))
        wanted = shares @ torch.arange(3.0)
        torch.testing.assert_close(means, wanted, atol=0.02, rtol=0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own parts
def test_a_compiled_run_learns_and_its_checkpoint_has_the_plain_names(tmp_path: Path) -> None:
    fit_sources(
        config(tmp_path, compile=True, epochs=2),
        source("train"),
        source("val"),
        print,
        model=net(),
    )
    assert weights(tmp_path).keys() == net().state_dict().keys()
    assert float(rows(tmp_path)[-1]["train_loss"]) < 2
    run(tmp_path, epochs=2)  # finished already, and readable without compiling


def test_compiling_on_windows_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="--compile needs triton: pip install triton-windows"):
        learner(compile=True)


def test_weights_that_cannot_be_downloaded_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: object, **_options: object) -> None:
        raise OSError("name resolution failed")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(
        ValueError,
        match=r"--weights DEFAULT: could not be downloaded \(name resolution failed\); download",
    ):
        build_model("resnet18", 3, "DEFAULT")
