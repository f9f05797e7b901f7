from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from train.__main__ import COMMANDS, Command, main, parse_options
from train.checkpoint import load_checkpoint
from train.config import FitConfig, InputConfig, flag
from train.options import EvalConfig, ExportConfig, PlotConfig, PredictConfig
from train.stop import Interrupted

SMALL = [
    *("--model", "resnet18", "--epochs", "2", "--warmup-epochs", "0", "--batch-size", "4"),
    *("--train-crop-size", "32", "--val-crop-size", "32", "--val-resize-size", "36"),
    *("--device", "cpu", "--lr", "1.0"),
]
TIMES = ("seconds", "img_per_s", "data_wait_pct")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of three colours to train on, 21 to evaluate."""
    root = tmp_path_factory.mktemp("raw")
    random = np.random.default_rng(0)
    for split, num_each in (("train", 8), ("val", 7)):
        for channel in range(3):
            folder = root / split / f"n0{channel}"
            folder.mkdir(parents=True)
            for i in range(num_each):
                pixels = random.integers(0, 90, (36, 36, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(folder / f"{channel}_{i}.JPEG")
    return root


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute like the subprocesses below, and without fighting for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "log.csv").open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def sample_value(kind: str) -> str:
    known = {"Path": "x", "str": "x", "int": "200", "float": "0.5", "ModelName": "resnet18"}
    known |= {"RecipeName": "rn50-16", "DeviceName": "cpu", "AmpDtypeName": "bfloat16"}
    known |= {"ScheduleName": "linear", "OnNan": "rollback", "ExportFormat": "onnx"}
    known |= {"tuple[Path, ...]": "x"}
    return known[kind.removesuffix(" | None")]


NEEDED = {
    FitConfig: ["--out", "x", "--src", "x"],
    EvalConfig: ["--checkpoint", "x", "--src", "x"],
    ExportConfig: ["--checkpoint", "x", "--out", "x"],
    PredictConfig: ["--checkpoint", "x", "picture.jpg"],
    PlotConfig: ["--run", "x"],
}
GO_TOGETHER = {
    "val_resize_size": ["--val-resize-size", "300"],
    "crop_size_start": ["--crop-size-start", "200", "--crop-ramp-end", "300"],
    "crop_ramp_start": ["--crop-ramp-start", "200", "--crop-ramp-end", "300"],
}


@pytest.mark.parametrize("options", NEEDED)
def test_every_field_is_one_flag_and_back(
    options: type[InputConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options("x", options, ["--help"])
    text = capsys.readouterr().out
    flags = set(re.findall(r"(?<![\w-])--(?!no-)[a-z][a-z-]*", text.split("options", 1)[1])) - {
        "--help"
    }
    described = {flag(field.name) for field in fields(options) if field.name != "images"}
    assert described <= flags
    base = NEEDED[options]
    for field in fields(options):
        kind = str(field.type)
        if field.name in ("shards", "images"):
            continue
        if kind.startswith("bool"):
            for given, value in ((flag(field.name), True), (flag(f"no_{field.name}"), False)):
                assert getattr(parse_options("x", options, [*base, given]), field.name) is value
        else:
            words = GO_TOGETHER.get(field.name, [flag(field.name), sample_value(kind)])
            parsed = getattr(parse_options("x", options, [*base, *words]), field.name)
            assert str(parsed[0] if isinstance(parsed, tuple) else parsed) == words[1]


def test_pictures_need_no_flag() -> None:
    options = parse_options("predict", PredictConfig, ["a.jpg", "b", "--checkpoint", "x"])
    assert options.images == (Path("a.jpg"), Path("b"))


def test_a_flag_wins_over_the_recipe() -> None:
    arguments = ["--out", "x", "--src", "y", "--epochs", "7", "--recipe", "classic-60"]
    options = parse_options("fit", FitConfig, arguments)
    assert (options.epochs, options.batch_size, options.recipe) == (7, 256, "classic-60")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        re.search(rf"^  {name} +{cmd.summary}$", text, re.M) for name, cmd in COMMANDS.items()
    )
    assert main([]) == 2


def test_wrong_use_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "train: unknown command 'fly'; one of fit, eval" in capsys.readouterr().err
    assert main(["fit", "--out", "x"]) == 2
    assert "give either --shards or --src, got neither" in capsys.readouterr().err
    assert main(["fit", "--out", "x", "--src", "y", "--batch-size", "0"]) == 2
    assert "--batch-size must be at least 1, got 0" in capsys.readouterr().err
    assert main(["fit", "--out", "x", "--src", "y", "--model", "vgg"]) == 2


def test_the_help_of_a_command_needs_no_torch() -> None:
    code = (
        "import sys; from train.__main__ import main; "
        "code = main(['fit', '--help']); sys.exit(code or int('torch' in sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.usefixtures("one_thread")
def test_fit_and_eval_run_end_to_end(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["fit", "--src", str(raw), "--out", out, *SMALL]) == 0
    printed = capsys.readouterr()
    assert "epoch 2/2  train loss" in printed.out
    assert printed.err == ""
    last = rows(tmp_path / "run")[-1]
    checkpoint = str(tmp_path / "run" / "last.pt")
    assert main(["eval", "--checkpoint", checkpoint, "--src", str(raw), "--batch-size", "5"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"top-1 {float(last['top1_pct']):.2f} %  top-5 100.00 %  loss ")
    assert line.endswith("  images 21")
    check_refusals(raw, tmp_path, capsys)


def check_refusals(raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the run above makes possible to try without another run."""
    out = str(tmp_path / "run")
    assert main(["fit", "--src", str(raw), "--out", out, *SMALL, "--seed", "1"]) == 1
    assert capsys.readouterr().err.startswith("train fit: cannot resume: --seed was 0, now 1;")
    other = tmp_path / "other"
    for split in ("train", "val"):
        for wnid in ("n00", "n01", "n09"):
            (other / split / wnid).mkdir(parents=True)
            (other / split / wnid / "a.JPEG").write_bytes(b"")
    checkpoint = str(tmp_path / "run" / "last.pt")
    assert main(["eval", "--checkpoint", checkpoint, "--src", str(other)]) == 1
    assert capsys.readouterr().err == (
        f"train eval: {checkpoint}: was trained with label 2 as 'n02', the val split has 'n09'; "
        "use the split it is for\n"
    )


