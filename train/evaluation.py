"""Score a saved model on a val split, as a whole and class by class."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from prep.files import local_path, write_text_whole
from train.checkpoint import Checkpoint, load_checkpoint, takes_average, trained_network
from train.config import check_sizes
from train.feed import BatchSource
from train.options import EvalConfig
from train.precision import choose_precision
from train.run import Say, list_raw, open_val
from train.score import Scores, evaluate
from train.world import World, joined, pick_device, read_world, sum_over_ranks

CLASS_COLUMNS: Final = (
    *("label", "wnid", "name", "num_images", "top1_pct", "top5_pct", "mistaken_for", "times"),
)


class Confusion:
    """What the images of each class were taken for, summed up on the device.

    Args:
        num_classes: Labels lie below it.
        device: Of the scores that are looked at.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        """`(C, C)`: images by label (row) and best guess (column)."""
        self.top5_hits = torch.zeros(num_classes, dtype=torch.int64, device=device)
        """`(C,)`: images whose label is among their five best guesses, by label."""

    def look(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: `(N, C)` scores and `(N,)` labels."""
        num_classes = len(self.counts)
        best = logits.topk(min(5, num_classes), dim=1).indices  # as top-1 and top-5 are counted
        pairs = labels * num_classes + best[:, 0]
        self.counts.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        hits = (best == labels.unsqueeze(1)).sum(dim=1)
        self.top5_hits.index_add_(0, labels, hits)

    def sum_over_ranks(self, world: World) -> None:
        """Add up what all ranks have seen; every rank has the sums then."""
        sum_over_ranks(self.counts, world)
        sum_over_ranks(self.top5_hits, world)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScore:
    """How the images of one class were judged."""

    label: int
    num_images: int
    num_top1: int
    num_top5: int
    mistaken_for: int | None
    """Label of the most usual wrong guess, the lowest of equals; None without a mistake."""
    times: int
    """Images with that wrong guess."""

    @property
    def top1_pct(self) -> float | None:
        """Share of the images whose best guess is right; None without images."""
        return _percent(self.num_top1, self.num_images)

    @property
    def top5_pct(self) -> float | None:
        """Share of the images with the class among the five best guesses; None without images."""
        return _percent(self.num_top5, self.num_images)


def evaluate_checkpoint(config: EvalConfig, say: Say) -> Scores:
    """Evaluate a checkpoint; model, classes and, unless given, sizes and flip come from it.

    With `--out`, rank 0 writes confusion.csv and classes.csv there.

    Args:
        config: Options.
        say: Takes the result's lines, the figures first; only called on rank 0.

    Raises:
        ValueError: The checkpoint or the split cannot be used, or their classes differ.
    """
    world = read_world()
    device = pick_device(config.device, world)
    checkpoint = load_checkpoint(local_path(config.checkpoint))
    crop_size = config.val_crop_size or checkpoint.config["val_crop_size"]
    resize_size = config.val_resize_size or checkpoint.config["val_resize_size"]
    check_sizes(crop_size, resize_size)
    network = trained_network(checkpoint, ema=config.ema)
    raw = list_raw(config)
    with (
        joined(world, device),
        closing(open_val(config, world, raw, crop_size, resize_size)) as val,
    ):
        _refuse_classes(config, checkpoint, val)
        out = _open_out(config.out, world)
        precision = choose_precision(config, device)
        network.to(device, memory_format=precision.memory_format)  # type: ignore[call-overload]
        confusion = Confusion(len(checkpoint.wnids), device)
        flip = checkpoint.config["val_flip"] if config.val_flip is None else config.val_flip
        scores = evaluate([network], val, precision, world, flip=flip, look=confusion.look)[0]
        confusion.sum_over_ranks(world)
        if world.is_main:
            averaged = takes_average(checkpoint, config.ema)
            say(_format(scores, val, world, flip=flip, averaged=averaged))
            _report(confusion, checkpoint, config.worst, out, say)
    return scores


def class_scores(confusion: Tensor, top5_hits: Tensor) -> list[ClassScore]:
    """Read the scores of each class, in label order, off the counts.

    Args:
        confusion: `(C, C)` int64, label by best guess.
        top5_hits: `(C,)` int64.
    """
    mistakes = confusion.clone().fill_diagonal_(0)
    times, mistaken_for = mistakes.max(dim=1)  # the first of equals
    columns = (confusion.sum(dim=1), confusion.diagonal(), top5_hits, mistaken_for, times)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        ClassScore(
            label=label,
            num_images=num_images,
            num_top1=num_top1,
            num_top5=num_top5,
            mistaken_for=guess if num_wrong else None,
            times=num_wrong,
        )
        for label, (num_images, num_top1, num_top5, guess, num_wrong) in enumerate(rows)
    ]


def worst_classes(scores: Iterable[ClassScore], num_worst: int) -> list[ClassScore]:
    """Give the classes with the lowest top-1, lowest first, equals by label; without empty ones."""
    judged = [score for score in scores if score.num_images]
    return sorted(judged, key=lambda s: (s.num_top1 / s.num_images, s.label))[:num_worst]


def format_worst(worst: Sequence[ClassScore], checkpoint: Checkpoint) -> list[str]:
    """Lay classes out in a small table; gives its lines, none without classes."""
    if not worst:
        return []
    names = [_name(checkpoint, score.label) for score in worst]
    width = max(map(len, [*names, "class"]))
    lines = [f"lowest top-1  images  {'class':<{width}}  most often taken for"]
    for score, name in zip(worst, names, strict=True):
        mistake = "-"
        if score.mistaken_for is not None:
            how_often = "once" if score.times == 1 else f"{score.times} times"
            mistake = f"{_name(checkpoint, score.mistaken_for)}, {how_often}"
        percent = f"{score.top1_pct:.2f} %"
        lines.append(f"{percent:>12}  {score.num_images:>6}  {name:<{width}}  {mistake}")
    return lines


def confusion_csv(confusion: Tensor, wnids: Sequence[str]) -> str:
    """Write the counts as a table with wnids as header and first column; rows are labels."""
    rows = zip(wnids, confusion.tolist(), strict=True)
    return _csv([["wnid", *wnids], *([wnid, *counts] for wnid, counts in rows)])


def classes_csv(scores: Iterable[ClassScore], checkpoint: Checkpoint) -> str:
    """Write one row for each class, in label order; percentages without images are empty."""
    wnids, names = checkpoint.wnids, checkpoint.class_names
    rows = [
        (
            *(s.label, wnids[s.label], names[s.label], s.num_images),
            *("" if share is None else f"{share:.6g}" for share in (s.top1_pct, s.top5_pct)),
            *("" if s.mistaken_for is None else wnids[s.mistaken_for], s.times),
        )
        for s in scores
    ]
    return _csv([CLASS_COLUMNS, *rows])


def _open_out(typed: Path | None, world: World) -> Path | None:
    """Make the folder of the tables before the split is read."""
    if typed is None:
        return None
    out = local_path(typed)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {typed}: is a file; give a folder")
    if world.is_main:
        out.mkdir(parents=True, exist_ok=True)
    return out


def _report(
    confusion: Confusion, checkpoint: Checkpoint, num_worst: int, out: Path | None, say: Say
) -> None:
    counts = confusion.counts.cpu()
    scores = class_scores(counts, confusion.top5_hits.cpu())
    for line in format_worst(worst_classes(scores, num_worst), checkpoint):
        say(line)
    if out is not None:
        write_text_whole(out / "confusion.csv", confusion_csv(counts, checkpoint.wnids))
        write_text_whole(out / "classes.csv", classes_csv(scores, checkpoint))


def _name(checkpoint: Checkpoint, label: int) -> str:
    name, wnid = checkpoint.class_names[label], checkpoint.wnids[label]
    return wnid if name == wnid else f"{name} ({wnid})"


def _percent(num_hits: int, num_images: int) -> float | None:
    return 100 * num_hits / num_images if num_images else None


def _csv(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _format(scores: Scores, val: BatchSource, world: World, *, flip: bool, averaged: bool) -> str:
    parts = [
        f"top-1 {scores.top1_pct:.2f} %",
        f"top-5 {scores.top5_pct:.2f} %",
        f"loss {scores.loss:.4f}",
        f"images {scores.num_samples}",
        *([f"ranks {world.world_size}"] if world.world_size > 1 else []),
        *([f"damaged {val.num_damaged}"] if val.num_damaged else []),
        *(["flip-averaged"] if flip else []),
        *(["averaged weights"] if averaged else []),
    ]
    return "  ".join(parts)


def _refuse_classes(config: EvalConfig, checkpoint: Checkpoint, val: BatchSource) -> None:
    trained, given = tuple(checkpoint.wnids), tuple(val.wnids)
    if trained == given:
        return
    if len(trained) != len(given):
        difference = f"{len(trained)} classes, the val split has {len(given)}"
    else:
        label = next(
            i for i, pair in enumerate(zip(trained, given, strict=True)) if len(set(pair)) > 1
        )
        difference = f"label {label} as {trained[label]!r}, the val split has {given[label]!r}"
    raise ValueError(f"{config.checkpoint}: was trained with {difference}; use the split it is for")
