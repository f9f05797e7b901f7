"""Run one function over many tasks on an `Executor`, with shared counters and a clean stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Protocol, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

POLL_S = 0.2
_STOP, _STARTED, _ROWS = 0, 1, 2
"""Cells of `Counters`: the stop flag, the workers so far, then three totals for each worker."""


class StoppedError(Exception):
    """The run was told to stop between two images."""


class WorkerDiedError(RuntimeError):
    """A worker process ended without a word."""


class Show(Protocol):
    """Is told the running totals several times a second."""

    def __call__(self, num_done: int, num_bytes: int, num_rejected: int, /) -> None:
        """Show them."""


class Tick(Protocol):
    """Counts one image in a worker."""

    def __call__(self, num_bytes: int, *, rejected: bool = False) -> None:
        """Count it; raises `StoppedError` once the run shall stop."""


class Counters:
    """Running totals in shared memory.

    Each worker adds to cells of its own, so that nobody waits for a lock which a killed worker
    took along.
    """

    def __init__(self, num_workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._cells = context.RawArray("q", _ROWS + 3 * num_workers)
        self._starting = context.Lock()

    def ticker(self) -> Tick:
        """Give the next worker its cells."""
        with self._starting:
            row = _ROWS + 3 * self._cells[_STARTED]
            self._cells[_STARTED] += 1
        cells = self._cells

        def tick(num_bytes: int, *, rejected: bool = False) -> None:
            cells[row] += 1
            cells[row + 1] += num_bytes
            cells[row + 2] += rejected
            if cells[_STOP]:
                raise StoppedError("stopped between two images")

        return tick

    def totals(self) -> tuple[int, int, int]:
        """Sum the images, bytes and rejections of all workers."""
        done, num_bytes, rejected = (sum(self._cells[_ROWS + i :: 3]) for i in range(3))
        return done, num_bytes, rejected

    def stop(self) -> None:
        """Make each worker stop at its next image."""
        self._cells[_STOP] = 1


def default_workers() -> int:
    """Count the processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


_worker_tick: Tick | None = None
"""In a worker process: its ticker. Shared memory reaches a worker only while it starts."""


def _start_worker(counters: Counters) -> None:
    """Set up a worker process: leave Ctrl+C to the main process, and end when that one ends."""
    global _worker_tick
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    _worker_tick = counters.ticker()


def _end_with_parent() -> None:
    """End at once if the main process was killed: a rerun may write the same shard soon."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call_in_worker(function: Callable[[Task, Tick], Result], task: Task) -> Result:
    if _worker_tick is None:
        raise RuntimeError("this worker was started without its counters")
    return function(task, _worker_tick)


@dataclass(frozen=True, slots=True)
class Pool:
    """An executor and the counters that its workers add to."""

    executor: Executor
    counters: Counters

    def run(
        self, function: Callable[[Task, Tick], Result], tasks: Sequence[Task], show: Show
    ) -> Iterator[Result]:
        """Give the results as they come, in any order.

        Raises:
            WorkerDiedError: A worker was killed or crashed; the finished tasks were given.
        """
        try:
            futures = self._submit(function, tasks)
            while futures:
                done, futures = wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)
                show(*self.counters.totals())
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process died (killed, out of memory, or the call stands outside "
                '`if __name__ == "__main__":`); with fewer --workers less memory is needed'
            ) from error

    def _submit(
        self, function: Callable[[Task, Tick], Result], tasks: Sequence[Task]
    ) -> set[Future[Result]]:
        if isinstance(self.executor, ThreadPoolExecutor):
            tick = self.counters.ticker()
            return {self.executor.submit(function, task, tick) for task in tasks}
        return {self.executor.submit(_call_in_worker, function, task) for task in tasks}


@contextmanager
def open_pool(num_workers: int) -> Iterator[Pool]:
    """Open `num_workers` spawned processes; one worker is a thread of this process.

    Leaving by an exception tells the workers to stop at their next image.

    Raises:
        ValueError: Fewer than one worker.
        RuntimeError: Called while a worker process starts, that is without a main guard.
    """
    if num_workers < 1:
        raise ValueError(f"--workers must be at least 1, got {num_workers}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "this call runs again in each worker that starts: put it under "
            '`if __name__ == "__main__":`'
        )
    pool = _open(num_workers)
    try:
        yield pool
    except BaseException:
        pool.counters.stop()
        raise
    finally:
        pool.executor.shutdown(cancel_futures=True)


def _open(num_workers: int) -> Pool:
    counters = Counters(num_workers)
    if num_workers == 1:
        return Pool(ThreadPoolExecutor(1), counters)
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(counters,),
    )
    return Pool(executor, counters)
