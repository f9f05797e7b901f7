from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import plain_net
from train.memory import TensorSource
from train.precision import Precision, normalise
from train.score import evaluate
from train.world import World

FLOAT32 = Precision(device=torch.device("cpu"), channels_last=False)


def noise(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (num_samples, 3, 12, 12), generator=generator)
    return images.to(torch.uint8), torch.arange(num_samples) % 3


def source(num_samples: int, split: str, batch_size: int = 4, **options: Any) -> TensorSource:
    images, labels = noise(num_samples)
    wnids = ("n01", "n02", "n03")
    return TensorSource(images, labels, split, wnids=wnids, batch_size=batch_size, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


class Fixed(nn.Module):
    """Gives each image its own first pixels as scores."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0]


def test_an_evaluation_of_four_samples_is_as_worked_out_by_hand() -> None:
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    best = torch.tensor([0, 1, 2, 2])
    images[torch.arange(4), best] = 255
    batches = TensorSource(
        images, torch.tensor([0, 1, 2, 0]), "val", wnids=("a", "b", "c"), batch_size=3
    )
    (scores,) = evaluate([Fixed()], batches, FLOAT32, World())
    assert (scores.top1_pct, scores.top5_pct, scores.num_samples) == (75.0, 100.0, 4)
    logits = normalise(images, FLOAT32)[:, :, 0, 0]
    by_hand = -logits.log_softmax(dim=1)[range(4), [0, 1, 2, 0]].mean()
    assert scores.loss == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 30])
def test_the_shares_of_an_evaluation_add_up_to_each_image_once(world_size: int) -> None:
    shares = [source(21, "val", rank=r, world_size=world_size) for r in range(world_size)]
    labels = torch.cat([label for share in shares for _, label in share.epoch(0)])
    assert labels.tolist() == noise(21)[1].tolist()


@pytest.mark.parametrize("batch_size", [1, 4, 21, 50])
def test_figures_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    (scores,) = evaluate([plain_net()], source(21, "val", batch_size=batch_size), FLOAT32, World())
    assert scores.num_samples == 21
    (reference,) = evaluate([plain_net()], source(21, "val", batch_size=7), FLOAT32, World())
    assert scores.top1_pct == reference.top1_pct
    assert scores.loss == pytest.approx(reference.loss, rel=1e-5)


def test_an_evaluation_changes_nothing_in_the_model() -> None:
    model = plain_net()
    before = weights(model)
    evaluate([model], source(21, "val"), FLOAT32, World())
    assert all_equal(before, weights(model))
    assert not model.training


def test_an_empty_val_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the val split gave no image"):
        evaluate([plain_net()], source(0, "val"), FLOAT32, World())


def test_several_models_are_scored_in_one_pass_as_each_alone() -> None:
    models = [plain_net(), nn.Sequential(plain_net(), nn.Linear(3, 3))]
    together = evaluate(models, source(21, "val"), FLOAT32, World())
    alone = [evaluate([model], source(21, "val"), FLOAT32, World())[0] for model in models]
    assert together == alone
    assert together[0] != together[1]


def test_flipping_averages_the_scores_with_those_of_the_mirror_image() -> None:
    images, labels = noise(8)
    model = plain_net().eval()
    pixels = normalise(images, FLOAT32)
    logits = ((model(pixels) + model(pixels.flip(3))) / 2).detach()
    (scores,) = evaluate([model], source(8, "val", batch_size=3), FLOAT32, World(), flip=True)
    wanted = nn.functional.cross_entropy(logits, labels).item()
    assert scores.loss == pytest.approx(wanted, rel=1e-5)
    plain = nn.functional.cross_entropy(model(pixels), labels).item()
    assert scores.loss != pytest.approx(plain, rel=1e-5)


def test_scores_are_shown_in_float32_batch_by_batch() -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    half = Precision(device=torch.device("cpu"), amp_dtype=torch.bfloat16)
    model = plain_net().to(memory_format=torch.channels_last)
    evaluate(
        [model, plain_net()],
        source(10, "val"),
        half,
        World(),
        look=lambda logits, labels: seen.append((logits, labels)),
    )
    assert [len(labels) for _, labels in seen] == [4, 4, 2]
    assert {logits.dtype for logits, _ in seen} == {torch.float32}
