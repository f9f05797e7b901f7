from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import (
    BLUE,
    COLOUR_WNIDS,
    GREEN,
    RED,
    colour_checkpoint,
    colour_state,
    picture,
    ranks,
    swapped_state,
)
from train.evaluation import (
    ClassScore,
    Confusion,
    class_scores,
    evaluate_checkpoint,
    worst_classes,
)
from train.memory import TensorSource
from train.model import build_model
from train.options import EvalConfig
from train.precision import Precision
from train.score import evaluate
from train.world import World


def make_val(root: Path, pictures: dict[str, list[tuple[int, int, int]]]) -> Path:
    for wnid in COLOUR_WNIDS:
        (root / "val" / wnid).mkdir(parents=True)
        for number, colour in enumerate(pictures.get(wnid, [])):
            picture(colour).save(root / "val" / wnid / f"{wnid}_{number}.png")
    return root


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """Of class 0, two pictures look like class 1 and one like class 2; class 2 has none."""
    pictures = {"n00": [RED, GREEN, BLUE, GREEN], "n01": [GREEN, GREEN, RED]}
    return make_val(tmp_path / "src", pictures)


def run(checkpoint: Path, src: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    config = EvalConfig(checkpoint=checkpoint, src=src, device="cpu", batch_size=2, **options)
    evaluate_checkpoint(config, lines.append)
    return lines


def table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_figures_worst_classes_and_tables_are_as_worked_out(tmp_path: Path, src: Path) -> None:
    out = tmp_path / "new" / "tables"
    lines = run(colour_checkpoint(tmp_path / "last.pt"), src, out=out)
    assert lines[0].startswith("top-1 42.86 %  top-5 100.00 %  loss ")
    assert lines[0].endswith("  images 7")
    assert lines[1:] == [
        "lowest top-1  images  class               most often taken for",
        "     25.00 %       4  red, crimson (n00)  green (n01), 2 times",
        "     66.67 %       3  green (n01)         red, crimson (n00), once",
    ]
    assert table(out / "confusion.csv") == [
        ["wnid", "n00", "n01", "n02"],
        ["n00", "1", "2", "1"],
        ["n01", "1", "2", "0"],
        ["n02", "0", "0", "0"],
    ]
    assert table(out / "classes.csv") == [
        ["label", "wnid", "name", "num_images", "top1_pct", "top5_pct", "mistaken_for", "times"],
        ["0", "n00", "red, crimson", "4", "25", "100", "n01", "2"],
        ["1", "n01", "green", "3", "66.6667", "100", "n00", "1"],
        ["2", "n02", "n02", "0", "", "", "", "0"],
    ]
    assert sorted(path.name for path in out.iterdir()) == ["classes.csv", "confusion.csv"]


def test_worst_limits_the_table_and_zero_leaves_it_out(tmp_path: Path, src: Path) -> None:
    checkpoint = colour_checkpoint(tmp_path / "last.pt")
    assert len(run(checkpoint, src, worst=1)) == 3
    assert len(run(checkpoint, src, worst=0)) == 1


@pytest.mark.parametrize(("ema", "top1", "ending"), [(None, 14.29, True), (False, 42.86, False)])
def test_averaged_weights_are_taken_where_there_are_some(
    tmp_path: Path, src: Path, ema: bool | None, top1: float, ending: bool
) -> None:
    checkpoint = colour_checkpoint(tmp_path / "last.pt", ema=swapped_state())
    line = run(checkpoint, src, ema=ema)[0]
    assert line.startswith(f"top-1 {top1:.2f} %")
    assert line.endswith("  images 7  averaged weights" if ending else "  images 7")


def test_flip_comes_from_the_run_unless_given(tmp_path: Path, src: Path) -> None:
    flipped = colour_checkpoint(tmp_path / "last.pt", val_flip=True)
    plain = colour_checkpoint(tmp_path / "other.pt")
    assert run(flipped, src)[0].endswith("  images 7  flip-averaged")
    assert run(flipped, src, val_flip=False)[0].endswith("  images 7")
    assert run(plain, src, val_flip=True)[0].endswith("  images 7  flip-averaged")
    assert run(plain, src)[0] == run(flipped, src, val_flip=False)[0]


def test_what_does_not_fit_is_refused(tmp_path: Path, src: Path) -> None:
    checkpoint = colour_checkpoint(tmp_path / "last.pt")
    with pytest.raises(ValueError, match=r"^--ema: the checkpoint holds no averaged weights"):
        run(checkpoint, src, ema=True)
    with pytest.raises(ValueError, match=r"^--val-crop-size must be at most .* 36, got 40$"):
        run(checkpoint, src, val_crop_size=40)
    with pytest.raises(ValueError, match=r"^--out .*last\.pt: is a file; give a folder$"):
        run(checkpoint, src, out=checkpoint)
    (src / "val" / "n03").mkdir()
    with pytest.raises(ValueError, match=r"last\.pt: was trained with 3 classes, the val split ha"):
        run(checkpoint, src)
    (src / "val" / "n02").rmdir()
    with pytest.raises(ValueError, match=r"label 2 as 'n02', the val split has 'n03'; use the spl"):
        run(checkpoint, src)


def test_a_refused_split_leaves_no_folder(tmp_path: Path) -> None:
    empty = make_val(tmp_path / "src", {})
    with pytest.raises(ValueError, match=r"src holds no image under val"):
        run(colour_checkpoint(tmp_path / "last.pt"), empty, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_confusion_counts_best_guesses_and_five_best() -> None:
    logits = torch.tensor(
        [
            [9.0, 8, 7, 6, 5, 4, 3],  # label 0: right
            [9.0, 8, 7, 6, 5, 4, 3],  # label 4: fifth
            [9.0, 8, 7, 6, 5, 4, 3],  # label 5: sixth
            [3.0, 4, 5, 6, 7, 8, 9],  # label 5: second
        ]
    )
    confusion = Confusion(7, torch.device("cpu"))
    confusion.look(logits[:3], torch.tensor([0, 4, 5]))
    confusion.look(logits[3:], torch.tensor([5]))
    assert confusion.counts.nonzero().tolist() == [[0, 0], [4, 0], [5, 0], [5, 6]]
    assert confusion.counts.sum() == 4
    assert confusion.top5_hits.tolist() == [1, 0, 0, 0, 1, 1, 0]


def test_equals_go_to_the_lower_label() -> None:
    confusion = torch.tensor([[2, 0, 2, 2], [3, 1, 3, 0], [0, 0, 0, 0], [0, 0, 0, 5]])
    scores = class_scores(confusion, torch.tensor([6, 7, 0, 5]))
    assert [(s.mistaken_for, s.times) for s in scores] == [(2, 2), (0, 3), (None, 0), (None, 0)]
    assert [s.num_images for s in scores] == [6, 7, 0, 5]
    assert confusion.diagonal().tolist() == [2, 1, 0, 5]  # left as it was
    equal = [
        ClassScore(
            label=n,
            num_images=3 * (n + 1),
            num_top1=n + 1,
            num_top5=n + 1,
            mistaken_for=None,
            times=0,
        )
        for n in (2, 0, 1)
    ]
    assert [score.label for score in worst_classes(equal, 2)] == [0, 1]


def test_classes_without_images_are_not_among_the_worst() -> None:
    scores = class_scores(torch.tensor([[0, 0], [0, 3]]), torch.tensor([0, 3]))
    assert [score.label for score in worst_classes(scores, 5)] == [1]
    assert (scores[0].top1_pct, scores[0].top5_pct) == (None, None)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_counts_of_all_ranks_add_up_to_those_of_one(world_size: int) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (11, 3, 32, 32), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, 3, (11,), generator=random)
    network = build_model("resnet18", 3)
    network.load_state_dict(colour_state())
    device = torch.device("cpu")
    precision = Precision(device=device, channels_last=False)

    def counts(rank: int, num_ranks: int) -> torch.Tensor:
        source = TensorSource(
            images,
            labels,
            "val",
            wnids=tuple(COLOUR_WNIDS),
            batch_size=4,
            rank=rank,
            world_size=num_ranks,
        )
        confusion = Confusion(3, device)
        evaluate([network], source, precision, World(), look=confusion.look)
        return confusion.counts

    total = torch.stack([counts(rank, world_size) for rank in range(world_size)]).sum(dim=0)
    assert torch.equal(total, counts(0, 1))
    assert total.sum(dim=1).tolist() == labels.bincount(minlength=3).tolist()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_write_the_tables_of_one(tmp_path: Path, src: Path) -> None:
    checkpoint = colour_checkpoint(tmp_path / "last.pt")
    alone = run(checkpoint, src, out=tmp_path / "alone")
    command = ["-m", "train", "eval", "--device", "cpu", "--checkpoint", str(checkpoint)]
    with ranks(*command, "--src", str(src), "--out", str(tmp_path / "two")) as started:
        ended = [rank.communicate(timeout=180) for rank in started]
        assert [rank.returncode for rank in started] == [0, 0], ended
    lines = ended[0][0].splitlines()
    assert lines == [alone[0] + "  ranks 2", *alone[1:]]
    assert ended[1][0] == ""
    for name in ("confusion.csv", "classes.csv"):
        assert table(tmp_path / "two" / name) == table(tmp_path / "alone" / name)
