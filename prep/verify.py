"""Check a packed set against its index: hashes, lengths, labels, and that every image decodes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from prep.execute import Show, Tick, open_pool
from prep.files import shown
from prep.index import SAMPLES_FILE, SetIndex
from prep.shards import ShardError, ShardInfo, read_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCheck:
    """All that a worker needs to check one shard."""

    path: Path
    info: ShardInfo
    rows: NDArray[np.void]


def verify(index: SetIndex, num_workers: int, show: Show) -> list[str]:
    """Check every shard of a set.

    Returns:
        A line for each thing that is wrong, in the order of the index; empty if all is well.
    """
    problems = list(_table_problems(index))
    checks = [
        ShardCheck(
            path=index.shard_path(split, shard_index),
            info=info,
            rows=np.array(entry.samples[entry.samples["shard"] == shard_index]),
        )
        for split, entry in index.splits.items()
        for shard_index, info in enumerate(entry.shards)
    ]
    with open_pool(min(num_workers, len(checks))) as pool:
        found = dict(pool.run(check_shard, checks, show))
    return problems + [found[check.path] for check in checks if found[check.path]]


def _table_problems(index: SetIndex) -> Iterator[str]:
    for split, entry in index.splits.items():
        path = index.root / split / SAMPLES_FILE
        if hashlib.sha256(path.read_bytes()).hexdigest() != entry.samples_sha256:
            yield f"{shown(path)}: its bytes changed since packing"


def check_shard(check: ShardCheck, tick: Tick) -> tuple[Path, str]:
    """Check one shard; gives its path and what is wrong, or an empty text. Runs in a worker."""
    try:
        _require_hash(check, tick)
        _require_samples(check, tick)
    except ShardError as error:
        return check.path, str(error)
    except OSError as error:
        return check.path, f"{shown(check.path)}: cannot be read: {error.strerror or error}"
    return check.path, ""


def _require_hash(check: ShardCheck, tick: Tick) -> None:
    """Compare length and sha256."""
    hasher = hashlib.sha256()
    with check.path.open("rb") as file:
        while chunk := file.read(1 << 22):
            hasher.update(chunk)
    num_bytes = check.path.stat().st_size
    place = shown(check.path)
    if num_bytes != check.info.num_bytes:
        raise ShardError(
            f"{place}: {num_bytes} bytes, the index says {check.info.num_bytes}"
            + _first_damage(check, tick)
        )
    if hasher.hexdigest() != check.info.sha256:
        raise ShardError(f"{place}: its bytes changed since packing{_first_damage(check, tick)}")


def _first_damage(check: ShardCheck, tick: Tick) -> str:
    """Say which sample shows the damage first, where one does."""
    try:
        _require_samples(check, tick)
    except (ShardError, OSError) as error:
        return f" ({str(error).removeprefix(shown(check.path)).lstrip(': ')})"
    return " (every image still decodes)"


def _require_samples(check: ShardCheck, tick: Tick) -> None:
    """Walk the archive, compare it with the table and decode every image."""
    samples = list(read_samples(check.path))
    found = np.array([(0, s.offset, s.length, s.label) for s in samples], dtype=check.rows.dtype)
    columns = ["offset", "length", "label"]
    if not np.array_equal(found[columns], check.rows[columns]):
        raise ShardError(
            f"{shown(check.path)}: its {len(samples)} samples are not the {len(check.rows)} "
            "that the table lists"
        )
    with check.path.open("rb") as file:
        for sample in samples:
            file.seek(sample.offset)
            try:
                simplejpeg.decode_jpeg(file.read(sample.length), strict=True)
            except (ValueError, KeyError) as error:
                raise ShardError(
                    f"{shown(check.path)}: key {sample.key!r} is damaged: {error}"
                ) from error
            tick(sample.length)
