"""The demonstration's images: separable classes, and one file of each damaged kind."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from train.demo import NUM_CLASSES, NUM_TRAIN, NUM_VAL, demo, make_images, pack
from train.options import DemoConfig


@pytest.mark.slow
def test_the_demo_set_packs_with_its_damaged_files_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    make_images(tmp_path)
    pack(tmp_path, lines.append)
    with (tmp_path / "shards" / "report.csv").open(encoding="utf-8", newline="") as file:
        found = {Path(row["path"]).stem: row["action"] for row in csv.DictReader(file)}
    assert found == {
        "truncated": "rejected",
        "last_bytes_missing": "rejected",
        "end_marker_missing": "kept",
        "trailing_bytes": "kept",
        "cmyk": "repaired",
        "png_in_disguise": "repaired",
        "empty": "rejected",
        "web_page": "rejected",
    }
    text = "\n".join(lines)
    assert f"train: {NUM_CLASSES * NUM_TRAIN + 4} samples" in text
    assert f"val: {NUM_CLASSES * NUM_VAL} samples" in text


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        demo(DemoConfig(out=tmp_path), print)
