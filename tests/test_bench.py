"""The benchmark takes turns, reports what it measured, and says when the machine was busy."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from helpers import make_source, pack_folder
from train.bench import COLUMNS, Record, bench, table
from train.contenders import Contender, Pass
from train.options import BenchConfig


def record(kind: str, rates: list[float]) -> Record:
    contender = Contender(
        kind=kind,
        path=Path("x"),
        num_workers=2,
        batch_size=4,
        crop_size=16,
        num_images=100,
    )
    passes = [
        Pass(num_images=100, seconds=100 / rate, first_batch_s=0.5, cpu_s=2.0) for rate in rates
    ]
    return Record(contender, passes, peak_bytes=50_000_000)


def test_a_row_is_worked_out_by_hand() -> None:
    base = record("raw folder", [1.0, 100.0, 50.0, 200.0])
    row = record("shardlane", [7.0, 400.0, 250.0, 400.0]).row(base)
    assert row == {
        "contender": "shardlane, 2 threads",
        "img_per_s": 400.0,
        "lowest": 250.0,
        "highest": 400.0,
        "ratio": 4.0,
        "cpu_s_per_1000": 20.0,
        "peak_mb": 50,
        "first_batch_s": 0.5,
    }
    assert base.row(base)["ratio"] == 1.0


def test_the_table_is_markdown_with_equal_columns() -> None:
    base = record("raw folder", [1.0, 100.0])
    lines = table([base.row(base)])
    assert len({len(line) for line in lines}) == 1
    assert [line.count("|") for line in lines] == [len(COLUMNS) + 1] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_contenders_are_measured_and_written(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", num_train=6)
    shards = pack_folder(source, tmp_path / "shards")
    lines: list[str] = []
    config = BenchConfig(
        shards=shards,
        src=source,
        out=tmp_path / "out",
        num_threads=(1,),
        num_workers=1,
        batch_size=6,
        crop_size=24,
        passes=2,
    )
    rows = bench(config, lines.append)
    names = ["raw folder, 1 workers", "webdataset, 1 workers", "shardlane, 1 threads"]
    assert [row["contender"] for row in rows] == names
    assert all(row["img_per_s"] > 0 and row["peak_mb"] > 0 for row in rows)
    document = json.loads((tmp_path / "out" / "bench.json").read_text(encoding="utf-8"))
    assert [len(row["passes_img_per_s"]) for row in document["rows"]] == [2, 2, 2]
    with (tmp_path / "out" / "bench.csv").open(encoding="utf-8", newline="") as file:
        assert [row["contender"] for row in csv.DictReader(file)] == names
    assert "written:" in lines[-1]


def test_a_contender_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a train nor a val folder"):
        bench(BenchConfig(src=tmp_path, out=tmp_path / "out"), print)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="give --shards, --src or both, got neither"):
        BenchConfig()
    with pytest.raises(ValueError, match="--num-threads must be at least 1, got 0"):
        BenchConfig(src=Path("x"), num_threads=(0,))
