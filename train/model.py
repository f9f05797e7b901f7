"""torchvision ResNets, from scratch or from weights, and their parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchvision import models

from train.blocks import add_blurpool

HEAD: Final = ("fc.weight", "fc.bias")


def build_model(
    name: str,
    num_classes: int,
    weights: str | None = None,
    *,
    wnids: Sequence[str] | None = None,
    zero_init: bool = False,
    blurpool: bool = False,
) -> nn.Module:
    """Build a torchvision ResNet, on the CPU.

    Its first weights come from torch's global random state, so seed that before.

    Args:
        name: torchvision's name, such as `resnet50`.
        num_classes: Outputs of the head.
        weights: Name in the model's weights enumeration (downloaded once, by torchvision), or a
            file: a plain state dict, or a checkpoint of ours. The head keeps its random start
            where its shape differs, is missing, or belongs to a checkpoint of other classes.
        wnids: Classes in label order, where known.
        zero_init: Start the scale of the last BatchNorm of each block at zero, so that a block
            begins as its shortcut (Goyal et al., arXiv 1706.02677).
        blurpool: Blur before convolutions with a stride; weights keep their names and shapes.

    Raises:
        ValueError: Weights are unknown, cannot be downloaded or do not fit the model.
    """
    model: nn.Module = models.get_model(
        name, weights=None, num_classes=num_classes, zero_init_residual=zero_init
    )
    if blurpool:
        add_blurpool(model)
    if weights is not None:
        _load_weights(model, _read_weights(name, weights, wnids), weights)
    return model


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trained parameters: decay only on those with more than one dimension."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def refuse_softmax(model: nn.Module, crop_size: int) -> None:
    """Refuse a model whose outputs are probabilities: cross entropy applies softmax itself.

    Judged by what it computes, not by its layers: rows that are never negative and all add up
    to one are no logits. Leaves weights, buffers, mode and random state untouched.

    Args:
        model: On the CPU or a device, taking `(N, 3, crop_size, crop_size)`.

    Raises:
        ValueError: The model ends in softmax.
    """
    parameter = next(model.parameters())
    noise = torch.randn(4, 3, crop_size, crop_size, generator=torch.Generator().manual_seed(0))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        scores: Tensor = model(noise.to(parameter.device, parameter.dtype)).float()
    model.train(was_training)
    sums = scores.sum(dim=1)
    if bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} ends in softmax, and cross entropy would apply it twice; "
            "remove it so that the model gives logits"
        )


def _read_weights(name: str, weights: str, wnids: Sequence[str] | None) -> dict[str, Tensor]:
    path = Path(weights)
    if path.is_file():
        return _read_state_dict(path, wnids)
    enumeration = models.get_model_weights(name)
    known = list(enumeration.__members__)  # DEFAULT, an alias, is among them
    member = weights.rpartition(".")[2]
    if member not in known:
        raise ValueError(
            f"--weights must be a file or one of {', '.join(known)} for {name}, got {weights!r}"
        )
    try:
        state: dict[str, Tensor] = enumeration[member].get_state_dict(
            progress=False, check_hash=True
        )
    except OSError as error:
        raise ValueError(
            f"--weights {weights}: could not be downloaded ({_first_line(error)}); "
            "download the file elsewhere and give its path"
        ) from error
    return state


def _read_state_dict(path: Path, wnids: Sequence[str] | None) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises its own classes
        raise ValueError(f"{path}: not a file of weights ({_first_line(error)})") from error
    state = content
    for key in ("ema", "model", "state_dict"):  # of ours, the averaged weights first
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path}: holds no state dict of a model")
    trained = content.get("wnids") if isinstance(content, dict) else None
    others = isinstance(trained, list) and wnids is not None and trained != list(wnids)
    named = {str(key).removeprefix("module."): value for key, value in state.items()}
    return {key: v for key, v in named.items() if not (others and key in HEAD)}


def _load_weights(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    own = model.state_dict()
    head = [k for k in HEAD if k in own]
    if any(k not in state or state[k].shape != own[k].shape for k in head):
        state = {k: v for k, v in state.items() if k not in head} | {k: own[k] for k in head}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        line = _first_line(error, skip=1)
        raise ValueError(f"--weights {origin}: does not fit the model: {line}") from error


def _first_line(error: Exception, skip: int = 0) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[min(skip, len(lines) - 1)] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
