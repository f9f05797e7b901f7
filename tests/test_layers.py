from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import PROJECT, environment

FORMAT = {"files", "labels", "shards", "index", "jpeg", "jpeg_kernels", "markers"}
"""What others may build on: they import only each other."""
LIGHT = sorted({path.stem for path in (PROJECT / "prep").glob("*.py")} - {"__init__"})


def loaded_after(code: str) -> set[str]:
    """Give the top-level packages that a fresh interpreter has loaded after some code."""
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys; print(*{{m.split('.')[0] for m in sys.modules}})",
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(ended.stdout.split())


def test_prep_imports_without_torch_and_without_train() -> None:
    modules = ", ".join(f"prep.{name}" for name in LIGHT)
    assert not {"torch", "torchvision", "train"} & loaded_after(f"import {modules}")


def test_the_probe_is_able_to_fail() -> None:
    assert {"torch", "train"} <= loaded_after(
        "import sys; sys.modules['torch'] = sys; import train"
    )


def imports_of(path: Path) -> set[str]:
    """Give the modules of ours that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module in ("prep", "train"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("prep", "train", "torch")}


@pytest.mark.parametrize("name", LIGHT)
def test_arrows_go_one_way_in_prep(name: str) -> None:
    found = imports_of(PROJECT / "prep" / f"{name}.py")
    assert not any(module.split(".")[0] in ("train", "torch") for module in found)
    assert "prep.__main__" not in found
    if name in FORMAT:
        assert found <= {f"prep.{other}" for other in FORMAT}, found


def test_no_file_of_prep_is_reached_from_itself() -> None:
    arrows = {f"prep.{name}": imports_of(PROJECT / "prep" / f"{name}.py") for name in LIGHT}
    settled: set[str] = {"prep"}
    while ready := {name for name, uses in arrows.items() if uses <= settled} - settled:
        settled |= ready
    assert settled == {"prep", *arrows}


@pytest.mark.parametrize(
    "path", sorted((PROJECT / "train").glob("*.py")), ids=lambda path: path.stem
)
def test_train_never_uses_the_command_line_of_prep(path: Path) -> None:
    assert "prep.__main__" not in imports_of(path)


def test_the_package_is_pure_python_without_a_compiler() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"] == {"packages": ["prep", "train"]}
    assert project["build-system"]["requires"] == ["setuptools>=77"]
    assert not (PROJECT / "setup.py").exists()
    suffixes = {path.suffix for name in ("prep", "train") for path in (PROJECT / name).glob("*")}
    assert not suffixes & {".c", ".cpp", ".pyx", ".so", ".pyd"}
    assert {"test", "cluster", "plot"} <= project["project"]["optional-dependencies"].keys()
