"""What a run does beyond training: averages, best epochs, rollbacks, changed settings."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import WNIDS, config, net, rows, run, same, source, weights
from train.checkpoint import load_checkpoint
from train.fit import fit_sources
from train.loop import DivergedError
from train.memory import TensorSource
from train.run import FitResult

EVERYTHING: dict[str, Any] = {
    "grad_accum": 2,
    "ema_decay": 0.9,
    "mixup_alpha": 0.4,
    "cutmix_alpha": 1.0,
    "label_smoothing": 0.1,
    "clip_norm": 1.0,
    "schedule": "linear",
    "val_flip": True,
    "log_every_steps": 1,
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("everything")
    assert run(out, **EVERYTHING).finished
    return out


def test_a_run_with_all_extras_makes_the_steps_and_rates_that_it_should(unbroken: Path) -> None:
    steps = rows(unbroken, "steps.csv")
    assert [(row["epoch"], row["step"]) for row in steps] == [
        (str(1 + step // 3), str(step + 1)) for step in range(9)
    ]
    peak = 3.0 * 8 / 256
    falling = [peak + (1e-6 - peak) * k / 6 for k in range(1, 7)]
    assert [float(row["lr"]) for row in steps] == pytest.approx(
        [peak / 3, peak * 2 / 3, peak, *falling], rel=1e-5
    )
    assert all(float(row["grad_norm"]) > 0 for row in steps)
    assert [row["ema_top1_pct"] != "" for row in rows(unbroken)] == [True] * 3


def test_the_losses_of_the_steps_add_up_to_that_of_the_epoch(unbroken: Path) -> None:
    images = [8, 8, 4]  # the last group of an epoch of 5 batches of 4 has one batch
    for epoch, row in enumerate(rows(unbroken)):
        steps = rows(unbroken, "steps.csv")[3 * epoch : 3 * epoch + 3]
        mean = sum(n * float(s["loss"]) for n, s in zip(images, steps, strict=True)) / 20
        assert mean == pytest.approx(float(row["train_loss"]), rel=1e-4)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 8])
def test_a_run_with_all_extras_stopped_anywhere_continues_to_the_same_bits(
    unbroken: Path, tmp_path: Path, stop_after: int
) -> None:
    run(tmp_path, stop_after_steps=stop_after, **EVERYTHING)
    torch.manual_seed(999)
    assert run(tmp_path, **EVERYTHING).num_steps == 9 - stop_after
    assert same(weights(unbroken), weights(tmp_path))
    whole, parts = (load_checkpoint(out / "last.pt") for out in (unbroken, tmp_path))
    assert whole.ema is not None
    assert parts.ema is not None
    assert same(whole.ema, parts.ema)
    assert rows(unbroken) == rows(tmp_path)
    assert rows(unbroken, "steps.csv") == rows(tmp_path, "steps.csv")


@pytest.mark.parametrize("stop_after", [2, 5, 7, 12])  # in warmup, at an epoch's end, in mid epoch
@pytest.mark.parametrize("schedule", ["cosine", "linear", "step"])
def test_the_rates_of_a_resumed_run_are_those_of_the_unbroken_one(
    tmp_path: Path, stop_after: int, schedule: str
) -> None:
    options: dict[str, Any] = {"log_every_steps": 1, "schedule": schedule, "lr_step_epochs": 1}
    run(tmp_path / "whole", epochs=4, **options)
    run(tmp_path / "parts", epochs=4, stop_after_steps=stop_after, **options)
    run(tmp_path / "parts", epochs=4, **options)
    whole, parts = (
        [row["lr"] for row in rows(tmp_path / name, "steps.csv")] for name in ("whole", "parts")
    )
    assert len(whole) == 20
    assert parts == whole


def test_the_best_epochs_are_kept_and_the_others_dropped(tmp_path: Path) -> None:
    run(tmp_path, epochs=5, keep=2, lr=1.0)
    scores = {int(row["epoch"]): float(row["top1_pct"]) for row in rows(tmp_path)}
    best = sorted(scores, key=lambda epoch: (-scores[epoch], epoch))[:2]
    assert {path.name for path in tmp_path.glob("epoch-*.pt")} == {
        f"epoch-{epoch:04d}.pt" for epoch in best
    }
    assert load_checkpoint(tmp_path / "best.pt").epoch == best[0]
    for epoch in best:
        assert load_checkpoint(tmp_path / f"epoch-{epoch:04d}.pt").epoch == epoch


def test_keeping_goes_on_over_a_resume(tmp_path: Path) -> None:
    run(tmp_path / "whole", epochs=5, keep=2, lr=1.0)
    while not run(tmp_path / "parts", epochs=5, keep=2, lr=1.0, stop_after_steps=5).finished:
        pass
    names = [{p.name for p in (tmp_path / n).glob("*.pt")} for n in ("whole", "parts")]
    assert names[0] == names[1]


def run_of(
    batch_size: int, out: Path, say: Callable[[str], None] = lambda _: None, **changes: Any
) -> FitResult:
    """A run with batches of another size than the others here."""
    options = config(out, batch_size=batch_size, **changes)
    train, val = (source(split, batch_size=batch_size) for split in ("train", "val"))
    return fit_sources(options, train, val, say, model=net())


class BrokenSource(TensorSource):
    """Makes the loss NaN at one step, as long as the run trains at more than a certain rate."""

    poison: Any = None

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for step, batch in enumerate(super().epoch(epoch, start_step), start_step):
            if (epoch, step) == (1, 2):
                self.poison()
            yield batch


def diverging(out: Path, say: Any = lambda _: None, times: int = 1, **changes: Any) -> Any:
    """A run whose weights become NaN in its second epoch, the first few times that it is there."""
    whole = source("train")
    batches = BrokenSource(whole._images, whole._labels, "train", wnids=WNIDS, batch_size=4)
    model, left = net(), [times]

    def poison() -> None:
        if left[0]:
            left[0] -= 1
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    batches.poison = poison
    return fit_sources(config(out, **changes), batches, source("val"), say, model=model)


def test_a_diverged_run_goes_back_with_half_the_rate(tmp_path: Path) -> None:
    lines: list[str] = []
    result = diverging(tmp_path, lines.append, on_nan="rollback", log_every_steps=1)
    assert result.finished
    assert lines[2] == (
        "training loss by step 3 of epoch 2 is nan: back to epoch 2, step 0, with 0.5 of the rate "
        "(rollback 1 of 3)"
    )
    steps = rows(tmp_path, "steps.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, 16))
    plain = tmp_path / "plain"
    run(plain, log_every_steps=1)
    rates = [float(row["lr"]) for row in rows(plain, "steps.csv")]
    assert [float(row["lr"]) for row in steps] == pytest.approx(
        rates[:5] + [rate / 2 for rate in rates[5:]], rel=1e-5
    )
    last = load_checkpoint(tmp_path / "last.pt")
    assert (last.lr_factor, last.num_rollbacks) == (0.5, 1)


def test_a_run_that_keeps_diverging_stops_at_last(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(DivergedError, match="training loss by step 3 of epoch 2 is nan"):
        diverging(tmp_path, lines.append, times=9, on_nan="rollback", log_every_steps=1)
    assert [line[-17:] for line in lines[2:]] == [f"(rollback {n} of 3)" for n in (1, 2, 3)]
    assert load_checkpoint(tmp_path / "last.pt").lr_factor == 0.125


def test_a_rollback_before_the_first_checkpoint_goes_back_to_the_start(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        run(tmp_path, lr=1e30, warmup_epochs=0.0, on_nan="rollback", max_rollbacks=1)
    last = load_checkpoint(tmp_path / "last.pt")
    assert (last.epoch, last.step, last.lr_factor) == (0, 0, 0.5)
    assert all(value.isfinite().all() for value in last.model.values())


def test_weights_that_broke_after_the_last_loss_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="the sum of all weights is"):
        run_of(20, tmp_path, lr=1e38, weight_decay=1e6, warmup_epochs=0.0, epochs=1)
    assert not (tmp_path / "last.pt").exists()


def test_changed_settings_continue_as_another_run_when_told_so(tmp_path: Path) -> None:
    lines: list[str] = []
    run(tmp_path, stop_after_steps=7)
    result = run_of(5, tmp_path, lines.append, epochs=4, resume_anyway=True)
    assert lines[0] == (
        "resumes as another run, at the start of an epoch: --batch-size was 4, now 5; --epochs "
        "was 3, now 4; global batch size was 4, now 5; steps per epoch was 5, now 4"
    )
    assert result.num_steps == 12  # epochs 2 to 4 of 4 steps each
    assert [row["epoch"] for row in rows(tmp_path)] == ["1", "2", "3", "4"]
    assert run_of(5, tmp_path, epochs=4).num_steps == 0


def test_resume_anyway_changes_nothing_where_nothing_differs(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "parts", stop_after_steps=7)
    run(tmp_path / "parts", resume_anyway=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_other_classes_are_refused_even_then(tmp_path: Path) -> None:
    run(tmp_path, stop_after_steps=7)
    wnids = ("n01", "n02", "n09")
    with pytest.raises(
        ValueError, match="the checkpoint is for 3 classes, the data have 3, or oth"
    ):
        fit_sources(
            config(tmp_path, resume_anyway=True),
            source("train", wnids=wnids),
            source("val", wnids=wnids),
            print,
            model=net(),
        )


def test_figures_for_tensorboard_are_written_and_say_when_they_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="--tensorboard needs its package: pip install"):
        run(tmp_path, tensorboard=True)


def test_the_figures_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, tensorboard=True, log_every_steps=1, stop_after_steps=7)
    run(tmp_path, tensorboard=True, log_every_steps=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Scalars("step/loss")
    assert [event.step for event in found] == list(range(1, 16))
    wanted = [float(row["loss"]) for row in rows(tmp_path, "steps.csv")]
    assert [event.value for event in found] == pytest.approx(wanted, rel=1e-5)
    assert len(events.Scalars("epoch/top1_pct")) == 3


class Forgetful(nn.Module):
    """A net with stages, as --grad-checkpoint wants them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, width in (("layer1", 3), ("layer2", 4), ("layer3", 4), ("layer4", 4)):
            block = nn.Sequential(nn.Conv2d(width, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            setattr(self, name, nn.Sequential(block))
        self.fc = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for name in ("layer1", "layer2", "layer3", "layer4"):
            x = getattr(self, name)(x)
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


def test_forgetting_activations_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    for name, forget in (("plain", False), ("forgetful", True)):
        options = config(tmp_path / name, grad_checkpoint=forget)
        fit_sources(options, source("train"), source("val"), print, model=Forgetful())
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "forgetful"))
    assert rows(tmp_path / "plain") == rows(tmp_path / "forgetful")


def test_the_steps_log_is_a_table_of_equal_rows(unbroken: Path) -> None:
    with (unbroken / "steps.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    assert {len(row) for row in table} == {10}
