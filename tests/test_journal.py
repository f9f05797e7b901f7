from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import config, rows
from train.journal import Journal
from train.loop import EpochState
from train.metrics import EpochRow
from train.monitor import GpuReading
from train.score import Scores
from train.world import World

SCORES = Scores(loss=1.5, top1_pct=40.0, top5_pct=80.0, num_samples=10)


class Watch:
    """Stands for the GPU's monitor: gives readings that were laid down."""

    def __init__(self, *readings: GpuReading | None) -> None:
        self.readings = list(readings)
        self.closed = False

    def take(self) -> GpuReading | None:
        return self.readings.pop(0) if self.readings else None

    def close(self) -> None:
        self.closed = True


def journal(out: Path, lines: list[str], world: World | None = None, **changes: Any) -> Journal:
    made = Journal(
        config(out, **changes), out, 10, lines.append, world or World(), torch.device("cpu")
    )
    made.start(0, 0)
    return made


def state(step: int, num_images: int, seconds: float, data_wait_s: float = 0.0) -> EpochState:
    return EpochState(
        epoch=0,
        step=step,
        num_images=num_images,
        loss_sum=torch.zeros(()),
        seconds=seconds,
        data_wait_s=data_wait_s,
    )


def row(made: Journal, **changes: Any) -> EpochRow:
    whole = made.row(
        state(10, 40, 4.0, 1.0),
        [SCORES],
        train_loss=2.0,
        val_seconds=0.5,
        lr=0.1,
        totals=(80, 3),
    )
    return replace(whole, **changes)


def test_a_row_of_steps_holds_what_came_since_the_one_before(tmp_path: Path) -> None:
    made = journal(tmp_path, [])
    made.begin_epoch(state(0, 0, 0.0), 0.0)
    made.look(state(5, 20, 2.0, 0.5), 3.0, 0.1)
    made.look(state(10, 40, 6.0, 0.7), 2.0, 0.2)  # so the second half had a loss of 1
    made.close()
    found = rows(tmp_path, "steps.csv")
    assert [row["loss"] for row in found] == ["3", "1"]
    assert [row["step"] for row in found] == ["5", "10"]
    text = (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()
    assert text[1].split(",")[5:7] == ["10", "25"]
    assert text[2].split(",")[5:7] == ["5", "5"]


def test_the_row_of_an_epoch_is_over_all_ranks(tmp_path: Path) -> None:
    made = journal(tmp_path, [])
    found = row(made)
    assert (found.epoch, found.step, found.crop_size, found.seconds) == (1, 10, 12, 4.5)
    assert (found.img_per_s, found.data_wait_pct, found.num_damaged) == (20.0, 25.0, 3)
    assert (found.top1_pct, found.ema_top1_pct, found.gpu_temp_c) == (40.0, None, None)


def test_the_gpu_stands_in_both_logs(tmp_path: Path) -> None:
    made = journal(tmp_path, [])
    watch = Watch(
        GpuReading(temp_c=20.0, power_w=9.0, clock_mhz=90.0),  # of before the epoch
        GpuReading(temp_c=70.0, power_w=None, clock_mhz=1500.0),
        None,
        GpuReading(temp_c=80.0, power_w=None, clock_mhz=1700.0),
    )
    made._monitor = watch  # type: ignore[assignment]
    made.begin_epoch(state(0, 0, 0.0), 0.0)
    for step in (1, 2, 3):
        made.look(state(step, 4 * step, 1.0 * step), 1.0, 0.1)
    made.end_epoch(row(made))
    made.close()
    assert watch.closed
    assert [r["gpu_temp_c"] for r in rows(tmp_path, "steps.csv")] == ["70", "", "80"]
    (epoch,) = rows(tmp_path)
    assert (epoch["gpu_temp_c"], epoch["gpu_power_w"], epoch["gpu_clock_mhz"]) == ("75", "", "1600")


def test_a_slow_decline_is_said_once_and_only_among_equal_crops(tmp_path: Path) -> None:
    lines: list[str] = []
    made = journal(tmp_path, lines)
    for size, rate in ((8, 900.0), (12, 100.0), (12, 101.0), (12, 85.0), (12, 80.0), (12, 79.0)):
        made.end_epoch(row(made, crop_size=size, img_per_s=rate))
    warnings = [line for line in lines if not line.startswith("epoch")]
    assert len(warnings) == 1
    assert lines.index(warnings[0]) == 5


def test_the_scaling_over_one_card_is_printed_where_its_rate_is_known(tmp_path: Path) -> None:
    lines: list[str] = []
    made = journal(tmp_path, lines, World(world_size=4), one_card_img_per_s=100.0)
    made.end_epoch(row(made, img_per_s=250.0))
    assert lines[1] == "scaling: 4 ranks give 2.50 times one card (62 % efficiency)"


def test_other_ranks_write_and_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    made = journal(tmp_path, lines, World(rank=1, world_size=2))
    made.begin_epoch(state(0, 0, 0.0), 0.0)
    made.look(state(5, 20, 2.0), 3.0, 0.1)
    made.step(state(5, 20, 2.0))
    made.end_epoch(row(made))
    made.close()
    assert lines == []
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""
