"""The format on disk: member names, writing one shard, reading one back.

A shard is a plain ustar archive of `<key>.jpg` and `<key>.cls` pairs with fixed times, owners and
modes, so that equal samples give equal bytes and every tar reader takes it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prep.files import put_in_place, shown

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_KEY_BYTES = 90
"""UTF-8 bytes of a key: with its extension it fits the 100 bytes of a plain tar header."""
MAX_LABEL = 2**31 - 1
WRITE_BYTES = 1 << 20
IMAGE_SUFFIXES = ("jpg", "jpeg")
_TAR_ERRORS = (tarfile.TarError, EOFError, OSError, ValueError, OverflowError)
"""What tarfile raises on damage: also ValueError, for sizes and numbers that make no sense."""
_UNSAFE = re.compile(r'[\x00-\x20\x7f\ud800-\udfff\\/:*?"<>|.]')
SAMPLE_DTYPE = np.dtype([("shard", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("label", "<i4")])
"""One row a sample: shard's place in the index, byte offset and length of the JPEG, label."""


class ShardError(ValueError):
    """A shard is not what its index or the format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One finished shard as the index lists it."""

    name: str
    num_samples: int
    num_bytes: int
    sha256: str


def shard_name(shard_index: int) -> str:
    """Give the file name of a shard in its split's folder."""
    return f"{shard_index:06d}.tar"


def keys_for(paths: Sequence[str]) -> list[str]:
    """Give each image of a split a key: its file's stem where that is unique and safe.

    Args:
        paths: Paths in the source, with `/`, no two equal.

    Returns:
        Keys without a dot, at most 90 bytes, unique even where case does not count.
    """
    stems = [_safe(PurePosixPath(path).stem) for path in paths]
    counts: dict[str, int] = {}
    for stem in stems:
        counts[stem.casefold()] = counts.get(stem.casefold(), 0) + 1
    taken = {fold for fold, count in counts.items() if count == 1}
    keys = []
    for path, stem in zip(paths, stems, strict=True):
        keys.append(stem if counts[stem.casefold()] == 1 else _free_key(path, taken))
    return keys


def _free_key(path: str, taken: set[str]) -> str:
    """Give a key made of the whole path, numbered if even that is taken."""
    base = _safe("_".join(PurePosixPath(path).parts[1:]))
    key, number = base, 1
    while key.casefold() in taken:
        number += 1
        key = f"{_head(base)}_{_digest(path)}_{number}"
    taken.add(key.casefold())
    return key


def _safe(text: str) -> str:
    key = _UNSAFE.sub("_", unicodedata.normalize("NFC", text)) or "_"
    if len(key.encode("utf-8")) <= MAX_KEY_BYTES:
        return key
    return f"{_head(key)}_{_digest(text)}"


