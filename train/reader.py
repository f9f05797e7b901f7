"""Bring the samples of a share into memory, window by window, with few large sequential reads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.order import Ids, Share

GAP_BYTES = 65_536
"""Samples closer than this are read in one go, the bytes between them included."""
READ_BYTES = 16_777_216
"""Most bytes of one read call."""
NUM_WINDOWS = 2
"""Windows in memory at a time: one in use, one being read."""

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class Window:
    """The bytes of the samples of one window, in reading order."""

    first: int
    """Place of its first sample in the share."""
    num_samples: int
    samples: list[Bytes]
    """`(length,)` uint8 each; empty where a shard ends before the sample, or is gone."""
    _left: int
    _lock: threading.Lock
    _slots: threading.Semaphore

    def release(self, num_samples: int) -> None:
        """Say that samples are done with; the last one makes room for another window."""
        with self._lock:
            self._left -= num_samples
            done = self._left == 0
        if done:
            self.samples = []
            self._slots.release()


class WindowReader:
    """A thread that reads the windows of a share ahead of use; give it back with `close`."""

    def __init__(self, paths: list[Path], samples: NDArray[np.void], share: Share) -> None:
        self._paths = paths
        self._samples = samples
        self._share = share
        self._queue: queue.Queue[Window | BaseException] = queue.Queue()
        self._slots = threading.Semaphore(NUM_WINDOWS)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shard-reader", daemon=True)
        self._thread.start()

    def next_window(self) -> Window:
        """Wait for the next window.

        Raises:
            BaseException: Whatever ended the reading thread.
        """
        window = self._queue.get()
        if isinstance(window, BaseException):
            raise window
        return window

    def close(self) -> None:
        """Stop reading and wait for the thread's end."""
        self._closed = True
        self._slots.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            for first, ids in self._windows():
                self._slots.acquire()
                if self._closed:
                    return
                samples = self._read(ids)
                self._queue.put(
                    Window(first, len(ids), samples, len(ids), threading.Lock(), self._slots)
                )
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._queue.put(error)

    def _windows(self) -> Iterator[tuple[int, Ids]]:
        """Give the samples of each window of the share, in reading order."""
        windows = self._share.windows
        cuts = np.flatnonzero(np.diff(windows)) + 1
        first = 0
        for ids in np.split(self._share.ids, cuts):
            yield first, ids
            first += len(ids)

    def _read(self, ids: Ids) -> list[Bytes]:
        """Read samples shard by shard, front to back; gives them in the order of `ids`."""
        rows = self._samples[ids]
        result: list[Bytes] = [_EMPTY] * len(ids)
        by_file = np.lexsort((rows["offset"], rows["shard"]))
        shards = rows["shard"][by_file]
        for places in np.split(by_file, np.flatnonzero(np.diff(shards)) + 1):
            if self._closed:
                break
            starts = rows["offset"][places].astype(np.int64)
            stops = starts + rows["length"][places]
            path = self._paths[int(rows["shard"][places[0]])]
            for place, data in zip(places, _read_ranges(path, starts, stops), strict=True):
                result[place] = data
        return result


_EMPTY = np.empty(0, np.uint8)


def _read_ranges(path: Path, starts: Ids, stops: Ids) -> Iterator[Bytes]:
    """Read ascending byte ranges of a file; those of a file that is gone come out empty."""
    try:
        with path.open("rb", buffering=0) as file:
            cuts = np.flatnonzero(starts[1:] - stops[:-1] > GAP_BYTES) + 1
            for run in np.split(np.arange(len(starts)), cuts):
                first, last = int(starts[run[0]]), int(stops[run[-1]])
                data = np.empty(last - first, np.uint8)
                file.seek(first)
                end = first + _fill(file, data.data)
                for i in run:
                    whole = stops[i] <= end
                    yield data[starts[i] - first : stops[i] - first] if whole else _EMPTY
    except FileNotFoundError:
        yield from (_EMPTY for _ in starts)


def _fill(file: object, target: memoryview) -> int:
    """Read until the target is full or the file ends; gives the number of bytes read."""
    filled = 0
    while filled < len(target):
        count = file.readinto(target[filled : filled + READ_BYTES])  # type: ignore[attr-defined]
        if not count:
            break
        filled += count
    return filled
