"""Fixtures that several test modules use; plain functions stand in `helpers.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import make_source, pack_folder
from prep.pack import compile_kernels


def pytest_sessionstart() -> None:
    """Compile the kernels before xdist starts its workers, which then read them from the cache."""
    compile_kernels()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Give a source of 4 classes with 4 train and 2 val images each."""
    return make_source(tmp_path / "source")


@pytest.fixture
def shards(tmp_path: Path, source: Path) -> Path:
    """Give the packed set of `source`."""
    return pack_folder(source, tmp_path / "shards")
