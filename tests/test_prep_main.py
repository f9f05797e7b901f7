from __future__ import annotations

import csv
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import tyro

from helpers import (
    WNIDS,
    encoded,
    environment,
    jpeg,
    make_heavy_source,
    make_shards,
    make_source,
    pack_folder,
    pixels,
    run_prep,
    snapshot,
    with_segments,
)
from prep.__main__ import RUNNERS, main
from prep.execute import default_workers
from prep.shards import read_samples

COMMANDS = {command.__name__.lower(): command for command in RUNNERS}
ON_WINDOWS = os.name == "nt"


def text(output: bytes) -> str:
    return output.decode("utf-8").replace("\r\n", "\n")


def test_the_whole_way_on_24_images(source: Path, tmp_path: Path) -> None:
    (source / "train" / WNIDS[0] / "cut.JPEG").write_bytes(jpeg(1)[:-60])
    dst = tmp_path / "shards"
    packed = run_prep("shard", "--src", source, "--dst", dst, "--workers", "2")
    assert packed.returncode == 0, packed.stderr
    lines = text(packed.stdout).splitlines()
    assert lines[0].startswith("train: 16 samples in 1 shards, 0.000 GB (16 kept, 0 repaired, 1 ")
    assert lines[1].startswith("val: 8 samples in 1 shards, ")
    assert lines[2].startswith(f"packed {source} into {dst} in ")
    assert lines[3] == f"report: {dst / 'report.csv'}"
    assert "listed 25 images of 4 classes (train: class folders, " in text(packed.stderr)
    assert b"1 rejected" in packed.stderr
    checked = run_prep("verify", "--shards", dst, "--workers", "1")
    assert (checked.returncode, b"2 shards, all whole" in checked.stdout) == (0, True)


def test_scan_tells_by_its_exit_code_and_writes_only_a_report(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(source)
    report = tmp_path / "r.csv"
    arguments = ["scan", "--src", str(source), "--report", str(report), "--workers", "1"]
    assert main(arguments) == 0
    assert "train: 16 kept, 0 repaired, 0 rejected\n" in capsys.readouterr().out
    assert snapshot(source) == before
    odd = source / "val" / WNIDS[0] / "odd.JPEG"
    odd.write_bytes(encoded(pixels(1), "PNG"))
    assert main(arguments) == 1
    with report.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["path"], row["split"], row["action"]) == (
        f"val/{WNIDS[0]}/odd.JPEG",
        "val",
        "repaired",
    )
    odd.write_bytes(jpeg(1) + b"surplus")
    assert main(arguments) == 0


