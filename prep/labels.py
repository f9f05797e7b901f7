"""The class table (wnid -> label) and the validation labels, from each source that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prep.files import shown

CLASS_TABLE_FILES = ("classes.txt", "LOC_synset_mapping.txt", "synset_words.txt")
VAL_LABEL_FILE = "val_label.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTable:
    """The classes of a set; a label is a place in `wnids`."""

    wnids: tuple[str, ...]
    """Class ids, sorted; folder names for classes that are not ImageNet's."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Readable names by wnid, where known."""

    def __post_init__(self) -> None:
        """Refuse a table whose order is not the sorted one: labels would be shifted silently."""
        if not self.wnids:
            raise ValueError("the class table is empty: no class folders were found")
        if list(self.wnids) != sorted(set(self.wnids)):
            raise ValueError("the class table is not sorted or names a class twice")

    def readable(self) -> tuple[str, ...]:
        """Give a name for each label: the readable one where known, else the wnid."""
        return tuple(self.names.get(wnid) or wnid for wnid in self.wnids)

    def label_of(self) -> dict[str, int]:
        """Give the label of each wnid."""
        return {wnid: label for label, wnid in enumerate(self.wnids)}


def read_class_names(path: Path) -> dict[str, str]:
    """Read `wnid` or `wnid name` a line; the name is all that follows the first blank."""
    names: dict[str, str] = {}
    for number, line in _lines(path):
        wnid, _, name = line.replace("\t", " ").partition(" ")
        if wnid in names:
            raise ValueError(f"{shown(path)}:{number}: class {wnid!r} stands here twice")
        names[wnid] = name.strip()
    return names


def read_val_labels(path: Path, table: ClassTable) -> dict[str, int]:
    """Read validation labels, `name index` or `name wnid` a line.

    Args:
        path: The file; a leading folder in a name (`val/x.JPEG`) is dropped.
        table: Gives the allowed indices and wnids.

    Returns:
        Label by file name.

    Raises:
        ValueError: A line has no label, a label outside the table, or a name with two labels.
    """
    label_of = table.label_of()
    labels: dict[str, int] = {}
    for number, line in _lines(path):
        name, label = _parse_line(line, label_of, f"{shown(path)}:{number}")
        if labels.setdefault(name, label) != label:
            raise ValueError(
                f"{shown(path)}:{number}: {name!r} has label {labels[name]} above and {label} here"
            )
    return labels


def _parse_line(line: str, label_of: Mapping[str, int], place: str) -> tuple[str, int]:
    parts = line.rsplit(maxsplit=1)
    if len(parts) != 2:
        raise ValueError(f"{place}: {line!r} is not `name index` or `name wnid`")
    name, value = PurePosixPath(parts[0].replace("\\", "/")).name, parts[1]
    if value in label_of:
        if value.isdecimal() and int(value) != label_of[value]:
            raise ValueError(
                f"{place}: {value!r} is a class folder with label {label_of[value]}, and an index "
                "too: rename the class folders to something that is no number"
            )
        return name, label_of[value]
    if not value.isdecimal():
        raise ValueError(f"{place}: {value!r} is neither an index nor one of the set's wnids")
    if not int(value) < len(label_of):
        raise ValueError(
            f"{place}: label {value} is outside 0..{len(label_of) - 1}; indices count from 0, "
            "in the order of the sorted wnids of train"
        )
    return name, int(value)


def labels_for(names: Iterable[str], labels: Mapping[str, int], place: str) -> dict[str, int]:
    """Give each image its label.

    Raises:
        ValueError: An image has none; the text counts them and names the first.
    """
    names = list(names)
    missing = [name for name in names if name not in labels]
    if missing:
        raise ValueError(
            f"{place} has no label for {len(missing)} of {len(names)} validation images, "
            f"for example {missing[0]!r}: every image needs a line `name index`"
        )
    return {name: labels[name] for name in names}


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    """Give the numbered lines that are not blank; a byte order mark is no part of the first."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown(path)} is not UTF-8 text: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line.strip()