def test_a_failure_is_one_line_and_ends_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--src", str(tmp_path / "none"), "--out", str(tmp_path / "run")]) == 1
    assert main(["eval", "--checkpoint", str(tmp_path / "x.pt"), "--src", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1] == f"train eval: {tmp_path / 'x.pt'}: no such checkpoint"


def stop_by_signal(_options: EvalConfig, _say: object) -> None:
    raise Interrupted("SIGTERM: saved")


def stop_by_second_signal(_options: EvalConfig, _say: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "message"),
    [("stop_by_signal", "SIGTERM: saved"), ("stop_by_second_signal", "interrupted")],
)
def test_a_signal_ends_with_one_and_one_line(
    function: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = Command(options="train.options:EvalConfig", run=f"{__name__}:{function}", summary="")
    monkeypatch.setitem(COMMANDS, "stop", command)
    assert main(["stop", "--checkpoint", "x", "--src", "y"]) == 1
    assert capsys.readouterr().err == f"train stop: {message}\n"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("one_thread")
def test_a_run_killed_at_several_moments_ends_in_the_same_weights(
    raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def arguments(out: str) -> list[str]:
        return [
            *("fit", "--src", str(raw), "--out", str(tmp_path / out), *SMALL),
            *("--checkpoint-every-steps", "1"),
        ]

    assert main(arguments("unbroken")) == 0
    kill_when_it_writes(arguments("killed"), tmp_path / "killed" / "last.pt", "last.pt.tmp")
    kill_when_it_writes(arguments("killed"), tmp_path / "killed" / "last.pt", "last.pt")
    kill_when_it_writes(arguments("killed"), tmp_path / "killed" / "last.pt", "last.pt.tmp")
    assert main(arguments("killed")) == 0
    assert "continues from" in capsys.readouterr().out
    whole, killed = (load_checkpoint(tmp_path / out / "last.pt") for out in ("unbroken", "killed"))
    assert all(torch.equal(whole.model[key], killed.model[key]) for key in whole.model)
    assert rows(tmp_path / "unbroken") == rows(tmp_path / "killed")


def kill_when_it_writes(arguments: list[str], last: Path, name: str) -> None:
    """Kill a run once its second checkpoint of this start is being written, or was."""
    watched = last.with_name(name)
    process = start(*arguments)
    seen: set[int] = set()
    while process.poll() is None and len(seen) < 2:
        if watched.is_file():
            try:
                seen.add(watched.stat().st_ino)
            except FileNotFoundError:  # renamed between the two looks
                continue
        time.sleep(0.001)
    process.kill()
    process.communicate()
