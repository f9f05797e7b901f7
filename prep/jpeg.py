"""JPEG files cut anew, without loss: restart markers in, and regions out.

A baseline JPEG is one long Huffman stream that a decoder must walk from the top. `recut` decodes
its symbols (no pixels) and writes them again with a restart marker every few MCUs and with optimal
tables; on the way it checks that every MCU is there. `cut_region` then copies the part under a crop
box out into a small JPEG of its own, whose pixels equal those of the full picture.

Importing this module is cheap: the kernels are compiled on first use, or read from numba's cache.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | Bytes

SCRATCH_BYTES = 2048
"""How many bytes longer than its source the buffer for `cut_region` must be."""

_FINDINGS = {
    "NOT_JPEG": ("corrupt", "not a JPEG"),
    "HEADER_ENDS": ("truncated", "truncated in the header"),
    "BAD_SEGMENT": ("corrupt", "corrupt header: a segment that lies or has no place"),
    "BAD_TABLE": ("corrupt", "corrupt header: invalid table"),
    "NO_TABLE": ("corrupt", "corrupt header: a table is missing"),
    "BAD_SIZE": ("corrupt", "corrupt header: zero height or width"),
    "BAD_FACTOR": ("corrupt", "corrupt header: sampling factor outside 1..4"),
    "STRAY_BYTES": ("corrupt", "corrupt header: stray bytes between segments"),
    "BAD_SCAN": ("corrupt", "corrupt header: invalid scan header"),
    "PROGRESSIVE": ("unsupported", "progressive"),
    "ARITHMETIC": ("unsupported", "arithmetic coding"),
    "OTHER_PROCESS": ("unsupported", "lossless or hierarchical"),
    "PRECISION": ("unsupported", "not 8 bits a sample"),
    "COMPONENTS": ("unsupported", "{num_components} components"),
    "MULTI_SCAN": ("unsupported", "more than one scan"),
    "ODD_FACTORS": ("unsupported", "unusual sampling factors"),
    "ODD_ORDER": ("unsupported", "unusual order of components"),
    "TOO_LARGE": ("unsupported", "a side longer than 65500 pixels"),
    "DC_RANGE": ("unsupported", "DC value outside 14 bits at {mcu}"),
    "SCAN_ENDS": ("truncated", "truncated at {mcu}"),
    "BAD_CODE": ("corrupt", "corrupt at {mcu}: invalid Huffman code"),
    "BAD_INDEX": ("corrupt", "corrupt at {mcu}: coefficient index past 63"),
    "BAD_RESTART": ("corrupt", "corrupt at {mcu}: marker missing or out of place"),
    "SURPLUS": ("corrupt", "corrupt at {mcu}: surplus bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """What a file's bytes are worth, and the file cut anew."""

    status: str
    """`recut` or, without restarts, `sound`; else `unsupported`, `truncated` or `corrupt`."""
    reason: str
    """Why it is neither recut nor sound, else empty."""
    data: bytes | None
    """The new file where the status is `recut`."""
    notes: tuple[str, ...]
    """What was mended."""
    height: int
    """Pixels; 0 where no frame header was found."""
    width: int
    num_components: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a picture as a JPEG of its own, and where the crop box lies in it."""

    size: int
    """Bytes of the scratch buffer that hold it."""
    height: int
    """Pixels of the JPEG."""
    width: int
    top: int
    """First row of the box in it."""
    left: int


def recut(data: Buffer, *, restarts: bool = True) -> Recut:
    """Write a baseline JPEG again so that regions can be cut out, checking each of its MCUs.

    The new file decodes to the same pixels. It keeps the JFIF and Adobe markers and drops all other
    metadata. Same bytes in, same bytes out; a new file comes out of another pass as it is.

    Args:
        data: Any bytes; nothing in them raises.
        restarts: Off: only the check, which then gives `sound`.
    """
    return _recut(data, 0 if restarts else -1)


def _recut(data: Buffer, interval: int) -> Recut:
    """Cut anew with a restart marker every `interval` MCUs; 0 to choose, -1 for only the check."""
    k = _kernels()
    info = np.zeros(k.NUM_INFO, np.int64)
    source = _array(data)
    code, symbols = k.read_symbols(source, info, interval)
    status, reason = _finding(k, code, info)
    if status == "sound" and interval >= 0:
        status, out = "recut", k.write_recut(source, info, symbols).tobytes()
    else:
        out = None
    return Recut(
        status=status,
        reason=reason,
        data=out,
        notes=_notes(k, source.size, info) if code == k.OK else (),
        height=int(info[k.HEIGHT]),
        width=int(info[k.WIDTH]),
        num_components=int(info[k.NUM_COMPONENTS]),
    )


def _finding(k: Any, code: int, info: npt.NDArray[np.int64]) -> tuple[str, str]:
    """Put a kernel's code into words."""
    if code == k.OK:
        return "sound", ""
    status, text = next(found for name, found in _FINDINGS.items() if getattr(k, name) == code)
    mcu = f"MCU {info[k.MCU]} of {info[k.MCU_ROWS] * info[k.MCU_COLS]}"
    return status, text.format(mcu=mcu, num_components=info[k.NUM_COMPONENTS])


