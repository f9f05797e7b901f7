"""Write a trained network for other programs, read the file back and compare."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from prep.files import local_path, put_in_place, shown, write_whole
from train.checkpoint import Checkpoint, load_checkpoint, takes_average, trained_network
from train.options import ExportConfig

Kind = Literal["state-dict", "exported-program", "onnx"]
Say = Callable[[str], None]
Network = Callable[[Tensor], Tensor]

KINDS: Final[dict[str, Kind]] = {
    ".pth": "state-dict",
    ".pt": "state-dict",
    ".pt2": "exported-program",
    ".onnx": "onnx",
}
BOUNDS: Final[dict[Kind, float]] = {"state-dict": 1e-5, "exported-program": 1e-5, "onnx": 1e-4}
"""Largest difference of logits, relative to the largest logit. Measured are 0 for the first two
and below 3e-6 for ONNX, whose runtimes add up in another order; weights must be equal."""
CHECKED_BATCHES: Final = (1, 3)
"""Images in each comparison; the example that is traced has two, so that no size is built in."""
OLDEST_FOR_ONNX: Final = "2.7"
"""With older ones the exporter is not there (2.4), or fails with today's onnxscript (2.5, 2.6)."""
OLD_WARNINGS: Final = (  # of torch 2.4 to 2.9, about its own code; 2.14 gives none
    (FutureWarning, "You are using `torch.load` with `weights_only=False`"),
    (UserWarning, "Attempted to insert a get_attr Node"),
    (UserWarning, "Node .* does not reference an nn.Module"),
    (UserWarning, "Additional .* suppressed about get_attr"),
    (UserWarning, "The given buffer is not writable"),
)


def export(config: ExportConfig, say: Say) -> Path:
    """Write a checkpoint's network; the file appears only once it was read back and agrees.

    Whatever the format, the input is `(N, 3, S, S)` float32, normalised as for torchvision's
    weights, S being the run's `val_crop_size`, and the output `(N, C)` float32 logits.

    Args:
        config: Options.
        say: Takes the result's line.

    Returns:
        The file.

    Raises:
        ValueError: The suffix is unknown, a package is missing, the checkpoint cannot be used, or
            what was read back computes something else.
    """
    kind = _kind(config)
    if kind == "onnx":
        _refuse_without_onnx(config.out)
    out = _place(config)
    checkpoint = load_checkpoint(local_path(config.checkpoint))
    network = trained_network(checkpoint, ema=config.ema)
    if not all(bool(value.isfinite().all()) for value in network.state_dict().values()):
        raise ValueError(f"{config.checkpoint}: holds weights that are not finite; use another")
    out.parent.mkdir(parents=True, exist_ok=True)
    difference = _write_checked(config.out, out, kind, network, checkpoint.config["val_crop_size"])
    say(_format(config, kind, out.stat().st_size, difference, checkpoint))
    return out


def largest_difference(network: Network, other: Network, size: int) -> float:
    """Compare logits on noise, at batches of several sizes.

    Returns:
        The largest absolute difference over the largest absolute logit of `network`; infinite
        where shapes differ, NaN where logits are.
    """
    random = torch.Generator().manual_seed(0)
    ratios = []
    for num_images in CHECKED_BATCHES:
        images = torch.randn(num_images, 3, size, size, generator=random)
        with torch.no_grad():
            wanted, given = network(images), other(images)
        if wanted.shape != given.shape:
            return float("inf")
        largest = wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)
        ratios.append((wanted - given).abs().max() / largest)
    return torch.stack(ratios).max().item()  # of torch, which hands NaN on


def _kind(config: ExportConfig) -> Kind:
    if config.format != "auto":
        return config.format
    suffix = config.out.suffix.lower()
    if suffix not in KINDS:
        raise ValueError(
            f"--out {config.out}: the suffix must be .pth or .pt (state dict), .pt2 (exported "
            f"program) or .onnx, got {suffix!r}; or name the format with --format"
        )
    return KINDS[suffix]


def _place(config: ExportConfig) -> Path:
    """Give the path to write, which must be neither a folder nor the checkpoint."""
    out, origin = local_path(config.out), local_path(config.checkpoint)
    if out.is_dir():
        raise ValueError(f"--out {config.out}: is a folder; give a file")
    if out.exists() and origin.exists() and out.samefile(origin):
        raise ValueError(f"--out {config.out}: is the checkpoint itself; give another file")
    return out


