from __future__ import annotations

from pathlib import Path

import pytest

from helpers import make_source, pack_folder
from train import smoke
from train.checkpoint import load_checkpoint
from train.config import FitConfig
from train.fit import fit
from train.launch import launch
from train.run import FitResult, Say
from train.smoke import try_chain


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 and 11 images of each of 4 classes."""
    root = tmp_path_factory.mktemp("smoke")
    make_source(root / "raw", num_train=12, num_val=11)
    return pack_folder(root / "raw", root / "shards")


def options(shards: Path, out: Path) -> FitConfig:
    return FitConfig(
        shards=shards,
        out=out,
        model="resnet18",
        train_crop_size=40,
        val_crop_size=32,
        val_resize_size=36,
        device="cpu",
        num_threads=1,
        ema_decay=0.9,
        smoke=True,
    )


@pytest.mark.slow
def test_the_whole_chain_runs_on_ten_images_a_class(shards: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    launch(options(shards, tmp_path), lines.append)
    text = "\n".join(lines)
    assert "40 training images in 4 classes, 40 to evaluate, 2 steps an epoch of 20" in lines[0]
    assert "--stop-after-steps 3: saved" in text
    assert "continues from epoch 2, step 1" in text
    assert lines[-1].startswith("smoke test passed in ")
    assert [p.name for p in tmp_path.iterdir()] == ["smoke"]
    assert load_checkpoint(tmp_path / "smoke" / "last.pt").epoch == 2


@pytest.mark.slow
def test_a_checkpoint_that_scores_otherwise_fails_the_test(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flattering(config: FitConfig, say: Say) -> FitResult:
        result = fit(config, say)
        return FitResult(
            num_epochs_done=result.num_epochs_done,
            finished=result.finished,
            best_top1_pct=result.best_top1_pct + 5,
            num_steps=result.num_steps,
        )

    monkeypatch.setattr(smoke, "fit", flattering)
    with pytest.raises(ValueError, match=r"--smoke: best\.pt scores .* % top-1 when loaded again"):
        try_chain(options(shards, tmp_path), print)
