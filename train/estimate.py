"""`train fit --dry-run`: what a run would do, and the memory that it would need."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from train.blocks import STAGES, forget_activations
from train.config import FitConfig
from train.model import build_model
from train.precision import Precision, choose_precision
from train.run import Say, list_raw, open_train, resolve, train_crop_size
from train.world import pick_device, read_world


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one card; kernels' work space and the context (about 1 GB) come on top."""

    weights: int
    """Weights and buffers, of the average too."""
    gradients: int
    optimizer: int
    activations: int
    """What the backward pass needs, of one batch."""
    images: int
    """Two batches, as bytes and as the network's input."""

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.images


def look_ahead(config: FitConfig, say: Say) -> None:
    """Print the resolved settings, steps, rates and memory of a run; trains nothing.

    Args:
        config: Options.
        say: Takes the lines.

    Raises:
        ValueError: The run could not begin.
    """
    world = read_world()
    precision = choose_precision(config, pick_device(config.device, world))
    with closing(open_train(config, world, list_raw(config))) as train:
        resolved = resolve(config, train, world, precision)
        num_classes = train.num_classes
        num_samples = train.num_samples
    if not world.is_main:
        return
    width = max(map(len, resolved))
    for name, value in resolved.items():
        say(f"{name:<{width}}  {value}")
    say("")
    say(f"{num_samples} training images in {num_classes} classes")
    say(
        f"{config.epochs} epochs of {resolved['steps_per_epoch']} steps of "
        f"{resolved['global_batch_size']} images; the rate peaks at {resolved['peak_lr']:g}"
    )
    if config.crop_size_start is not None:
        say(f"crop sizes by epoch: {_crop_sizes(config)}")
    say(format_estimate(estimate_memory(config, num_classes, precision)))


def estimate_memory(config: FitConfig, num_classes: int, precision: Precision) -> MemoryEstimate:
    """Count what a step needs, from a forward pass without data (torch's meta device)."""
    with torch.device("meta"):
        model = build_model(config.model, num_classes, blurpool=config.blurpool)
    num_weights = sum(p.numel() for p in model.parameters())
    num_buffers = sum(b.numel() for b in model.buffers())
    copies = 1 if config.ema_decay is None else 2
    size = config.train_crop_size
    pixels = config.batch_size * 3 * size * size
    half = precision.amp_dtype or torch.float32
    return MemoryEstimate(
        weights=4 * copies * (num_weights + num_buffers),
        gradients=4 * num_weights,
        optimizer=4 * num_weights if config.momentum else 0,
        activations=_activations(config, model, half),
        images=2 * pixels * (1 + half.itemsize),
    )


def format_estimate(estimate: MemoryEstimate) -> str:
    """Give the estimate's line for people."""
    parts = ("activations", "weights", "gradients", "optimizer", "images")
    listed = ", ".join(f"{part} {getattr(estimate, part) / 1e9:.2f}" for part in parts)
    return (
        f"memory, about {estimate.total / 1e9:.1f} GB a card ({listed}), and what kernels and the "
        "driver take on top, about 1 to 2 GB"
    )


def _crop_sizes(config: FitConfig) -> str:
    sizes = [train_crop_size(config, epoch) for epoch in range(config.epochs)]
    starts = [e for e in range(config.epochs) if e == 0 or sizes[e] != sizes[e - 1]]
    return ", ".join(f"{sizes[epoch]} px from epoch {epoch + 1}" for epoch in starts)


def _activations(config: FitConfig, model: nn.Module, half: torch.dtype) -> int:
    """Count the bytes that one batch's forward pass keeps for the backward pass.

    Autocast is imitated by a network in the half type. With --grad-checkpoint the block that is
    computed again keeps its own meanwhile: the largest one is added.
    """
    size = config.train_crop_size
    images = torch.empty((config.batch_size, 3, size, size), dtype=half, device="meta")
    model = model.to(half).train()
    if not config.grad_checkpoint:
        return _kept_bytes(model, images)
    largest = _largest_block(model, images)
    forget_activations(model)
    return _kept_bytes(model, images) + largest


def _kept_bytes(module: nn.Module, inputs: Tensor) -> int:
    """Add up the storages that a forward pass saves, each once; weights are not counted."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    alive: list[Tensor] = []  # a freed storage's address would come again
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(inputs)
        if outputs.ndim == 2:  # the head's scores: the loss keeps their logarithms
            labels = torch.zeros(len(outputs), dtype=torch.int64, device="meta")
            F.cross_entropy(outputs.float(), labels)
    return sum(kept.values())


def _largest_block(model: nn.Module, images: Tensor) -> int:
    """Give the most that one block of the four stages keeps."""
    inputs: dict[nn.Module, Tensor] = {}
    blocks = [block for name in STAGES for block in getattr(model, name)]

    def note(block: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[block] = given[0]

    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    return max(_kept_bytes(block, inputs[block]) for block in blocks)