def _refuse_without_onnx(out: Path) -> None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--out {out}: ONNX needs {' and '.join(missing)}: pip install onnx onnxscript, or "
            'pip install "shardlane[onnx]"'
        )
    if TorchVersion(torch.__version__) < OLDEST_FOR_ONNX:
        raise ValueError(
            f"--out {out}: ONNX needs torch {OLDEST_FOR_ONNX} or newer, this is "
            f"{torch.__version__}; update it, or write a .pt2"
        )


def _write_checked(typed: Path, out: Path, kind: Kind, network: nn.Module, size: int) -> float:
    """Write a sibling, compare what it holds, and put it in place; gives the difference."""
    unchecked = out.with_name(out.name + ".unchecked")
    try:
        with warnings.catch_warnings():
            for category, message in OLD_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            data = _WRITERS[kind](network, size)
            write_whole(unchecked, lambda file: file.write(data))
            difference = largest_difference(network, _READERS[kind](unchecked, network), size)
        if not difference <= BOUNDS[kind]:
            raise ValueError(
                f"{typed}: not written: read back, its logits differ from the network's by "
                f"{difference:.1e} of the largest, allowed are {BOUNDS[kind]:.0e}; export to "
                "another format, and please report it"
            )
        put_in_place(unchecked, out)
    finally:
        unchecked.unlink(missing_ok=True)
    return difference


def _as_state_dict(network: nn.Module, _size: int) -> bytes:
    state = {name: value.detach().contiguous() for name, value in network.state_dict().items()}
    buffer = io.BytesIO()  # so that a full disk is no error of torch's
    torch.save(state, buffer)
    return buffer.getvalue()


def _as_program(network: nn.Module, size: int) -> bytes:
    program = torch.export.export(
        network, (_example(size),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _as_onnx(network: nn.Module, size: int) -> bytes:
    """Give one file with the weights in it."""
    try:
        program = torch.onnx.export(
            network,
            (_example(size),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
        data: bytes = cast("Any", program).model_proto.SerializeToString()
    except Exception as error:  # of many classes, where versions do not go together
        versions = (f"{name} {metadata.version(name)}" for name in ("torch", "onnx", "onnxscript"))
        raise ValueError(
            f"{', '.join(versions)} do not convert this network together ({type(error).__name__}): "
            "update them, torch first, or write a .pt2"
        ) from error
    return data


def _read_state_dict(path: Path, network: nn.Module) -> Network:
    """Give a copy of the network with the file's weights, which must be equal."""
    state = torch.load(path, weights_only=True)
    twin = deepcopy(network)
    twin.load_state_dict(state)
    if not all(torch.equal(state[name], value) for name, value in network.state_dict().items()):
        raise ValueError(
            f"{shown(path)}: read back, weights differ; try another disk, or report it"
        )
    return twin


def _read_program(path: Path, _network: nn.Module) -> Network:
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _read_onnx(path: Path, _network: nn.Module) -> Network:
    """Check the file and give what runs it: onnxruntime, or else onnx's own evaluator."""
    data = path.read_bytes()
    model = importlib.import_module("onnx").load_from_string(data)
    importlib.import_module("onnx.checker").check_model(model, full_check=True)
    session: Any
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:  # not installed, or its library does not load
        session = importlib.import_module("onnx.reference").ReferenceEvaluator(model)
    else:
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


_WRITERS: Final[dict[Kind, Callable[[nn.Module, int], bytes]]] = {
    "state-dict": _as_state_dict,
    "exported-program": _as_program,
    "onnx": _as_onnx,
}
_READERS: Final[dict[Kind, Callable[[Path, nn.Module], Network]]] = {
    "state-dict": _read_state_dict,
    "exported-program": _read_program,
    "onnx": _read_onnx,
}


def _example(size: int) -> Tensor:
    return torch.zeros(2, 3, size, size)


def _format(
    config: ExportConfig, kind: Kind, num_bytes: int, difference: float, checkpoint: Checkpoint
) -> str:
    run = checkpoint.config
    size = run["val_crop_size"]
    averaged = takes_average(checkpoint, config.ema)
    line = (
        f"{config.out}: {kind} of {run['model']}{', averaged weights' if averaged else ''}, "
        f"{num_bytes / 1e6:.1f} MB; takes (N, 3, {size}, {size}) float32 normalised as "
        f"torchvision's, gives (N, {len(checkpoint.wnids)}) logits; read back, they differ by "
        f"{difference:.1e} of the largest"
    )
    if kind == "state-dict" and run["blurpool"]:
        line += "; plain torchvision computes something else with these weights: the run used "
        line += "--blurpool, and it does not blur"
    return line
