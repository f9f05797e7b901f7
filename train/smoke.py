"""`train fit --smoke`: the whole chain on a few images of each class, before hours are spent."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import fields, replace
from typing import Final

from prep.files import local_path, shown
from train.config import FitConfig, InputConfig
from train.evaluation import evaluate_checkpoint
from train.fit import fit
from train.loop import num_steps_of
from train.options import EvalConfig
from train.run import Say, list_raw, open_train
from train.world import World, read_world

SAMPLES_PER_CLASS: Final = 10
EPOCHS: Final = 2
TOLERANCE_PCT: Final = 1.0
"""Of top-1: a GPU may take another algorithm the second time, which turns what is nearly a tie."""


def try_chain(config: FitConfig, say: Say) -> None:
    """Train two epochs on ten images a class, stop and resume in the second, evaluate.

    Everything is written to the folder `smoke` in `--out`; options that only matter in a long run
    (epochs, warmup, progressive resizing) are shortened, the others are as given.

    Args:
        config: Options of the real run.
        say: Takes the lines; only called on rank 0.

    Raises:
        ValueError: Some link of the chain does not work.
    """
    started = time.perf_counter()
    short, num_steps = _shorten(config)
    middle = num_steps + max(num_steps // 2, 1)
    fit(replace(short, resume="none", stop_after_steps=middle), say)
    result = fit(short, say)
    if not result.finished or result.num_steps != EPOCHS * num_steps - middle:
        raise ValueError(
            f"--smoke: {result.num_steps} steps after resuming, expected "
            f"{EPOCHS * num_steps - middle}"
        )
    scores = evaluate_checkpoint(_eval_config(short), say)
    if abs(scores.top1_pct - result.best_top1_pct) > TOLERANCE_PCT:
        raise ValueError(
            f"--smoke: best.pt scores {scores.top1_pct:.2f} % top-1 when loaded again, "
            f"{result.best_top1_pct:.2f} % in training"
        )
    if read_world().is_main:
        say(
            f"smoke test passed in {time.perf_counter() - started:.0f} s: paths, labels, training, "
            f"evaluation, checkpoint and resume work; {shown(short.out)} may be deleted"
        )


def _shorten(config: FitConfig) -> tuple[FitConfig, int]:
    """Give the options of the short run, and the steps of its epochs."""
    short = replace(
        config,
        smoke=False,
        out=local_path(config.out) / "smoke",
        resume="auto",
        samples_per_class=SAMPLES_PER_CLASS,
        val_samples_per_class=SAMPLES_PER_CLASS,
        epochs=EPOCHS,
        warmup_epochs=0.0,
        crop_ramp_start=0,
        crop_ramp_end=1,
        stop_after_steps=None,
    )
    world, raw = read_world(), list_raw(config)
    with closing(open_train(replace(short, batch_size=1), World(), raw)) as source:
        share = source.num_samples // (2 * world.world_size)  # two steps at least
    short = replace(short, batch_size=max(min(config.batch_size, share), 1))
    with closing(open_train(short, world, raw)) as source:
        return short, num_steps_of(source, short.grad_accum)


def _eval_config(config: FitConfig) -> EvalConfig:
    shared = {field.name: getattr(config, field.name) for field in fields(InputConfig)}
    return EvalConfig(checkpoint=local_path(config.out) / "best.pt", worst=0, **shared)
