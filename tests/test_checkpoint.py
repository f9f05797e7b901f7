from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from train.checkpoint import (
    Checkpoint,
    best_of,
    load_checkpoint,
    save_checkpoint,
    trained_network,
)
from train.model import build_model


def checkpoint(epoch: int = 1) -> Checkpoint:
    return Checkpoint(
        epoch=epoch,
        step=2,
        model={"weight": torch.arange(6.0).reshape(2, 3)},
        optimizer={"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        scaler={},
        best_top1_pct=12.5,
        ranks=[{"loss_sum": 0.1, "rng_cpu": torch.get_rng_state()}],
        config={"seed": 0, "weights": None, "amp": True},
        wnids=["n01", "n02"],
        class_names=["tench", "n02"],
        data={"num_samples": 4, "sha256": "ab"},
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = checkpoint()
    save_checkpoint(tmp_path / "last.pt", saved)
    loaded = load_checkpoint(tmp_path / "last.pt")
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    assert torch.equal(loaded.ranks[0]["rng_cpu"], saved.ranks[0]["rng_cpu"])
    assert (loaded.epoch, loaded.step, loaded.best_top1_pct) == (1, 2, 12.5)
    assert (loaded.config, loaded.wnids, loaded.data) == (saved.config, saved.wnids, saved.data)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_the_file_loads_without_trusting_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint())
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    assert content["format"] == 2


def dies_after(num_bytes: int, error: Exception) -> Any:
    def save(_content: object, file: Any) -> None:
        file.write(b"x" * num_bytes)
        raise error

    return save


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("unexpected pos 64 vs 0"),
        KeyboardInterrupt(),
    ],
)
def test_a_save_that_dies_half_way_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint(epoch=1))
    monkeypatch.setattr(torch, "save", dies_after(100, error))
    with pytest.raises((OSError, KeyboardInterrupt)):
        save_checkpoint(tmp_path / "last.pt", checkpoint(epoch=2))
    assert load_checkpoint(tmp_path / "last.pt").epoch == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_the_half_written_sibling_of_a_killed_run_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "last.pt.tmp").write_bytes(b"half")
    save_checkpoint(tmp_path / "last.pt", checkpoint())
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("num_bytes", [0, 10, 500])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, num_bytes: int) -> None:
    save_checkpoint(tmp_path / "last.pt", checkpoint())
    content = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "last.pt").write_bytes(content[:num_bytes])
    with pytest.raises(ValueError, match=r"last\.pt: damaged, or not a checkpoint"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.pt: no such checkpoint"):
        load_checkpoint(tmp_path / "none.pt")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt: not a checkpoint of format 2"):
        load_checkpoint(tmp_path / "other.pt")
    torch.save({"format": 2, "weight": torch.ones(1)}, tmp_path / "part.pt")
    with pytest.raises(ValueError, match=r"part\.pt: lacks or adds \["):
        load_checkpoint(tmp_path / "part.pt")


def test_the_best_files_stay_and_the_earlier_one_among_equals() -> None:
    kept, dropped = best_of({"a": 1.0, "d": 3.0, "c": 2.0, "b": 2.0}, 2)
    assert kept == {"d": 3.0, "b": 2.0}
    assert dropped == ["c", "a"]
    assert best_of({"a": 1.0}, 3) == ({"a": 1.0}, [])


def test_the_network_of_a_checkpoint_has_the_averaged_weights_where_there_are_some() -> None:
    raw, averaged = (build_model("resnet18", 2).state_dict() for _ in range(2))
    saved = checkpoint()
    saved.config = {"model": "resnet18", "blurpool": False}
    saved.model = raw
    with pytest.raises(ValueError, match="--ema: the checkpoint holds no averaged weights"):
        trained_network(saved, ema=True)
    assert not trained_network(saved).training
    saved.ema = averaged
    for ema, wanted in ((None, averaged), (True, averaged), (False, raw)):
        found = trained_network(saved, ema=ema).state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
