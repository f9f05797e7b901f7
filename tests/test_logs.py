from __future__ import annotations

import math
from pathlib import Path

import pytest

from runs import write_logs
from train.logs import PLACE, read_run, read_table


def test_steps_stand_at_their_part_of_an_epoch(tmp_path: Path) -> None:
    found = read_run(write_logs(tmp_path / "run"))
    assert found.steps[PLACE] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert found.epochs[PLACE] == [1.0, 2.0, 3.0]
    assert all(map(math.isnan, found.epochs["ema_top1_pct"]))


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_logs(tmp_path / "run")
    with (run / "log.csv").open("ab") as file:
        file.write(b"4,40,0.1,1.")
    assert read_run(run).epochs["epoch"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch,step\n1,ten\n", r"log\.csv: line 2: step is 'ten', which is no number; mend or"),
        ("epoch,step\n1\n", r"log\.csv: line 2 has 1 cells, the header 2"),
        ("epoch,step\n0,1\n", r"log\.csv: line 2: epoch must be at least 1, got 0"),
        ("loss,top\n1,2\n", r"log\.csv: has no column epoch or step; --run takes"),
    ],
)
def test_a_log_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "log.csv")
