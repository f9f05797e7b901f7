"""Score a saved model on a val split."""

from __future__ import annotations

from contextlib import closing

from prep.files import local_path
from train.checkpoint import Checkpoint, load_checkpoint
from train.config import EvalConfig
from train.loop import BatchSource, Scores, evaluate
from train.model import build_model
from train.run import Say, choose_precision, list_raw, open_val
from train.world import World, joined, pick_device, read_world


def evaluate_checkpoint(config: EvalConfig, say: Say) -> Scores:
    """Evaluate a checkpoint; model, classes and, unless given, sizes come from it.

    Args:
        config: Options.
        say: Takes the result's line; only called on rank 0.

    Raises:
        ValueError: The checkpoint or the split cannot be used, or their classes differ.
    """
    world = read_world()
    device = pick_device(config.device, world)
    checkpoint = load_checkpoint(local_path(config.checkpoint))
    crop_size = config.val_crop_size or checkpoint.config["val_crop_size"]
    resize_size = config.val_resize_size or checkpoint.config["val_resize_size"]
    if crop_size > resize_size:
        raise ValueError(
            f"--val-crop-size must be at most --val-resize-size {resize_size}, got {crop_size}"
        )
    raw = list_raw(config)
    with (
        joined(world, device),
        closing(open_val(config, world, raw, crop_size, resize_size)) as val,
    ):
        _refuse_classes(config, checkpoint, val)
        model = build_model(checkpoint.config["model"], len(checkpoint.wnids))
        model.load_state_dict(checkpoint.model)
        precision = choose_precision(config, device)
        model.to(device, memory_format=precision.memory_format)  # type: ignore[call-overload]
        scores = evaluate(model, val, precision, world)
        if world.is_main:
            say(_format(scores, val, world))
    return scores


def _format(scores: Scores, val: BatchSource, world: World) -> str:
    damaged = f"  damaged {val.num_damaged}" if val.num_damaged else ""
    ranks = f"  ranks {world.world_size}" if world.world_size > 1 else ""
    return (
        f"top-1 {scores.top1_pct:.2f} %  top-5 {scores.top5_pct:.2f} %  "
        f"loss {scores.loss:.4f}  images {scores.num_samples}{ranks}{damaged}"
    )


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
