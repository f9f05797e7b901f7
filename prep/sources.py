"""Where images and labels come from: each layout gives one common list of `SourceImage`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prep.files import local_path, native_path, portable_name, shown
from prep.labels import (
    CLASS_TABLE_FILES,
    VAL_LABEL_FILE,
    ClassTable,
    labels_for,
    read_class_names,
    read_val_labels,
)

SPLITS = ("train", "val")
IMAGE_SUFFIXES = frozenset(
    (".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
)
STRAY_NAMES = frozenset(("thumbs.db", "desktop.ini", "__macosx", "lost+found", "$recycle.bin"))

Counter = Callable[[int], None]
"""Is told, now and then, how many files were listed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceImage:
    """One image file of a source and its label."""

    path: str
    """Relative to the source's folder, with `/`."""
    label: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A listed source: its classes and, per split, its images in sorted order."""

    root: Path
    layout: str
    classes: ClassTable
    splits: dict[str, list[SourceImage]]
    notes: tuple[str, ...]
    """What a user should know: a split that is missing, files that were passed over."""


@dataclass(slots=True)
class _Listing:
    """The walk's running totals."""

    count: Counter
    num_files: int = 0
    num_passed_over: int = 0
    passed_over_example: str = ""


def open_source(src: Path, val_labels: Path | None = None, count: Counter | None = None) -> Source:
    """List a source and label every image.

    Args:
        src: A folder that holds `train`, `val` or both. `train` has one folder a class; `val` has
            the same class folders, or lies flat beside a label file.
        val_labels: Label file for a flat `val`; default `val_label.txt` in `src` or in `val`.
        count: Called with the number of files listed so far.

    Raises:
        ValueError: The layout is not known, classes differ between the splits, or labels are
            missing; nothing is guessed.
    """
    root = local_path(src)
    present = [split for split in SPLITS if (root / split).is_dir()]
    if not present:
        raise ValueError(_not_a_source(root))
    listing = _Listing(count or (lambda _: None))
    names, table_file = _class_names(root)
    classes = _class_table(root, present, names, table_file)
    splits: dict[str, list[SourceImage]] = {}
    layouts = []
    for split in present:
        layout, images = _open_split(root, split, classes, val_labels, listing)
        splits[split] = images
        layouts.append(f"{split}: {layout}")
    if not any(splits.values()):
        raise ValueError(f"{shown(root)} holds no image under {' or '.join(present)}")
    return Source(
        root=root,
        layout=", ".join(layouts),
        classes=classes,
        splits={split: images for split, images in splits.items() if images},
        notes=tuple(_notes(splits, classes, listing)),
    )


def _open_split(
    root: Path, split: str, classes: ClassTable, val_labels: Path | None, listing: _Listing
) -> tuple[str, list[SourceImage]]:
    if split == "train":
        return "class folders", _in_class_folders(root, split, classes, listing)
    folders = class_folders(root / split)
    if folders and val_labels is None:
        require_same_classes(shown(root / split), folders, classes.wnids)
        return "class folders", _in_class_folders(root, split, classes, listing)
    label_file = _val_label_file(root, val_labels)
    return f"flat, labels from {portable_name(label_file.name)}", _flat(
        root, split, classes, label_file, listing
    )


def _in_class_folders(
    root: Path, split: str, classes: ClassTable, listing: _Listing
) -> list[SourceImage]:
    """List `split/<wnid>/**`; a class without a folder or without files keeps its label."""
    images = []
    for label, wnid in enumerate(classes.wnids):
        folder = root / split / native_path(wnid)
        if folder.is_dir():
            images += [
                SourceImage(path=path, label=label, num_bytes=num_bytes)
                for path, num_bytes in _walk(folder, f"{split}/{wnid}", listing)
            ]
    return images


def _flat(
    root: Path, split: str, classes: ClassTable, label_file: Path, listing: _Listing
) -> list[SourceImage]:
    """List `split/**` and label each file by its name."""
    found = list(_walk(root / split, split, listing))
    names = [PurePosixPath(path).name for path, _ in found]
    labels = labels_for(names, read_val_labels(label_file, classes), shown(label_file))
    return [
        SourceImage(path=path, label=labels[name], num_bytes=num_bytes)
        for name, (path, num_bytes) in zip(names, found, strict=True)
    ]


