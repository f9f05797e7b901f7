"""The marker segments of any JPEG: what kind it is, where its first picture ends, what it lacks.

The names follow ITU-T T.81, annex B. The entropy-coded data itself is not looked into here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SOI, EOI, SOS = 0xD8, 0xD9, 0xDA
BASELINE, EXTENDED, PROGRESSIVE = 0xC0, 0xC1, 0xC2
FRAME_MARKERS = frozenset(
    (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), 0xCD, 0xCE, 0xCF)
)
_SCAN_END = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]")
"""A marker that is neither a stuffed zero nor a restart: it ends the scan's data."""


class JpegError(ValueError):
    """The marker segments of a JPEG contradict themselves or end early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegStructure:
    """What the marker segments of the first picture in a JPEG file tell."""

    kind: int
    """Frame marker: 0xC0 baseline, 0xC1 extended, 0xC2 progressive, others rarer."""
    precision: int
    """Bits a sample."""
    height: int
    width: int
    num_components: int
    end: int
    """Offset just past the picture's EOI marker, or past the last byte if it has none."""
    has_end_marker: bool
    all_components_present: bool
    """Whether each component has its DC coefficients in some scan."""
    all_scans_present: bool
    """Whether the scans carry every bit of every coefficient (progressive files)."""


def read_structure(data: bytes) -> JpegStructure:
    """Walk the marker segments from SOI to the first EOI.

    Raises:
        JpegError: No SOI, a segment that runs past the end, or no frame or scan at all.
    """
    if data[:2] != b"\xff\xd8":
        raise JpegError("no JPEG start marker")
    position = 2
    frame: tuple[int, bytes] | None = None
    scans: list[bytes] = []
    while True:
        marker, position = _next_marker(data, position)
        if marker is None or marker == EOI:
            break
        body = _segment(data, position, marker)
        position += 2 + len(body)
        if marker in FRAME_MARKERS and frame is None:
            frame = marker, body
        elif marker == SOS:
            scans.append(body)
            position = _end_of_scan(data, position)
    if frame is None or not scans:
        raise JpegError("ends before its picture data" if marker is None else "no picture data")
    return _structure(frame, scans, position, has_end_marker=marker == EOI)


def _next_marker(data: bytes, position: int) -> tuple[int | None, int]:
    """Give the marker at or after `position` and the offset behind it; None at the end."""
    start = data.find(b"\xff", position)
    while 0 <= start < len(data) - 1:
        if data[start + 1] not in (0x00, 0xFF):
            return data[start + 1], start + 2
        start = data.find(b"\xff", start + 1)
    return None, len(data)


def _segment(data: bytes, position: int, marker: int) -> bytes:
    length = int.from_bytes(data[position : position + 2], "big")
    if length < 2 or position + length > len(data):
        raise JpegError(f"segment {marker:02X} at byte {position - 2} runs past the end")
    return data[position + 2 : position + length]


def _end_of_scan(data: bytes, position: int) -> int:
    match = _SCAN_END.search(data, position)
    return match.start() if match else len(data)


def _structure(
    frame: tuple[int, bytes], scans: list[bytes], end: int, *, has_end_marker: bool
) -> JpegStructure:
    kind, body = frame
    if len(body) < 6 or len(body) < 6 + 3 * body[5]:
        raise JpegError("its frame header is too short")
    components = [body[6 + 3 * i] for i in range(body[5])]
    return JpegStructure(
        kind=kind,
        precision=body[0],
        height=int.from_bytes(body[1:3], "big"),
        width=int.from_bytes(body[3:5], "big"),
        num_components=len(components),
        end=end,
        has_end_marker=has_end_marker,
        all_components_present=_all_sent_once(components, scans),
        all_scans_present=kind != PROGRESSIVE or _all_bits_sent(components, scans),
    )


def _all_sent_once(components: list[int], scans: list[bytes]) -> bool:
    """Tell whether each component stands in a scan that begins with the DC coefficient."""
    sent: set[int] = set()
    for scan in scans:
        count = scan[0] if scan else 0
        if len(scan) >= 2 + 2 * count and scan[1 + 2 * count] == 0:
            sent.update(scan[1 : 1 + 2 * count : 2])
    return sent.issuperset(components)


def _all_bits_sent(components: list[int], scans: list[bytes]) -> bool:
    """Tell whether each coefficient of each component was refined down to its lowest bit."""
    lowest = {(component, k): 99 for component in components for k in range(64)}
    for scan in scans:
        count = scan[0] if scan else 0
        if len(scan) < 1 + 2 * count + 3:
            return False
        first, last, approximation = scan[1 + 2 * count : 4 + 2 * count]
        for i in range(count):
            for k in range(first, min(last, 63) + 1):
                lowest[scan[1 + 2 * i], k] = approximation & 15
    return not any(lowest[component, k] for component in components for k in range(64))
