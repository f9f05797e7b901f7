from __future__ import annotations

import importlib
import importlib.util
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torchvision import models

from train.checkpoint import Checkpoint, save_checkpoint
from train.export import BOUNDS, OLDEST_FOR_ONNX, export, largest_difference
from train.model import build_model
from train.options import ExportConfig

SIZE = 40


def random_network(seed: int, *, blurpool: bool = False) -> nn.Module:
    """A 3-class ResNet-18 whose BatchNorm has statistics of its own."""
    torch.manual_seed(seed)
    network = build_model("resnet18", 3, blurpool=blurpool)
    network.train()
    with torch.no_grad():
        network(torch.randn(4, 3, SIZE, SIZE))
    return network.eval()


def checkpoint(
    path: Path, network: nn.Module, ema: nn.Module | None = None, *, blurpool: bool = False
) -> Path:
    saved = Checkpoint(
        epoch=1,
        step=0,
        model=dict(network.state_dict()),
        optimizer={},
        scaler={},
        ema=None if ema is None else dict(ema.state_dict()),
        best_top1_pct=50.0,
        ranks=[],
        config={"model": "resnet18", "blurpool": blurpool, "val_crop_size": SIZE},
        wnids=["n00", "n01", "n02"],
        class_names=["n00", "n01", "n02"],
        data={},
    )
    save_checkpoint(path, saved)
    return path


def run(source: Path, out: Path, **options: Any) -> str:
    lines: list[str] = []
    assert export(ExportConfig(checkpoint=source, out=out, **options), lines.append) == out
    assert len(lines) == 1
    return lines[0]


def scores(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = network(images)
    return found


@pytest.fixture
def network() -> nn.Module:
    return random_network(0)


@pytest.fixture
def source(tmp_path: Path, network: nn.Module) -> Path:
    return checkpoint(tmp_path / "last.pt", network)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".PTH"])
def test_plain_torchvision_loads_the_state_dict(
    tmp_path: Path, source: Path, network: nn.Module, suffix: str
) -> None:
    out = tmp_path / "new folder" / f"net{suffix}"
    line = run(source, out)
    state = torch.load(out, weights_only=True)
    plain = models.resnet18(num_classes=3)
    plain.load_state_dict(state)
    for name, value in network.state_dict().items():
        assert torch.equal(state[name], value)
        assert state[name].is_contiguous()
        assert state[name].device.type == "cpu"
        assert state[name].dtype in (torch.float32, torch.int64)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(scores(plain.eval(), images), scores(network, images))
    megabytes = out.stat().st_size / 1e6
    assert line == (
        f"{out}: state-dict of resnet18, {megabytes:.1f} MB; takes (N, 3, 40, 40) float32 "
        "normalised as torchvision's, gives (N, 3) logits; read back, they differ by 0.0e+00 of "
        "the largest"
    )
    assert [path.name for path in out.parent.iterdir()] == [out.name]


@pytest.mark.parametrize("blurpool", [False, True])
def test_an_exported_program_takes_batches_of_any_size(tmp_path: Path, blurpool: bool) -> None:
    network = random_network(0, blurpool=blurpool)
    source = checkpoint(tmp_path / "last.pt", network, blurpool=blurpool)
    line = run(source, tmp_path / "net.pt2")
    assert "net.pt2: exported-program of resnet18, 45." in line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.4 gives some, which our own call does not show
        program = torch.export.load(tmp_path / "net.pt2").module()
    for num_images in (1, 2, 5):
        images = torch.randn(num_images, 3, SIZE, SIZE)
        assert torch.allclose(program(images), scores(network, images), atol=1e-5)
    assert "blur" not in line


def test_a_state_dict_of_a_blurred_network_comes_with_a_word(tmp_path: Path) -> None:
    network = random_network(0, blurpool=True)
    source = checkpoint(tmp_path / "last.pt", network, blurpool=True)
    assert run(source, tmp_path / "net.pth").endswith(
        " of the largest; plain torchvision computes something else with these weights: the run "
        "used --blurpool, and it does not blur"
    )


def test_averaged_weights_are_written_unless_refused(
    tmp_path: Path, source: Path, network: nn.Module
) -> None:
    average = random_network(1)
    both = checkpoint(tmp_path / "both.pt", network, average)
    assert "resnet18, averaged weights, " in run(both, tmp_path / "average.pth")
    assert ", averaged weights" not in run(both, tmp_path / "raw.pth", ema=False)
    for name, wanted in (("average.pth", average), ("raw.pth", network)):
        state = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(state["fc.weight"], wanted.state_dict()["fc.weight"])
    with pytest.raises(ValueError, match=r"^--ema: the checkpoint holds no averaged weights"):
        run(source, tmp_path / "none.pth", ema=True)