def _notes(k: Any, size: int, info: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """Tell what is mended in a file that is otherwise sound."""
    notes = ["JFIF or Adobe marker mended"] if info[k.MENDED] & k.MARKER_MENDED else []
    if info[k.MENDED] & k.ZEROS_CUT:
        notes.append("zero bytes before the end marker cut")
    surplus = size - info[k.FILE_END]
    if info[k.NO_EOI]:
        notes.append("end marker added")
    elif surplus:
        notes.append(f"trailing bytes cut: {surplus}")
    return tuple(notes)


def cut_region(
    source: Buffer, box: tuple[int, int, int, int], out: Bytes, *, reduce: int = 1
) -> Region | None:
    """Copy the part of a JPEG under a box into a JPEG of its own.

    It covers whole restart segments, with the margin that chroma upsampling reads: under the box,
    its pixels equal those of the whole picture. Threads may call this at the same time.

    Args:
        source: A file of N bytes, damaged or not.
        box: Top, left, height, width in pixels.
        out: `(M,)` uint8 scratch, M at least N + `SCRATCH_BYTES`, overwritten from its start.
        reduce: By how much the decoder is going to scale down: 1, 2, 4 or 8.

    Returns:
        None if the file must be decoded whole: no restart markers at fitting places, not baseline,
        damaged, or a box that is not inside the picture.

    Raises:
        ValueError: `out` is too short, or `reduce` is none of these.
    """
    array = _array(source)
    if out.size < array.size + SCRATCH_BYTES:
        need = array.size + SCRATCH_BYTES
        raise ValueError(f"out must hold at least {need} bytes, got {out.size}")
    if reduce not in (1, 2, 4, 8):
        raise ValueError(f"reduce must be 1, 2, 4 or 8, got {reduce!r}")
    size, height, width, top, left = _kernels().cut_region(array, *map(int, box), reduce, out)
    if not size:
        return None
    return Region(size=size, height=height, width=width, top=top, left=left)


def image_size(data: Buffer) -> tuple[int, int] | None:
    """Give height and width from the headers of any JPEG, None where there are none.

    The scan is not looked at: the file may still be damaged.
    """
    height, width = _kernels().image_size(_array(data))
    return (height, width) if height and width else None


def warm_up() -> None:
    """Compile all kernels, or load them from numba's cache: seconds once, then half a second.

    Call it before starting workers, so that they find the cache filled.

    Raises:
        RuntimeError: The kernels do not work here.
    """
    ones, one_code = bytes([1]) * 64, b"\1" + bytes(16)
    grey = b"\xff\xd8\xff\xdb\0\x43\0" + ones + b"\xff\xc0\0\x0b\x08\0\x08\0\x08\1\1\x11\0"
    tables = b"\xff\xc4\0\x26\0" + one_code + b"\x10" + one_code
    result = recut(grey + tables + b"\xff\xda\0\x08\1\1\0\0\x3f\0\x3f\xff\xd9")
    if result.data is None or image_size(result.data) != (8, 8):
        raise RuntimeError(f"the JPEG kernels do not work here: {result}")
    cut_region(result.data, (0, 0, 8, 8), np.empty(4096, np.uint8))


def _array(data: Buffer) -> Bytes:
    """Give a read-only array: numba compiles for each kind of array, and one kind is enough."""
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if array.flags.writeable or type(array) is not np.ndarray:
        array = array.view(np.ndarray)
        array.flags.writeable = False
    return array


@functools.cache
def _kernels() -> Any:
    """Import the kernels when they are needed, as numba takes most of a second."""
    return importlib.import_module("prep.jpeg_kernels")
