from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import config, net, source
from train import ladder
from train.config import FitConfig
from train.fit import fit_sources
from train.ladder import explained, find_batch_size, noise
from train.precision import Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def options(**changes: Any) -> FitConfig:
    settings: dict[str, Any] = {"out": Path("x"), "src": Path("y"), "train_crop_size": 48}
    return FitConfig(**(settings | changes))


class Hungry(nn.Module):
    """Runs out of memory, as CUDA reports it, for more than a few images."""

    def __init__(self, limit: int, error: Exception) -> None:
        super().__init__()
        self.net, self.limit, self.error = net(), limit, error

    def forward(self, images: Tensor) -> Tensor:
        if self.training and len(images) > self.limit:
            raise self.error
        scores: Tensor = self.net(images)
        return scores


ERRORS = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_out_of_memory_tells_what_to_type(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(ValueError, match="out of memory") as caught:
        fit_sources(config(tmp_path), source("train"), source("val"), print, model=Hungry(2, error))
    assert str(caught.value) == (
        "out of memory on cpu with --batch-size 4; try in this order: (1) --batch-size 2 "
        "--grad-accum 2 (the same images a step), (2) --grad-checkpoint, (3) a smaller "
        "--train-crop-size or --model. --find-batch-size tries sizes for you"
    )


def test_the_ladder_of_a_card_has_its_rungs_in_order_and_leaves_out_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    full = ladder.ladder(options(amp=False, channels_last=False), CUDA)
    assert full == (
        "(1) --amp, (2) --batch-size 128 --grad-accum 2 (the same images a step), "
        "(3) --channels-last, (4) --grad-checkpoint, (5) a smaller --train-crop-size or --model"
    )
    used = ladder.ladder(options(batch_size=1, grad_accum=8, grad_checkpoint=True), CUDA)
    assert used == "(1) a smaller --train-crop-size or --model"


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), explained(options(), CPU):
        raise RuntimeError("shapes differ")


def test_sizes_are_halved_until_a_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "new_model", lambda *_args, **_options: Hungry(5, ERRORS[0]))
    monkeypatch.setattr(
        ladder,
        "noise",
        lambda size, *_: (noise(size, 12, CPU)[0], torch.arange(size) % 3),
    )
    lines: list[str] = []
    find_batch_size(options(batch_size=16, grad_accum=3, device="cpu"), lines.append)
    assert lines == [
        "--batch-size 16: out of memory",
        "--batch-size 8: out of memory",
        "--batch-size 4: fits (main memory; on a CPU this only finds sizes that fail at once)",
        "type: --batch-size 4 --grad-accum 12  (48 images a step)",
    ]
    monkeypatch.setattr(ladder, "new_model", lambda *_args, **_options: Hungry(0, ERRORS[0]))
    with pytest.raises(ValueError, match=r"not even one image fits; try \(1\)"):
        find_batch_size(options(batch_size=2, device="cpu"), lines.append)


def test_a_size_is_tried_on_the_real_network() -> None:
    precision = Precision(device=CPU, channels_last=False)
    assert ladder.try_steps(options(model="resnet18"), precision, 2).startswith(" (main memory")


def test_noise_looks_like_a_batch() -> None:
    images, labels = noise(3, 8, CPU)
    assert (images.shape, images.dtype) == ((3, 3, 8, 8), torch.uint8)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert (labels.shape, labels.dtype) == ((3,), torch.int64)