def test_the_format_may_be_named(tmp_path: Path, source: Path) -> None:
    assert ": state-dict of " in run(source, tmp_path / "net.bin", format="state-dict")
    assert "fc.weight" in torch.load(tmp_path / "net.bin", weights_only=True)


def test_what_cannot_be_written_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="suffix") as refused:
        run(source, tmp_path / "net.h5")
    assert str(refused.value) == (
        f"--out {tmp_path / 'net.h5'}: the suffix must be .pth or .pt (state dict), .pt2 (exported "
        "program) or .onnx, got '.h5'; or name the format with --format"
    )
    with pytest.raises(ValueError, match=r"last\.pt: is the checkpoint itself; give another file$"):
        run(source, source)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(ValueError, match=r"folder\.pt: is a folder; give a file$"):
        run(source, tmp_path / "folder.pt")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, network: nn.Module) -> None:
    with torch.no_grad():
        network.get_parameter("fc.bias")[1] = float("nan")
    broken = checkpoint(tmp_path / "broken.pt", network)
    with pytest.raises(ValueError, match=r"broken\.pt: holds weights that are not finite; use ano"):
        run(broken, tmp_path / "net.pth")
    assert not (tmp_path / "net.pth").exists()


def test_a_file_that_computes_something_else_is_removed_and_the_one_before_stays(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.pth").write_bytes(b"before")
    monkeypatch.setitem(BOUNDS, "state-dict", -1.0)
    message = r"net\.pth: not written: read back, its logits differ .* by 0\.0e\+00 of the largest"
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "net.pth")
    assert (tmp_path / "net.pth").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "net.pth"]


def test_the_difference_is_of_the_largest_logit() -> None:
    def ramp(images: Tensor) -> Tensor:
        return torch.tensor([0.0, -8, 4]).expand(len(images), 3)

    assert largest_difference(ramp, ramp, 8) == 0
    assert largest_difference(ramp, lambda x: ramp(x) + torch.tensor([0, 2.0, -1]), 8) == 0.25
    assert largest_difference(ramp, lambda x: ramp(x)[:, :2], 8) == float("inf")
    assert largest_difference(ramp, lambda x: ramp(x)[:1], 8) == float("inf")
    lacking = largest_difference(ramp, lambda x: ramp(x) * (float("nan") if len(x) == 3 else 1), 8)
    assert math.isnan(lacking)  # though only one of the batches has it
    assert largest_difference(lambda x: 0 * ramp(x), lambda x: 0 * ramp(x), 8) == 0


@pytest.mark.skipif(
    all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")),
    reason="onnx and onnxscript are installed",
)
def test_onnx_without_its_packages_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="ONNX needs") as refused:
        run(source, tmp_path / "net.onnx")
    missing = [name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)]
    assert str(refused.value) == (
        f"--out {tmp_path / 'net.onnx'}: ONNX needs {' and '.join(missing)}: pip install onnx "
        'onnxscript, or pip install "shardlane[onnx]"'
    )


@pytest.mark.slow
@pytest.mark.parametrize("blurpool", [False, True])
def test_onnx_takes_batches_of_any_size(tmp_path: Path, blurpool: bool) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    network = random_network(0, blurpool=blurpool)
    source = checkpoint(tmp_path / "last.pt", network, blurpool=blurpool)
    if TorchVersion(torch.__version__) < OLDEST_FOR_ONNX:
        with pytest.raises(ValueError, match=r"net\.onnx: ONNX needs torch 2\.7 or newer, this is"):
            run(source, tmp_path / "net.onnx")
        return
    assert "net.onnx: onnx of resnet18, 44." in run(source, tmp_path / "net.onnx")
    model = onnx.load(str(tmp_path / "net.onnx"))
    sides = [
        [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]
        for value in (model.graph.input[0], model.graph.output[0])
    ]
    assert sides[0][1:] == [3, SIZE, SIZE]
    assert sides[1][1:] == [3]
    assert sides[0][0] == sides[1][0]
    assert isinstance(sides[0][0], str)  # a named size, so any
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    images = torch.randn(5, 3, SIZE, SIZE)
    found = torch.from_numpy(evaluator.run(["logits"], {"images": images.numpy()})[0])
    assert torch.allclose(found, scores(network, images), atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "net.onnx"]
