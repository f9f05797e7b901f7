from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runs import EPOCH as ROW
from train import metrics
from train.metrics import CsvLog, EpochRow, Progress, StepRow, format_row, top_k_hits


def epoch_log(path: Path, num_epochs_done: int = 0) -> CsvLog:
    return CsvLog(path, EpochRow, lambda row: int(row["epoch"]) <= num_epochs_done)


def test_hits_of_four_samples_are_as_counted_by_hand() -> None:
    logits = torch.tensor(
        [
            [0.9, 0.1, 0.5],  # label 0 is first
            [0.9, 0.1, 0.5],  # label 2 is second
            [0.9, 0.1, 0.5],  # label 1 is third
            [0.0, 2.0, 1.0],  # label 1 is first
        ]
    )
    assert top_k_hits(logits, torch.tensor([0, 2, 1, 1]), (1, 2, 3)).tolist() == [2, 3, 4]


@pytest.mark.parametrize("num_classes", [5, 17])
def test_hits_agree_with_a_sort(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(64, num_classes, generator=generator)
    labels = torch.randint(num_classes, (64,), generator=generator)
    order = logits.argsort(dim=1, descending=True).tolist()
    by_sort = [
        sum(label in best[:k] for best, label in zip(order, labels.tolist(), strict=True))
        for k in (1, 5)
    ]
    hits = top_k_hits(logits, labels)
    assert hits.tolist() == by_sort
    assert hits.dtype is torch.int64


@pytest.mark.parametrize("ks", [(1, 5), (0, 1)])
def test_a_k_beyond_the_classes_is_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"every k must lie in 1\.\.4, got"):
        top_k_hits(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), ks)


def test_the_log_has_a_header_and_one_row_an_epoch(tmp_path: Path) -> None:
    log = epoch_log(tmp_path / "log.csv")
    log.append(ROW)
    log.append(replace(ROW, epoch=2, step=20, ema_top1_pct=51.5, gpu_temp_c=71.5))
    assert (tmp_path / "log.csv").read_bytes() == (
        b"epoch,step,lr,train_loss,val_loss,top1_pct,top5_pct,ema_val_loss,ema_top1_pct,"
        b"ema_top5_pct,crop_size,seconds,img_per_s,data_wait_pct,num_damaged,"
        b"gpu_temp_c,gpu_power_w,gpu_clock_mhz\n"
        b"1,10,0.1,1.5,1.25,50,87.5,,,,64,3,120,1,0,,,\n"
        b"2,20,0.1,1.5,1.25,50,87.5,,51.5,,64,3,120,1,0,71.5,,\n"
    )


def test_a_resumed_log_drops_the_epochs_that_are_run_again(tmp_path: Path) -> None:
    log = epoch_log(tmp_path / "log.csv")
    for epoch in (1, 2, 3):
        log.append(replace(ROW, epoch=epoch))
    before = (tmp_path / "log.csv").read_bytes().splitlines()
    epoch_log(tmp_path / "log.csv", 2)
    assert (tmp_path / "log.csv").read_bytes().splitlines() == before[:3]


def test_a_row_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    epoch_log(tmp_path / "log.csv").append(ROW)
    with (tmp_path / "log.csv").open("ab") as file:
        file.write(b"2,20,0.1,1.")
    epoch_log(tmp_path / "log.csv", 2)
    assert len((tmp_path / "log.csv").read_bytes().splitlines()) == 2


def test_a_log_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(b"epoch,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"log\.csv: has other columns; move it"):
        epoch_log(tmp_path / "log.csv")


def test_the_line_of_an_epoch_reads_well() -> None:
    assert format_row(ROW, 4) == (
        "epoch 1/4  train loss 1.5000  val loss 1.2500  top-1 50.00 %  top-5 87.50 %"
        "  3.0 s  120 img/s  data wait 1.0 %"
    )
    assert format_row(replace(ROW, num_damaged=2), 4).endswith("data wait 1.0 %  damaged 2")
    line = format_row(replace(ROW, ema_top1_pct=51.5, gpu_temp_c=71.5), 4)
    assert "top-5 87.50 %  EMA top-1 51.50 %  3.0 s" in line
    assert line.endswith("data wait 1.0 %  GPU 72 C")


def test_the_averaged_weights_decide_which_epoch_is_best_where_there_are_some() -> None:
    assert ROW.judged_top1_pct == 50.0
    assert replace(ROW, ema_top1_pct=0.0).judged_top1_pct == 0.0


def test_a_resumed_step_log_drops_the_steps_that_are_run_again(tmp_path: Path) -> None:
    row = StepRow(epoch=1, step=10, lr=0.1, loss=1.5, img_per_s=9.0, data_wait_pct=0.5)
    log = CsvLog(tmp_path / "steps.csv", StepRow, lambda _row: False)
    for step in (10, 20, 30):
        log.append(replace(row, step=step, grad_norm=2.0))
    CsvLog(tmp_path / "steps.csv", StepRow, lambda row: int(row["step"]) <= 20)
    assert (tmp_path / "steps.csv").read_bytes() == (
        b"epoch,step,lr,loss,grad_norm,img_per_s,data_wait_pct,"
        b"gpu_temp_c,gpu_power_w,gpu_clock_mhz\n"
        b"1,10,0.1,1.5,2,9,0.5,,,\n"
        b"1,20,0.1,1.5,2,9,0.5,,,\n"
    )


def test_progress_into_a_file_is_not_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("epoch 1/1", 5000)
    for step in range(5000):
        progress.note("loss 1")
        progress.update(step + 1)
    progress.close()
    assert capsys.readouterr().err == ""


def test_progress_into_a_file_is_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PLAIN_INTERVAL_S", 0.0)
    progress = Progress("epoch 1/2", 4)
    progress.note("loss 1.5")
    progress.update(3)
    progress.close()
    assert capsys.readouterr().err == "epoch 1/2: step 3/4  loss 1.5\n"
