"""Score models on a split: each image once, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train.feed import BatchSource, on_device
from train.metrics import top_k_hits
from train.precision import Precision, normalise
from train.world import World, sum_over_ranks

Look = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Result of one evaluation over all ranks."""

    loss: float
    top1_pct: float
    top5_pct: float
    num_samples: int


def evaluate(
    models: Sequence[nn.Module],
    source: BatchSource,
    precision: Precision,
    world: World,
    *,
    flip: bool = False,
    look: Look | None = None,
) -> list[Scores]:
    """Score models on the val split in one pass: each image once, over all ranks.

    Scores are float32 and the loss has no label smoothing. The models must be bare modules: ranks
    may have unequal numbers of steps, which a wrapper would wait for.

    Args:
        models: Set to evaluation mode.
        source: Batches of the val split.
        precision: Of the forward pass.
        world: Place among the ranks.
        flip: Average the scores of each image with those of its mirror image.
        look: Shown the first model's `(N, C)` float32 scores and the `(N,)` labels of each batch.

    Returns:
        The scores of each model.

    Raises:
        ValueError: The split is empty.
    """
    for model in models:
        model.eval()
    totals = torch.zeros(len(models), 4, dtype=torch.float64, device=precision.device)
    with torch.no_grad():
        for images, labels in on_device(source.epoch(0), precision.device):
            pixels = normalise(images, precision)
            for place, model in enumerate(models):
                logits = scores_of(model, pixels, precision, flip=flip)
                totals[place] += _count(logits, labels)
                if look is not None and place == 0:
                    look(logits, labels)
    return [_as_scores(*row) for row in sum_over_ranks(totals, world).tolist()]


def at_least_float32(scores: Tensor) -> Tensor:
    """Give scores in float32, or wider if they are."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def scores_of(model: nn.Module, pixels: Tensor, precision: Precision, *, flip: bool) -> Tensor:
    """Give the `(N, C)` float32 scores of normalised pixels, averaged with the mirror images'."""
    with precision.autocast():
        logits = at_least_float32(model(pixels))
        if flip:
            logits = (logits + at_least_float32(model(pixels.flip(3)))) / 2
    return logits


def _count(logits: Tensor, labels: Tensor) -> Tensor:
    """Give loss, top-1 and top-5 hits of a batch, summed, and its size; `(4,)` float64."""
    hits = top_k_hits(logits, labels, (1, min(5, logits.shape[1]))).double()
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    return torch.stack([loss, *hits, torch.full_like(loss, len(labels))])


def _as_scores(loss: float, top1: float, top5: float, num_samples: float) -> Scores:
    if not num_samples:
        raise ValueError("the val split gave no image; pack one, or look at its report.csv")
    return Scores(
        loss=loss / num_samples,
        top1_pct=100 * top1 / num_samples,
        top5_pct=100 * top5 / num_samples,
        num_samples=int(num_samples),
    )
