"""Leave a run in order when SIGTERM or Ctrl+C comes."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(Exception):  # noqa: N818 - not an error
    """A signal ended the run, after its state was saved."""


class StopSignal:
    """Notes SIGTERM and Ctrl+C for the block; the second one acts as always.

    Does nothing in a thread other than the main one, where Python takes no signals.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGBREAK"):  # the last on Windows only
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        signal.signal(number, self._before[number])
