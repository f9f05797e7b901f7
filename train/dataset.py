"""`ShardDataset`: samples of a packed split by number, in place of torchvision's ImageFolder."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from prep.files import local_path, shown
from prep.index import load_index
from prep.shards import ShardError, member_name

logger = logging.getLogger(__name__)

MAX_STEPS_OVER = 10
"""So many damaged samples in a row end the run."""


class ShardDataset(Dataset[tuple[Any, int]]):
    """Gives `(image, label)` by sample number, for any `DataLoader`, sampler and transform.

    It can be pickled before and after use, holds no open file, and reads one sample with one seek.
    A sample that no longer decodes is named in the log and the next one is given in its place.

    Args:
        shards: Folder that `prep shard` wrote.
        split: `train` or `val`.
        transform: Applied to the RGB `PIL.Image`; must be a module-level callable, or an object of
            such, where worker processes are used.

    Raises:
        ShardError: The set is not whole.
    """

    def __init__(
        self, shards: str | Path, split: str, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self._root = local_path(shards)
        self._split = split
        self.transform = transform
        self._open()

    def _open(self) -> None:
        index = load_index(self._root)
        entry = index.split(self._split)
        self._samples = entry.samples
        self._paths = [index.shard_path(self._split, number) for number in range(len(entry.shards))]
        self.classes = list(index.classes.wnids)
        self.class_to_idx = index.classes.label_of()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the table: the other process maps it itself."""
        return {"_root": self._root, "_split": self._split, "transform": self.transform}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def targets(self) -> list[int]:
        """Give all labels, in sample order."""
        labels: list[int] = self._samples["label"].tolist()
        return labels

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        """Give one sample.

        Raises:
            IndexError: There is no such sample.
            ShardError: It and its followers are damaged.
        """
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample must be in 0..{len(self) - 1}, got {sample}")
        for step in range(MAX_STEPS_OVER):
            number = (sample + step) % len(self)
            try:
                image = self._image(number)
            except OSError as error:
                logger.warning("stepped over a damaged sample: %s: %s", self._name(number), error)
                continue
            label = int(self._samples["label"][number])
            return (image if self.transform is None else self.transform(image)), label
        raise ShardError(
            f"{shown(self._root)}: {MAX_STEPS_OVER} damaged samples in a row from {sample} on: "
            "run `prep verify --shards`"
        )

    def _image(self, number: int) -> Image.Image:
        row = self._samples[number]
        with self._paths[int(row["shard"])].open("rb") as file:
            file.seek(int(row["offset"]))
            data = file.read(int(row["length"]))
        if len(data) != row["length"]:
            raise OSError("the shard ends before it")
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            return image.convert("RGB")

    def _name(self, number: int) -> str:
        row = self._samples[number]
        path = self._paths[int(row["shard"])]
        return f"{self._split}/{path.name}: {member_name(path, int(row['offset']))}"
