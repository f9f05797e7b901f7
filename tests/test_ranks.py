"""Two processes that train together over gloo, on the CPU."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

from helpers import make_source
from runs import config, ranks, rows, source, wide_net
from train.checkpoint import load_checkpoint
from train.evaluation import evaluate_checkpoint
from train.fit import fit_sources
from train.options import EvalConfig

SMALL = [
    *("--model", "resnet18", "--epochs", "2", "--warmup-epochs", "0", "--batch-size", "2"),
    *("--train-crop-size", "40", "--val-crop-size", "32", "--val-resize-size", "36"),
    *("--device", "cpu", "--lr", "1.0", "--channels-last"),
]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 images to train on, 21 to evaluate: shares of 10 and 11."""
    root = make_source(tmp_path_factory.mktemp("raw"), num_train=4, num_val=5)
    folder = min((root / "val").iterdir())
    first = min(folder.iterdir())
    (folder / "one_more.JPEG").write_bytes(first.read_bytes())
    return root


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_alike_and_count_each_image_once(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ranks("-m", "train", "fit", "--src", str(raw), "--out", str(out), *SMALL) as started:
        ended = [rank.communicate(timeout=280) for rank in started]
        assert [rank.returncode for rank in started] == [0, 0], ended
    assert "epoch 2/2" in ended[0][0]
    assert ended[1][0] == ""
    assert "stride" not in ended[0][1] + ended[1][1]
    lines: list[str] = []
    alone = evaluate_checkpoint(
        EvalConfig(checkpoint=out / "last.pt", src=raw, device="cpu"), lines.append
    )
    last = rows(out)[-1]
    assert alone.num_samples == 21
    assert float(last["top1_pct"]) == pytest.approx(alone.top1_pct, rel=1e-5)
    assert float(last["val_loss"]) == pytest.approx(alone.loss, rel=1e-3)
    assert len(load_checkpoint(out / "last.pt").ranks) == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_end_in_the_weights_of_one_with_the_same_global_batch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from runs import run_as_rank; "
        "run_as_rank(Path(sys.argv[1]), batch_size=2, grad_accum=2, ema_decay=0.5)"
    )
    with ranks("-c", script, str(tmp_path / "two")) as started:
        ended = [rank.communicate(timeout=180) for rank in started]
        assert [rank.returncode for rank in started] == [0, 0], ended
    train, val = (source(split, batch_size=4) for split in ("train", "val"))
    alone = config(tmp_path / "one", batch_size=4, grad_accum=2, ema_decay=0.5)
    fit_sources(alone, train, val, print, model=wide_net())
    one, two = (load_checkpoint(tmp_path / name / "last.pt") for name in ("one", "two"))
    assert one.ema is not None
    assert two.ema is not None
    for name in one.model:
        torch.testing.assert_close(two.model[name], one.model[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(two.ema[name], one.ema[name], rtol=1e-9, atol=1e-12)
    for some, others in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert some["top1_pct"] == others["top1_pct"]
        assert float(some["train_loss"]) == pytest.approx(float(others["train_loss"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_rank_is_killed_the_other_ends_soon_with_a_clear_line(
    raw: Path, tmp_path: Path, victim: int
) -> None:
    out = tmp_path / "run"
    many = ["--src", str(raw), "--out", str(out), *SMALL, "--epochs", "10000"]
    with ranks("-m", "train", "fit", *many) as started:
        wait_for(out / "last.pt", started)
        started[victim].kill()
        other = started[1 - victim]
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 1
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"train fit: rank {1 - victim} of 2: another rank ended or no longer ")
    assert "Traceback" not in errors


def wait_for(path: Path, started: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 100
    while not path.is_file():
        assert time.monotonic() < deadline
        assert all(rank.poll() is None for rank in started)
        time.sleep(0.05)
