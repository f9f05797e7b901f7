from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from runs import write_logs
from train.logs import PLACE, read_run
from train.options import PlotConfig
from train.plot import MAX_POINTS, legend_names, plot, thinned

pytest.importorskip("matplotlib")


def drawn(*runs: Path, out: Path | None = None) -> Path:
    lines: list[str] = []
    path = plot(PlotConfig(run=runs, out=out), lines.append)
    assert lines == [f"written: {path}"]
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (1400, 1000))
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 3
    return path


def test_a_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    assert drawn(write_logs(tmp_path / "run")) == tmp_path / "run" / "plot.png"


def test_runs_are_drawn_together_whatever_their_names(tmp_path: Path) -> None:
    names = ("rn50", "_hidden", "costs $5 and $6", "数据", "long" * 40)
    runs = [write_logs(tmp_path / name) for name in names]
    out = tmp_path / "new folder" / "all.png"
    assert drawn(*runs, out=out) == out


def test_a_card_and_an_average_get_their_curves(tmp_path: Path) -> None:
    plain = drawn(write_logs(tmp_path / "plain")).read_bytes()
    watched = drawn(
        write_logs(tmp_path / "card", gpu_temp_c=70.0, gpu_clock_mhz=1500.0)
    ).read_bytes()
    averaged = drawn(write_logs(tmp_path / "ema", ema_top1_pct=60.0)).read_bytes()
    assert len({plain, watched, averaged}) == 3


def test_a_run_in_its_first_epoch_is_drawn_from_its_steps(tmp_path: Path) -> None:
    run = write_logs(tmp_path / "run", num_epochs=0)
    with pytest.raises(ValueError, match=r"config\.json: gives no steps_per_epoch"):
        drawn(run)
    (run / "config.json").write_text(
        json.dumps({"config": {"steps_per_epoch": 20}}), encoding="utf-8"
    )
    drawn(run)
    assert read_run(run).steps[PLACE] == [0.25, 0.5]
    assert read_run(run).epochs == {}


def test_a_long_curve_is_thinned_by_averages() -> None:
    points = [(float(x), float(x % 2)) for x in range(4 * MAX_POINTS)]
    found = thinned(points)
    assert len(found) == MAX_POINTS
    assert found[0] == (1.5, 0.5)
    assert thinned(points[:5]) == points[:5]


def test_runs_of_one_name_are_told_apart_by_their_paths() -> None:
    names = legend_names([Path("a/run"), Path("b/run"), Path("c/other")])
    assert names == [str(Path("a/run")), str(Path("b/run")), "other"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none: no such folder; --run takes the --out of a train"):
        drawn(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds neither log\.csv nor steps\.csv"):
        drawn(tmp_path)
    (tmp_path / "log.csv").write_text("epoch,step\n", encoding="utf-8")
    with pytest.raises(ValueError, match="its logs have no row yet; wait"):
        drawn(tmp_path)
    with pytest.raises(ValueError, match=r"--out must end in \.png, got"):
        drawn(write_logs(tmp_path / "run"), out=tmp_path / "x.pdf")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r'train plot needs matplotlib: pip install "shardlane\['):
        drawn(write_logs(tmp_path / "run"))