def _head(key: str) -> str:
    """Give the first characters, at most half of the bytes that a key may have."""
    return key.encode("utf-8")[: MAX_KEY_BYTES // 2].decode("utf-8", "ignore")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class ShardWriter:
    """Writes one shard under a temporary name; it gets its own name when all went well.

    Used in a `with` block: an exception inside leaves no file. A shard without samples leaves no
    file either.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file = _HashingFile(self._temporary)
        self._tar = tarfile.open(  # noqa: SIM115 - closed in __exit__
            fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT, encoding="utf-8"
        )
        self._rows: list[tuple[int, int, int, int]] = []
        self.info: ShardInfo | None = None
        """Set when the shard is in place; None for one without samples."""

    def add(self, key: str, jpeg: bytes, label: int) -> None:
        """Append one sample: `<key>.jpg`, then `<key>.cls` with the label in ASCII digits."""
        if "." in key:
            raise ShardError(f"{shown(self.path)}: key {key!r} holds a dot")
        offset = self._add_member(f"{key}.jpg", jpeg)
        self._add_member(f"{key}.cls", b"%d" % label)
        self._rows.append((0, offset, len(jpeg), label))

    def _add_member(self, name: str, data: bytes) -> int:
        """Write a member; gives the offset of its data."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o444
        offset = self._file.num_bytes + tarfile.BLOCKSIZE
        self._tar.addfile(member, io.BytesIO(data))
        return offset

    def rows(self) -> NDArray[np.void]:
        """Give the samples so far as rows of `SAMPLE_DTYPE`, with shard 0."""
        return np.array(self._rows, dtype=SAMPLE_DTYPE)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._rows:
                self._tar.close()
                self._file.close_synced()
                put_in_place(self._temporary, self.path)
                self.info = ShardInfo(
                    name=self.path.name,
                    num_samples=len(self._rows),
                    num_bytes=self._file.num_bytes,
                    sha256=self._file.hash.hexdigest(),
                )
        finally:
            self._drop()

    def _drop(self) -> None:
        """Close and remove the temporary file; after a rename there is none."""
        try:
            self._file.close()
        finally:  # closing writes what is buffered, which a full disk refuses again
            self._temporary.unlink(missing_ok=True)


class _HashingFile(io.BufferedWriter):
    """A file, only ever appended to, that hashes what passes."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), WRITE_BYTES)
        self.hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: ReadableBuffer) -> int:
        self.hash.update(data)
        self.num_bytes += len(memoryview(data))
        return super().write(data)

    def close_synced(self) -> None:
        self.flush()
        os.fsync(self.fileno())
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample as it lies in a shard."""

    key: str
    label: int
    offset: int
    """Of the JPEG's first byte in the file."""
    length: int


def member_name(path: Path, offset: int) -> str:
    """Name the member whose data begins at `offset`, or say where it lies if its header is gone."""
    try:
        with path.open("rb") as file:
            file.seek(offset - tarfile.BLOCKSIZE)
            header = file.read(tarfile.BLOCKSIZE)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
    except (OSError, tarfile.TarError):
        return f"the member at byte {offset}"


def read_samples(path: Path) -> Iterator[Sample]:
    """Read the samples of a shard, ours or another program's, in file order.

    Raises:
        ShardError: The archive is cut or damaged, a sample lacks its image or its label, its
            members are not adjacent, or a key comes twice. The text names shard and key.
    """
    place = shown(path)
    seen: set[str] = set()
    pending: dict[str, tarfile.TarInfo] = {}
    key = ""
    with path.open("rb") as file, _open_tar(file, place) as tar:
        for member in _members(tar, place):
            stem, _, suffix = _split_name(member.name)
            if pending and stem != key:
                raise ShardError(
                    f"{place}: key {key!r} has {sorted(pending)} only, or not adjacent"
                )
            key = stem
            kind = "jpg" if suffix in IMAGE_SUFFIXES else suffix
            if kind not in ("jpg", "cls"):
                continue
            if kind in pending or key in seen:
                raise ShardError(f"{place}: key {key!r} comes twice")
            pending[kind] = member
            if len(pending) == 2:
                yield _sample(key, pending, tar, place)
                seen.add(key)
                pending = {}
    if pending:
        raise ShardError(f"{place}: key {key!r} has {sorted(pending)} only")
    _require_end(path, place)


def _split_name(name: str) -> tuple[str, str, str]:
    """Split at the first dot of the file name, as webdataset does."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return folder + slash + stem, dot, suffix.lower()


def _open_tar(file: io.BufferedReader, place: str) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:", encoding="utf-8")
    except _TAR_ERRORS as error:
        raise ShardError(f"{place}: not a whole tar archive: {error}") from error


def _members(tar: tarfile.TarFile, place: str) -> Iterator[tarfile.TarInfo]:
    try:
        yield from (member for member in tar if member.isfile())
    except _TAR_ERRORS as error:
        raise ShardError(f"{place}: damaged or cut archive: {error}") from error


def _sample(
    key: str, members: dict[str, tarfile.TarInfo], tar: tarfile.TarFile, place: str
) -> Sample:
    text = _label_text(tar, members["cls"], place)
    if not text.strip().isdigit() or int(text) > MAX_LABEL:
        raise ShardError(f"{place}: key {key!r} has the label {text!r}, not a number")
    image = members["jpg"]
    return Sample(key=key, label=int(text), offset=image.offset_data, length=image.size)


def _label_text(tar: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> bytes:
    try:
        file = tar.extractfile(member)
        return file.read(20) if file else b""
    except _TAR_ERRORS as error:
        raise ShardError(f"{place}: damaged or cut archive: {error}") from error


def _require_end(path: Path, place: str) -> None:
    """Refuse an archive without its closing zero blocks: its last members may be missing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * tarfile.BLOCKSIZE))
        if file.read().strip(b"\0"):
            raise ShardError(f"{place}: the archive has no end: it was cut")
