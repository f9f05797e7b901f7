"""`index.json` and `samples.npy`: load, check, save.

The index is written last: where it stands, the set is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prep.files import local_path, shown, write_text_whole, write_whole
from prep.labels import ClassTable
from prep.shards import SAMPLE_DTYPE, ShardError, ShardInfo

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
SAMPLES_FILE = "samples.npy"
TIMM_FILE = "_info.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitIndex:
    """The shards and the sample table of one split."""

    shards: tuple[ShardInfo, ...]
    samples: NDArray[np.void]
    """`(num_samples,)` of `SAMPLE_DTYPE`, memory-mapped, in shard order, then file order."""
    samples_sha256: str

    @property
    def num_samples(self) -> int:
        """Count the samples of the split."""
        return len(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetIndex:
    """A whole packed set."""

    root: Path
    classes: ClassTable
    splits: Mapping[str, SplitIndex]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What `prep shard` was told."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The source's layout and what was noted about it."""
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Per split: images kept, repaired, rejected."""

    def split(self, name: str) -> SplitIndex:
        """Give one split.

        Raises:
            ShardError: The set has none of that name.
        """
        if name not in self.splits:
            raise ShardError(
                f"{shown(self.root)} has no split {name!r}, only {', '.join(self.splits)}"
            )
        return self.splits[name]

    def shard_path(self, split: str, shard_index: int) -> Path:
        """Give the path of a shard by its place in the split's index."""
        return self.root / split / self.splits[split].shards[shard_index].name


def save_table(path: Path, parts: Iterable[NDArray[np.void]]) -> tuple[NDArray[np.void], str]:
    """Write `samples.npy` from the rows of each shard.

    Returns:
        The table and the sha256 of the file.
    """
    numbered = []
    for shard_index, part in enumerate(parts):
        rows = part.copy()
        rows["shard"] = shard_index
        numbered.append(rows)
    table = np.concatenate(numbered)
    write_whole(path, lambda file: np.save(file, table, allow_pickle=False))
    return table, hashlib.sha256(path.read_bytes()).hexdigest()


def save_index(index: SetIndex) -> None:
    """Write timm's `_info.json`, then `index.json`: the act that makes the set whole."""
    write_text_whole(index.root / TIMM_FILE, _json(_timm_info(index)))
    num_classes = len(index.classes.wnids)
    document = {
        "format": FORMAT_VERSION,
        "classes": [
            {"wnid": wnid, "name": index.classes.names.get(wnid, "")}
            for wnid in index.classes.wnids
        ],
        "splits": {
            name: {
                "num_samples": split.num_samples,
                "num_bytes": sum(shard.num_bytes for shard in split.shards),
                "samples_sha256": split.samples_sha256,
                "class_counts": np.bincount(split.samples["label"], minlength=num_classes).tolist(),
                "shards": [asdict(shard) for shard in split.shards],
            }
            for name, split in index.splits.items()
        },
        "counts": index.counts,
        "settings": index.settings,
        "source": index.source,
    }
    write_text_whole(index.root / INDEX_FILE, _json(document))


def _timm_info(index: SetIndex) -> dict[str, Any]:
    """Describe the splits as timm's webdataset reader wants it."""
    return {
        "splits": {
            name: {
                "name": name,
                "num_samples": split.num_samples,
                "filenames": [f"{name}/{shard.name}" for shard in split.shards],
                "shard_lengths": [shard.num_samples for shard in split.shards],
            }
            for name, split in index.splits.items()
        }
    }


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load_index(shards: str | Path) -> SetIndex:
    """Load and check the index of a packed set.

    The sample tables stay on disk until touched.

    Raises:
        ShardError: There is no index (packing did not finish), its format is another one, or table
            and shard list contradict each other.
    """
    root = local_path(shards)
    path = root / INDEX_FILE
    if not path.is_file():
        raise ShardError(
            f"{shown(root)} has no {INDEX_FILE}, so it is not a whole set: run `prep shard` "
            "(again, if it was stopped; it continues)"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardError(f"{shown(path)} is damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        raise ShardError(f"{shown(path)} is not of format {FORMAT_VERSION}: pack the set again")
    try:
        return _set_index(root, document)
    except (KeyError, TypeError, AttributeError) as error:
        raise ShardError(f"{shown(path)} is damaged: {error!r}") from error


def _set_index(root: Path, document: Mapping[str, Any]) -> SetIndex:
    classes = ClassTable(
        wnids=tuple(entry["wnid"] for entry in document["classes"]),
        names={entry["wnid"]: entry["name"] for entry in document["classes"] if entry["name"]},
    )
    splits = {
        name: _split_index(root / name, entry, len(classes.wnids))
        for name, entry in document["splits"].items()
    }
    return SetIndex(
        root=root,
        classes=classes,
        splits=splits,
        settings=document["settings"],
        source=document["source"],
        counts=document["counts"],
    )


def _split_index(folder: Path, entry: Mapping[str, Any], num_classes: int) -> SplitIndex:
    shards = tuple(ShardInfo(**shard) for shard in entry["shards"])
    path = folder / SAMPLES_FILE
    try:
        # as text: of a Path numpy asks the system for the final name, which fails on long ones
        samples = np.load(str(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(f"{shown(path)} is missing or damaged: {error}") from error
    if samples.dtype != SAMPLE_DTYPE or samples.ndim != 1:
        raise ShardError(f"{shown(path)} is not a sample table of this format")
    _check_table(path, samples, shards, num_classes)
    return SplitIndex(shards=shards, samples=samples, samples_sha256=entry["samples_sha256"])


def _check_table(
    path: Path, samples: NDArray[np.void], shards: tuple[ShardInfo, ...], num_classes: int
) -> None:
    """Check that each shard has its number of rows and that no row points outside."""
    counts = [shard.num_samples for shard in shards]
    if len(samples) != sum(counts):
        raise ShardError(f"{shown(path)} has {len(samples)} rows, the index {sum(counts)} samples")
    starts = np.concatenate([[0], np.cumsum(counts)])
    for shard_index, (shard, start, stop) in enumerate(
        zip(shards, starts[:-1], starts[1:], strict=True)
    ):
        rows = samples[start:stop]
        ends = rows["offset"] + rows["length"]
        if (
            (rows["shard"] != shard_index).any()
            or (rows["label"] < 0).any()
            or (rows["label"] >= num_classes).any()
            or (rows["offset"] > shard.num_bytes).any()
            or (ends > shard.num_bytes).any()
        ):
            raise ShardError(f"{shown(path)}: rows {start}..{stop - 1} do not fit {shard.name}")
