from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from train.model import build_model, parameter_groups, refuse_softmax


class SoftmaxInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(images.mean(dim=(2, 3)))
        return scores.softmax(dim=1)


def small_net(*end: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
        *end,
    )


def test_only_tensors_with_more_than_one_dimension_decay() -> None:
    model = build_model("resnet18", 7)
    decayed, plain = parameter_groups(model, 0.5)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.5, 0.0)
    assert (len(decayed["params"]), len(plain["params"])) == (21, 41)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim == 1 for p in plain["params"])


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(build_model("resnet18", 2).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_weights_from_a_file_are_taken_whole_when_the_classes_agree(tmp_path: Path) -> None:
    saved = build_model("resnet18", 3).state_dict()
    torch.save({"model": saved, "epoch": 1}, tmp_path / "w.pt")
    loaded = build_model("resnet18", 3, str(tmp_path / "w.pt")).state_dict()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_the_head_is_replaced_when_the_classes_differ(tmp_path: Path) -> None:
    saved = build_model("resnet18", 3).state_dict()
    torch.save(saved, tmp_path / "w.pth")
    loaded = build_model("resnet18", 5, str(tmp_path / "w.pth")).state_dict()
    assert loaded["fc.weight"].shape == (5, 512)
    assert torch.equal(saved["layer4.1.conv2.weight"], loaded["layer4.1.conv2.weight"])


def test_the_head_of_other_classes_is_replaced_though_they_are_as_many(tmp_path: Path) -> None:
    saved = build_model("resnet18", 3).state_dict()
    torch.save({"model": saved, "wnids": ["a", "b", "c"]}, tmp_path / "w.pt")
    for wnids, kept in ((None, True), (("a", "b", "c"), True), (("a", "b", "d"), False)):
        loaded = build_model("resnet18", 3, str(tmp_path / "w.pt"), wnids=wnids).state_dict()
        assert torch.equal(saved["fc.weight"], loaded["fc.weight"]) is kept
        assert torch.equal(saved["layer4.1.conv2.weight"], loaded["layer4.1.conv2.weight"])


def test_weights_without_a_head_leave_it_at_its_start(tmp_path: Path) -> None:
    saved = build_model("resnet18", 3).state_dict()
    body = {key: value for key, value in saved.items() if not key.startswith("fc.")}
    torch.save(body, tmp_path / "w.pt")
    loaded = build_model("resnet18", 4, str(tmp_path / "w.pt")).state_dict()
    assert torch.equal(saved["conv1.weight"], loaded["conv1.weight"])


def test_unknown_weights_are_refused_with_the_names_that_exist() -> None:
    with pytest.raises(
        ValueError,
        match="--weights must be a file or one of IMAGENET1K_V1, DEFAULT for resnet18, got 'best'",
    ):
        build_model("resnet18", 5, "best")


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"w\.pt: not a file of weights"):
        build_model("resnet18", 5, str(tmp_path / "w.pt"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: holds no state dict of a model"):
        build_model("resnet18", 5, str(tmp_path / "list.pt"))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(small_net().state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"--weights .*w\.pt: does not fit the model: Missing key"):
        build_model("resnet18", 5, str(tmp_path / "w.pt"))


@pytest.mark.parametrize("model", [small_net(nn.Softmax(dim=1)), SoftmaxInForward()])
def test_a_model_that_ends_in_softmax_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="ends in softmax, and cross entropy would apply it twice"):
        refuse_softmax(model, 16)


def test_a_model_that_gives_logits_passes_and_is_left_as_it_was() -> None:
    model = small_net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    refuse_softmax(model, 16)
    assert model.training
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
