from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.average import WeightAverage


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))


def change(model: nn.Module, seed: int) -> None:
    """Move weights and statistics, as a step does."""
    generator = torch.Generator().manual_seed(seed)
    model.train()(torch.randn(4, 3, 8, 8, generator=generator))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_weights_and_statistics_follow_as_torchs_averaged_model_does_it() -> None:
    model = net()
    oracle = AveragedModel(
        copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    average = WeightAverage(model, 0.9)
    for step in range(6):
        change(model, step)
        oracle.update_parameters(model)
        average.update(copy=step == 0)
    wanted = oracle.module.state_dict()
    for name, value in average.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, wanted[name])


def test_the_average_is_a_model_of_its_own_in_evaluation_mode() -> None:
    model = net()
    average = WeightAverage(model, 0.5)
    change(model, 1)
    assert not torch.equal(
        average.module.get_parameter("0.weight"), model.get_parameter("0.weight")
    )
    assert not average.module.training
    assert not any(parameter.requires_grad for parameter in average.module.parameters())


def test_a_copy_is_equal_and_whole_numbers_are_never_averaged() -> None:
    model = net()
    average = WeightAverage(model, 0.5)
    change(model, 1)
    average.update(copy=True)
    state, own = model.state_dict(), average.module.state_dict()
    assert all(torch.equal(state[name], own[name]) for name in state)
    change(model, 2)
    average.update(copy=False)
    assert average.module.get_buffer("1.num_batches_tracked").item() == 2