def _walk(folder: Path, relative: str, listing: _Listing) -> Iterator[tuple[str, int]]:
    """Give the path and size of each image below a folder, sorted, hidden things left out."""
    with os.scandir(folder) as entries:
        ordered = sorted((portable_name(entry.name), entry) for entry in entries)
    for name, entry in ordered:
        path = f"{relative}/{name}"
        if is_stray(name):
            continue
        if entry.is_dir():
            yield from _walk(folder / entry.name, path, listing)
        elif PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES:
            listing.num_files += 1
            if listing.num_files % 1000 == 0:
                listing.count(listing.num_files)
            yield path, _num_bytes(entry)
        elif name != VAL_LABEL_FILE:
            listing.num_passed_over += 1
            listing.passed_over_example = path


def _num_bytes(entry: os.DirEntry[str]) -> int:
    """Give the size of a file; 0 for one that is gone or a dead link, which packing will report."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def is_stray(name: str) -> bool:
    """Tell whether a file or folder was left by a system or an editor, not by the data set."""
    return name.startswith(".") or name.lower() in STRAY_NAMES


def class_folders(folder: Path) -> tuple[str, ...]:
    """Give the names of the class folders in a split's folder, sorted."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not is_stray(entry.name)]
    return tuple(sorted(map(portable_name, names)))


def require_same_classes(place: str, found: tuple[str, ...], wnids: tuple[str, ...]) -> None:
    """Refuse class folders that differ from the table: labels would be shifted silently.

    Raises:
        ValueError: Names the first folder that is missing or surplus.
    """
    missing = sorted(set(wnids) - set(found))
    surplus = sorted(set(found) - set(wnids))
    if missing or surplus:
        raise ValueError(
            f"{place} has {len(found)} class folders, train has {len(wnids)} "
            f"(missing {missing[:3]}, surplus {surplus[:3]}): they must be the same, "
            "else labels would be shifted; an empty folder is enough for a class without images"
        )


def _class_names(root: Path) -> tuple[dict[str, str], Path | None]:
    """Read the readable names from a class table file, where one lies in the source."""
    for name in CLASS_TABLE_FILES:
        if (root / name).is_file():
            return read_class_names(root / name), root / name
    return {}, None


def _class_table(
    root: Path, present: list[str], names: dict[str, str], table_file: Path | None
) -> ClassTable:
    """Take the classes from train's folders, else from a class table, else from val's folders."""
    if "train" in present:
        wnids = class_folders(root / "train")
        if not wnids:
            raise ValueError(f"{shown(root / 'train')} holds no class folders")
    elif table_file is not None:
        wnids = tuple(sorted(names))
    else:
        wnids = class_folders(root / "val")
        if not wnids:
            raise ValueError(
                f"{shown(root)} has no train folder and val is flat, so the classes are not known: "
                f"add {CLASS_TABLE_FILES[0]} with one wnid a line"
            )
    return ClassTable(wnids=wnids, names={w: names[w] for w in wnids if names.get(w)})


def _val_label_file(root: Path, val_labels: Path | None) -> Path:
    """Find the label file of a flat `val`."""
    if val_labels is not None:
        path = local_path(val_labels)
        if not path.is_file():
            raise ValueError(f"--val-labels '{shown(path)}' is not a file")
        return path
    for path in (root / VAL_LABEL_FILE, root / "val" / VAL_LABEL_FILE):
        if path.is_file():
            return path
    raise ValueError(
        f"{shown(root / 'val')} is flat and has no labels: put {VAL_LABEL_FILE} beside it "
        "(`file-name class-index` a line) or give --val-labels FILE"
    )


def _not_a_source(root: Path) -> str:
    if not root.is_dir():
        return f"--src '{shown(root)}' is not a folder"
    inside = [name for name in class_folders(root) if name[:1] == "n" and name[1:].isdecimal()]
    hint = f"; it holds classes such as {inside[0]}: give its parent folder" if inside else ""
    return f"--src '{shown(root)}' has neither a train nor a val folder{hint}"


def _notes(
    splits: dict[str, list[SourceImage]], classes: ClassTable, listing: _Listing
) -> Iterator[str]:
    for split in SPLITS:
        if not splits.get(split):
            yield f"no {split} images in this source: the set will have none"
    for split, images in splits.items():
        num_empty = len(classes.wnids) - len({image.label for image in images})
        if images and num_empty:
            yield f"{split}: {num_empty} of {len(classes.wnids)} classes have no image"
    if listing.num_passed_over:
        yield (
            f"{listing.num_passed_over} files passed over, since their names are not image names, "
            f"for example {listing.passed_over_example}"
        )
