from __future__ import annotations

from typing import Any

import pytest

from train.schedule import crop_size_at, lr_at, scaled_lr


def rates(
    total_steps: int, warmup_steps: int, final_lr: float = 0.0, **options: Any
) -> list[float]:
    return [
        lr_at(
            step,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            peak_lr=0.8,
            final_lr=final_lr,
            **options,
        )
        for step in range(total_steps)
    ]


def test_every_rate_of_four_epochs_of_two_steps_is_as_worked_out_by_hand() -> None:
    # One epoch of warmup: 1/2, 2/2; then (1 + cos(k * 30 degrees)) / 2 for k = 1..6.
    by_hand = [0.4, 0.8, 0.7464101615, 0.6, 0.4, 0.2, 0.0535898385, 0.0]
    assert rates(8, 2) == pytest.approx(by_hand)


def test_without_warmup_the_first_step_has_the_peak_and_the_last_the_final_rate() -> None:
    assert rates(5, 0, final_lr=1e-6) == pytest.approx(
        [0.8, 0.6828428712, 0.4000005, 0.1171581288, 1e-6]
    )


def test_a_run_of_one_step_has_the_peak_rate() -> None:
    assert rates(1, 0) == [0.8]


@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 9])
def test_the_rate_rises_then_falls_and_ends_exactly(warmup_steps: int) -> None:
    found = rates(10, warmup_steps, final_lr=0.1)
    peak = max(warmup_steps - 1, 0)
    assert found[peak] == 0.8
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)
    assert found[-1] == pytest.approx(0.8 if warmup_steps == 10 else 0.1)


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup must last from 0 to 3 of 4 steps, got 4; lower"):
        rates(4, 4)


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step must lie in 0..3, got {step}"):
        lr_at(step, total_steps=4, warmup_steps=1, peak_lr=1.0, final_lr=0.0)


def test_the_peak_scales_with_the_global_batch() -> None:
    assert scaled_lr(0.1, 64) == pytest.approx(0.025)


def test_every_rate_of_a_line_is_as_worked_out_by_hand() -> None:
    by_hand = [0.4, 0.8, 0.68, 0.56, 0.44, 0.32, 0.2]
    assert rates(7, 2, final_lr=0.2, schedule="linear") == pytest.approx(by_hand)


def test_every_rate_of_steps_is_a_tenth_of_the_one_before() -> None:
    by_hand = [0.4, 0.8, 0.8, 0.08, 0.08, 0.08, 0.008]
    assert rates(7, 2, schedule="step", drop_steps=3) == pytest.approx(by_hand)


def test_crops_grow_in_multiples_of_the_stride_as_ffcv_grows_them() -> None:
    def sizes(**options: int) -> list[int]:
        return [crop_size_at(epoch, **options) for epoch in range(16)]

    # ffcv-imagenet's 16 epochs: np.round(np.interp(e, [11, 13], [160, 192]) / 32) * 32
    assert sizes(start=160, end=192, ramp_start=11, ramp_end=13) == [160] * 12 + [192] * 4
    assert sizes(start=128, end=224, ramp_start=3, ramp_end=12) == (
        [128] * 5 + [160] * 3 + [192] * 3 + [224] * 5
    )
    assert sizes(start=40, end=64, ramp_start=2, ramp_end=6)[:8] == [40, 40, 40, 48, 48, 56, 64, 64]
    assert sizes(start=64, end=64, ramp_start=0, ramp_end=1) == [64] * 16
