from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers import (
    die_at_once,
    environment,
    interpreter_state,
    judge_many,
    judge_slowly,
    pool_workers,
    quiet,
    refuse_task,
)
from prep.execute import Counters, StoppedError, WorkerDiedError, default_workers, open_pool


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_task_is_done_once_and_counted(num_workers: int) -> None:
    told: list[tuple[int, int, int]] = []
    tasks = [0.0, 0.3, 0.01, 0.02]
    with open_pool(num_workers) as pool:
        results = list(pool.run(judge_slowly, tasks, lambda *totals: told.append(totals)))
    assert sorted(results) == sorted(tasks)
    assert told[-1] == (4, 4000, 1)
    assert told == sorted(told)
    assert told[0][0] < 4, "told while the work goes on"


def test_workers_import_neither_torch_nor_train_and_count_apart() -> None:
    with open_pool(2) as pool:
        states = dict(pool.run(interpreter_state, [3, 3, 3], quiet))
    assert len(states) == 2
    for modules in states.values():
        assert not {"torch", "train", "torchvision"} & set(modules)


def test_a_killed_worker_ends_the_run_with_a_clear_error() -> None:
    start = time.perf_counter()
    with (
        pytest.raises(WorkerDiedError, match=r"^a worker process died \(killed, out of memory"),
        open_pool(2) as pool,
    ):
        list(pool.run(die_at_once, [400, 1, 400, 400], quiet))
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_in_one_task_stops_the_others_at_their_next_image(num_workers: int) -> None:
    start = time.perf_counter()
    with pytest.raises(OSError, match="No space left on device"), open_pool(num_workers) as pool:
        list(pool.run(refuse_task, [0, 5000, 5000], quiet))
    assert time.perf_counter() - start < 20


def leave_after_the_first_result() -> None:
    with open_pool(1) as pool:
        for _ in pool.run(judge_many, [1, 5000, 5000], quiet):
            raise KeyboardInterrupt


def test_leaving_the_pool_early_stops_the_work() -> None:
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        leave_after_the_first_result()
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("num_workers", [0, -1])
def test_less_than_one_worker_is_refused(num_workers: int) -> None:
    with (
        pytest.raises(ValueError, match=f"^--workers must be at least 1, got {num_workers}$"),
        open_pool(num_workers),
    ):
        pass


def test_counters_sum_the_workers_and_stop_them() -> None:
    counters = Counters(3)
    first, second = counters.ticker(), counters.ticker()
    first(10)
    second(20, rejected=True)
    second(5)
    assert counters.totals() == (3, 35, 1)
    counters.stop()
    with pytest.raises(StoppedError):
        first(1)


def test_the_default_is_at_least_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_workers() >= 1
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    assert default_workers() >= 1


SCRIPT = """
from helpers import judge_many, quiet
from prep.execute import open_pool
{guard}with open_pool(2) as pool:
{indent}    for result in pool.run(judge_many, [{size}] * 4, quiet):
{indent}        print(result, flush=True)
"""
GUARD = 'if __name__ == "__main__":\n    '


def script(tmp_path: Path, size: int, *, guarded: bool) -> Path:
    path = tmp_path / "script.py"
    text = SCRIPT.format(guard=GUARD * guarded, indent="    " * guarded, size=size)
    path.write_text(text, encoding="utf-8")
    return path


def script_environment() -> dict[str, str]:
    here = environment()
    return {
        **here,
        "PYTHONPATH": here["PYTHONPATH"]
        + ";:"[sys.platform != "win32"]
        + str(Path(__file__).parent),
    }


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, script(tmp_path, 2, guarded=False)],
        env=script_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert b'put it under `if __name__ == "__main__":`' in ended.stderr
    assert b"WorkerDiedError: a worker process died" in ended.stderr


def test_workers_end_with_a_main_process_that_was_killed(tmp_path: Path) -> None:
    main = subprocess.Popen(
        [sys.executable, script(tmp_path, 3000, guarded=True)],
        env=script_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        workers: list[psutil.Process] = []
        deadline = time.monotonic() + 30
        while len(workers) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            workers = pool_workers(main.pid)
        time.sleep(0.5)
    finally:
        main.kill()
        main.wait()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=10)[1] == []