def test_labels_round_trip_through_the_flat_layout(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "val_label.txt"
    assert main(["labels", "--src", str(source), "--out", str(out)]) == 0
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines == [
        f"{wnid}_val_{number}.JPEG {label}"
        for label, wnid in enumerate(WNIDS)
        for number in range(2)
    ]
    folders = pack_folder(source, tmp_path / "a")
    for wnid in WNIDS:
        for path in (source / "val" / wnid).iterdir():
            path.rename(source / "val" / path.name)
        (source / "val" / wnid).rmdir()
    arguments = ["--src", str(source), "--val-labels", str(out), "--workers", "1"]
    assert main(["shard", *arguments, "--dst", str(tmp_path / "b")]) == 0

    def labels_in(shards: Path) -> dict[str, int]:
        return {s.key: s.label for s in read_samples(shards / "val" / "000000.tar")}

    assert labels_in(tmp_path / "b") == labels_in(folders)


def test_info_tells_what_is_in_a_set(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--shards", str(shards)]) == 0
    out = capsys.readouterr().out
    assert f"{shards}: 4 classes (train: class folders, val: class folders)\n" in out
    assert "train: 16 samples in 1 shards" in out
    assert "shard_mb: 128.0\n" in out


def test_info_and_verify_take_a_set_of_unknown_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = make_shards(tmp_path / "s", (2, 1))
    assert main(["info", "--shards", str(shards)]) == 0
    assert main(["verify", "--shards", shards.as_uri(), "--workers", "1"]) == 0
    assert "train: 3 samples in 2 shards, 0.000 GB (3 kept)" in capsys.readouterr().out


def test_verify_names_each_damaged_shard(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shards / "val" / "000000.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    assert main(["verify", "--shards", str(shards), "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: ")
    assert "2 shards, 1 damaged, checked in" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shard", "--src", "nowhere", "--dst", "x"], "--src '.*nowhere' is not a folder"),
        (["shard", "--src", "s3://b/x", "--dst", "x"], "'s3:.*x' is not on this machine"),
        (["verify", "--shards", "nowhere"], r"nowhere has no index\.json, so it is not a whole"),
        (["info", "--shards", "nowhere"], r"nowhere has no index\.json"),
        (
            ["shard", "--src", ".", "--dst", "x", "--shard-mb", "0"],
            "--shard-mb must be in 1..16000",
        ),
        (["shard", "--src", ".", "--dst", "x", "--quality", "0"], r"--quality must be in 1\.\.100"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    arguments: Sequence[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert re.match(f"prep: .*{message}", err), err


def test_no_worker_at_all_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = str(tmp_path / "x")
    assert main(["shard", "--src", str(source), "--dst", dst, "--workers", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "prep: --workers must be at least 1, got 0"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["pack"],
        ["shard"],
        ["shard", "--src", "x"],
        ["shard", "--src", "x", "--dst", "y", "--seed", "one"],
        ["shard", "--src", "x", "--dst", "y", "--unknown", "1"],
        ["verify", "x"],
    ],
)
def test_wrong_use_is_exit_code_2(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_is_a_field_and_back(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    wanted = {"--" + field.name.replace("_", "-") for field in fields(COMMANDS[name])}
    assert wanted <= flags
    assert flags - wanted <= {"--help", "--no-restarts"}


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_are_owned_by_the_dataclass(name: str) -> None:
    command = COMMANDS[name]
    required = [
        field.name
        for field in fields(command)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    arguments = [word for each in required for word in (f"--{each.replace('_', '-')}", "x")]
    parsed: object = tyro.cli(command, args=arguments)
    assert parsed == command(**{each: Path("x") for each in required})
    if hasattr(parsed, "workers"):
        assert parsed.workers == default_workers()


def test_the_first_progress_comes_early_and_not_only_at_the_end(tmp_path: Path) -> None:
    make_source(tmp_path / "s", num_train=45, num_val=5)
    src, dst = str(tmp_path / "s"), str(tmp_path / "out")
    arguments = ["shard", "--src", src, "--dst", dst, "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "prep", *arguments],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process, process.stderr as stderr:
        first = stderr.readline()
        start = time.perf_counter()
        bar = b""
        while b"0%" not in bar and len(bar) < 200:
            bar += stderr.read(1)
        elapsed = time.perf_counter() - start
        rest = stderr.read()
    assert process.returncode == 0
    assert b"listed 200 images" in first
    assert b" 0%" in bar
    assert elapsed < 2
    assert b"200/200" in rest
    assert rest.count(b"\r") + rest.count(b"\n") < 20


def test_damaged_exif_leaves_nothing_on_the_console(tmp_path: Path) -> None:
    source = make_source(tmp_path / "s", num_train=1, num_val=0)
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff" + b"\x12\x01\x03\x00\xff\xff\xff\x7f" * 8
    for number, path in enumerate(sorted((source / "train").rglob("*.JPEG"))):
        path.write_bytes(with_segments(jpeg(number), (0xE1, exif)))
    ended = run_prep("shard", "--src", source, "--dst", tmp_path / "x", "--workers", "1")
    assert ended.returncode == 0
    assert b"4 kept, 0 repaired, 0 rejected" in ended.stdout
    assert not [word for word in (b"arn", b"EXIF", b"Exif", b"TIFF") if word in ended.stderr]


@pytest.fixture
def chinese(tmp_path: Path) -> Path:
    """Give a source whose folders, files and classes have Chinese names and blanks."""
    source = tmp_path / "数据 集"
    for split in ("train", "val"):
        for name in ("丁鱥 鱼", "犬"):
            folder = source / split / name
            folder.mkdir(parents=True)
            (folder / f"{name} {split} 图.JPEG").write_bytes(jpeg(1) + b"surplus")
    return source


@pytest.mark.parametrize(
    "encoding",
    [
        "cp1252",
        pytest.param(
            "",
            marks=pytest.mark.skipif(not ON_WINDOWS, reason="elsewhere a pipe is UTF-8 or ASCII"),
        ),
    ],
)
def test_a_cp1252_console_takes_any_path(encoding: str, chinese: Path, tmp_path: Path) -> None:
    env = environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    dst = tmp_path / "碎片 x"
    arguments = ("--src", chinese, "--dst", dst, "--workers", "1")
    ended = run_prep("shard", *arguments, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "\\u6570\\u636e \\u96c6" in ended.stdout.decode("cp1252")
    assert (ended.stderr + ended.stdout).count(b"\n") < 20
    again = run_prep("info", "--shards", dst, env=env)
    assert again.returncode == 0, again.stderr
    usage = run_prep("shard", "--help", env=env)
    assert usage.returncode == 0, usage.stderr
    assert b"--val-labels" in usage.stdout


@pytest.mark.skipif(ON_WINDOWS, reason="names are always Unicode on Windows")
def test_a_c_locale_gives_the_same_bytes(chinese: Path, tmp_path: Path) -> None:
    plain = environment()
    plain.pop("LANG", None)
    poor = {
        **{name: value for name, value in plain.items() if not name.startswith("LC_")},
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    rich = {**plain, "PYTHONUTF8": "1"}
    for name, env in (("富", rich), ("穷", poor)):
        dst = tmp_path / name
        ended = run_prep("shard", "--src", chinese, "--dst", dst, "--workers", "1", env=env)
        assert ended.returncode == 0, ended.stderr
    assert snapshot(tmp_path / "富") == snapshot(tmp_path / "穷")
    report = (tmp_path / "穷" / "report.csv").read_text(encoding="utf-8")
    assert "train/丁鱥 鱼/丁鱥 鱼 train 图.JPEG,train,kept,trailing bytes cut: 7" in report
    index = (tmp_path / "穷" / "index.json").read_text(encoding="utf-8")
    assert "丁鱥 鱼" in index


def test_a_disk_that_fails_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullDisk(io.FileIO):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    source = make_heavy_source(tmp_path / "s", 4, 0)
    monkeypatch.setattr(io, "FileIO", FullDisk)
    dst = tmp_path / "out"
    assert main(["shard", "--src", str(source), "--dst", str(dst), "--workers", "1"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (f"prep: {dst / 'train' / '000000.tar'}: cannot write: No space left on device")
