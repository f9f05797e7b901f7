from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prep.files import local_path
from runs import WNIDS, config, net, rows, run, same, source, weights
from train.checkpoint import load_checkpoint, save_checkpoint
from train.fit import fit_sources
from train.memory import TensorSource
from train.stop import Interrupted
from train.world import World


class SignalSource(TensorSource):
    """Sends this process a signal with its third batch."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(super().epoch(epoch, start_step)):
            if step == 2:
                signal.raise_signal(signal.SIGTERM)
            yield batch


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    assert run(out).finished
    return out


def test_a_run_writes_its_records(unbroken: Path) -> None:
    assert sorted(p.name for p in unbroken.iterdir()) == [
        "best.pt",
        "config.json",
        "last.pt",
        "log.csv",
        "steps.csv",
    ]
    assert [(row["epoch"], row["step"]) for row in rows(unbroken)] == [
        ("1", "5"),
        ("2", "10"),
        ("3", "15"),
    ]
    record = json.loads((unbroken / "config.json").read_text(encoding="utf-8"))
    assert record["config"]["peak_lr"] == 3.0 * 4 / 256
    assert record["config"]["steps_per_epoch"] == 5
    assert set(record["versions"]) == {"python", "torch", "torchvision", "numpy", "simplejpeg"}


def test_a_run_says_how_it_goes(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run(tmp_path, lines.append, epochs=2)
    assert result.num_steps == 10
    assert "22 training images in 3 classes, 22 to evaluate, 5 steps an epoch" in lines[0]
    assert [line.split("  ")[0] for line in lines[1:]] == ["epoch 1/2", "epoch 2/2"]


def test_the_same_seed_gives_the_same_run(unbroken: Path, tmp_path: Path) -> None:
    run(tmp_path)
    assert same(weights(unbroken), weights(tmp_path))
    assert rows(unbroken) == rows(tmp_path)


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("stop_after", [1, 4, 5, 6, 14])
def test_a_run_stopped_at_any_step_continues_to_the_same_bits(
    unbroken: Path, tmp_path: Path, stop_after: int, every: int | None
) -> None:
    first = run(tmp_path, stop_after_steps=stop_after, checkpoint_every_steps=every)
    assert (first.finished, first.num_steps) == (False, stop_after)
    torch.manual_seed(999)  # nothing may depend on the state of before
    second = run(tmp_path)
    assert (second.finished, second.num_steps) == (True, 15 - stop_after)
    assert same(weights(unbroken), weights(tmp_path))
    assert rows(unbroken) == rows(tmp_path)
    assert second.best_top1_pct == load_checkpoint(unbroken / "best.pt").best_top1_pct


def test_many_stops_end_in_the_same_bits(unbroken: Path, tmp_path: Path) -> None:
    while not run(tmp_path, stop_after_steps=2).finished:
        pass
    assert same(weights(unbroken), weights(tmp_path))
    assert rows(unbroken) == rows(tmp_path)


def test_a_checkpoint_of_mid_epoch_continues_after_a_kill(unbroken: Path, tmp_path: Path) -> None:
    run(tmp_path, stop_after_steps=7, checkpoint_every_steps=3)
    middle = load_checkpoint(tmp_path / "last.pt")
    assert (middle.epoch, middle.step) == (1, 2)
    (tmp_path / "last.pt.tmp").write_bytes(b"half written when the kill came")
    run(tmp_path)
    assert same(weights(unbroken), weights(tmp_path))
    assert not (tmp_path / "last.pt.tmp").exists()


def test_a_finished_run_says_so_and_does_nothing(unbroken: Path) -> None:
    lines: list[str] = []
    before = (unbroken / "last.pt").read_bytes()
    result = run(unbroken, lines.append)
    assert (result.finished, result.num_steps) == (True, 0)
    assert f"{unbroken}: finished already, 3 epochs, best top-1 " in lines[-1]
    assert (unbroken / "last.pt").read_bytes() == before
    assert len(rows(unbroken)) == 3


def test_a_run_folder_may_be_an_address_and_its_path_long(tmp_path: Path) -> None:
    out = tmp_path.joinpath(*["a folder of fifty characters, give or take one or two"] * 5, "跑 1")
    run(Path(out.as_uri()), stop_after_steps=2)
    assert run(out).num_steps == 13
    assert (local_path(out) / "best.pt").is_file()


def test_resume_none_starts_over_and_leaves_nothing_of_before(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, resume="none", stop_after_steps=1, seed=5)
    assert load_checkpoint(tmp_path / "last.pt").config["seed"] == 5
    assert not (tmp_path / "best.pt").exists()
    assert rows(tmp_path) == []


def test_a_run_continues_from_a_file_elsewhere(unbroken: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", stop_after_steps=7)
    run(tmp_path / "b", resume=str(tmp_path / "a" / "last.pt"))
    assert same(weights(unbroken), weights(tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "cannot resume: --seed was 0, now 1; give the old value, another --out"),
        ({"epochs": 4}, "cannot resume: --epochs was 3, now 4"),
        ({"batch_size": 5}, "cannot resume: --batch-size was 4, now 5"),
        ({"train_crop_size": 13}, "cannot resume: --train-crop-size was 12, now 13"),
        ({"weight_decay": 0.5}, "cannot resume: --weight-decay was 0.0001, now 0.5"),
    ],
)
def test_a_changed_setting_refuses_to_resume(
    unbroken: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(unbroken, **changes)


def test_another_world_or_other_data_refuse_to_resume(unbroken: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot resume: world size was 1, now 2"):
        fit_sources(
            config(unbroken),
            source("train"),
            source("val"),
            print,
            model=net(),
            world=World(rank=1, world_size=2),
        )
    fewer = source("train", num_samples=21)
    with pytest.raises(ValueError, match="cannot resume: the training data are others than before"):
        fit_sources(config(unbroken), fewer, source("val"), print, model=net())
    changed = load_checkpoint(unbroken / "last.pt")
    changed.data = {**changed.data, "sha256": "another"}
    save_checkpoint(tmp_path / "last.pt", changed)
    with pytest.raises(ValueError, match="cannot resume: the training data are others than before"):
        run(tmp_path)


def test_what_does_not_change_the_run_may_change_on_resume(unbroken: Path, tmp_path: Path) -> None:
    run(tmp_path, stop_after_steps=7)
    run(tmp_path, num_threads=3, num_workers=2, prefetch=4, checkpoint_every_steps=1)
    assert same(weights(unbroken), weights(tmp_path))


def test_a_signal_saves_and_leaves_and_the_run_continues(unbroken: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    whole = source("train")
    loud = SignalSource(whole._images, whole._labels, "train", wnids=WNIDS, batch_size=4)
    with pytest.raises(
        Interrupted,
        match=r"SIGTERM: saved .*last\.pt at epoch 1, step 3/5; the same command continues",
    ):
        fit_sources(config(tmp_path), loud, source("val"), print, model=net())
    assert signal.getsignal(signal.SIGTERM) is before
    run(tmp_path)
    assert same(weights(unbroken), weights(tmp_path))
    assert rows(unbroken) == rows(tmp_path)


def test_a_diverged_run_stops_and_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"training loss by step 5 of epoch 1 is nan.*lower --lr"):
        run(tmp_path, lr=1e30, warmup_epochs=0.0)
    assert not (tmp_path / "last.pt").exists()
    assert not (tmp_path / "best.pt").exists()
    assert rows(tmp_path) == []


def test_a_model_that_ends_in_softmax_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(net(), nn.Softmax(dim=1))
    with pytest.raises(ValueError, match="ends in softmax"):
        fit_sources(config(tmp_path), source("train"), source("val"), print, model=model)


def test_splits_with_different_classes_are_refused(tmp_path: Path) -> None:
    other = source("val", wnids=("n01", "n02", "n04"))
    with pytest.raises(ValueError, match="train and val have different classes"):
        fit_sources(config(tmp_path), source("train"), other, print, model=net())


def test_fewer_images_than_a_batch_are_refused(tmp_path: Path) -> None:
    few = source("train", num_samples=3)
    with pytest.raises(
        ValueError, match="--batch-size 4 on 1 ranks is more than the 3 training images; lower it"
    ):
        fit_sources(config(tmp_path), few, source("val"), print, model=net())


def test_bfloat16_on_the_cpu_runs_and_continues_exactly(tmp_path: Path) -> None:
    half: dict[str, Any] = {"amp": True, "channels_last": True, "epochs": 2}
    run(tmp_path / "whole", **half)
    run(tmp_path / "parts", stop_after_steps=3, **half)
    run(tmp_path / "parts", **half)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_float16_on_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--amp-dtype float16 needs a CUDA device"):
        run(tmp_path, amp=True, amp_dtype="float16")
