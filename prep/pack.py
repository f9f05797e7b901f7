"""Write the planned shards on an `Executor`, join them to one index; continue what was stopped.

Each shard is one task; a finished shard has a result file in `.prep`, and a rerun does only the
tasks that have none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from prep.execute import Show, Tick, open_pool
from prep.files import local_path, native_path, shown, write_text_whole
from prep.images import KEPT, REJECTED, REPAIRED, judge
from prep.index import (
    INDEX_FILE,
    SAMPLES_FILE,
    SetIndex,
    SplitIndex,
    load_index,
    save_index,
    save_table,
)
from prep.plan import WORK_FOLDER, PackSettings, ShardTask, describe, plan, settings_document
from prep.results import Finding, ShardResult, load_result, report_text, save_result
from prep.shards import SAMPLE_DTYPE, ShardError, ShardWriter, shard_name
from prep.sources import Source

PLAN_FILE = "plan.json"
REPORT_FILE = "report.csv"


def judge_task(task: ShardTask, tick: Tick) -> ShardResult:
    """Judge the images of a task without writing anything."""
    return _judge_all(task, None, tick)


def pack_task(task: ShardTask, tick: Tick) -> ShardResult:
    """Write one shard and then its result file; runs in a worker."""
    path = task.folder / shard_name(task.shard_index)
    try:
        with ShardWriter(path) as writer:
            result = _judge_all(task, writer, tick)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"cannot write: {error.strerror}", shown(path)) from error
    result = ShardResult(
        split=result.split,
        shard_index=result.shard_index,
        shard=writer.info,
        rows=writer.rows(),
        counts=result.counts,
        findings=result.findings,
    )
    save_result(task, result)
    return result


def _judge_all(task: ShardTask, writer: ShardWriter | None, tick: Tick) -> ShardResult:
    counts: Counter[str] = Counter({KEPT: 0, REPAIRED: 0, REJECTED: 0})
    findings = []
    for image, key in zip(task.images, task.keys, strict=True):
        data, problem = _read(task.root, image.path)
        verdict = judge(data, task.settings)
        action, reason = (REJECTED, problem) if problem else (verdict.action, verdict.reason)
        counts[action] += 1
        if reason:
            findings.append(
                Finding(path=image.path, split=task.split, action=action, reason=reason)
            )
        if action != REJECTED and writer is not None:
            writer.add(key, verdict.data, image.label)
        tick(len(data), rejected=action == REJECTED)
    return ShardResult(
        split=task.split,
        shard_index=task.shard_index,
        shard=None,
        rows=np.empty(0, SAMPLE_DTYPE),
        counts=dict(counts),
        findings=tuple(findings),
    )


def _read(root: Path, path: str) -> tuple[bytes, str]:
    """Read a source file; a file that cannot be read is a finding, a lost disk is an error."""
    try:
        return (root / native_path(path)).read_bytes(), ""
    except OSError as error:
        if not (root / path.partition("/")[0]).is_dir():
            raise OSError(error.errno, "the source is gone", shown(root)) from error
        return b"", f"cannot be read: {error.strerror or error}"


def compile_kernels() -> None:
    """Compile what workers and `train` need once, before they start; later runs read the cache."""
    from prep import jpeg, resize  # numba takes most of a second: `prep info` can do without

    jpeg.warm_up()
    resize.warm_up()


def pack(
    source: Source, dst: Path, settings: PackSettings, num_workers: int, show: Show
) -> SetIndex:
    """Pack a source, or continue where an earlier call was stopped.

    Args:
        source: Listed images.
        dst: An empty or new folder, or one where the same packing was begun.
        settings: What decides the bytes.
        num_workers: Processes; one works in this process.
        show: Told the running totals.

    Returns:
        The index of the whole set, as written.

    Raises:
        ValueError: `dst` holds something else, or no image at all was accepted.
        OSError: The disk is full or gone; all finished shards stay and count in the next call.
        WorkerDiedError: A worker process died; the same holds.
    """
    dst = local_path(dst)
    tasks = plan(source, dst, settings)
    with _claimed(dst, tasks, settings):
        results = [load_result(task) for task in tasks]
        missing = [task for task, result in zip(tasks, results, strict=True) if result is None]
        if not missing and (dst / INDEX_FILE).is_file():
            with suppress(ShardError):  # a table that was lost or damaged is made anew
                return load_index(dst)
        (dst / INDEX_FILE).unlink(missing_ok=True)
        finished = {(r.split, r.shard_index): r for r in results if r is not None}
        if missing:
            compile_kernels()
            with open_pool(min(num_workers, len(missing))) as pool:
                for result in pool.run(pack_task, missing, show):
                    finished[result.split, result.shard_index] = result
        ordered = [finished[task.split, task.shard_index] for task in tasks]
        return _join(source, dst, settings, ordered)


@contextmanager
def _claimed(dst: Path, tasks: Sequence[ShardTask], settings: PackSettings) -> Iterator[None]:
    """Hold the destination for this process: made, locked, and known to belong to this plan."""
    work = dst / WORK_FOLDER
    if dst.exists() and not dst.is_dir():
        raise ValueError(f"--dst '{shown(dst)}' is a file: give a folder")
    if dst.is_dir() and not work.is_dir() and any(dst.iterdir()):
        raise ValueError(
            f"--dst '{shown(dst)}' is not empty and was not begun by prep: give a new folder"
        )
    work.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another prep is packing into {shown(dst)} at this moment") from None
    try:
        _require_same_plan(dst, describe(tasks, settings))
        for split in {task.split for task in tasks}:
            (dst / split).mkdir(exist_ok=True)
        yield
    finally:
        lock.release()


def _require_same_plan(dst: Path, plan_now: dict[str, Any]) -> None:
    """Write the plan into a new folder; refuse a folder that was begun with another one."""
    path = dst / WORK_FOLDER / PLAN_FILE
    if not path.is_file():
        write_text_whole(path, json.dumps(plan_now, indent=1) + "\n")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name} was {before.get(name)!r}, is {value!r}"
        for name, value in plan_now.items()
        if before.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"--dst '{shown(dst)}' was begun otherwise ({changed[0]}): "
            "give a new folder, or the same source and settings"
        )


def _join(
    source: Source, dst: Path, settings: PackSettings, results: Sequence[ShardResult]
) -> SetIndex:
    """Write tables, report and, last, the index."""
    splits = {}
    counts: dict[str, Counter[str]] = {}
    for split in source.splits:
        mine = [result for result in results if result.split == split]
        counts[split] = sum((Counter(result.counts) for result in mine), Counter())
        filled = [result for result in mine if result.shard is not None]
        if not filled:
            raise ValueError(f"not one image of {split} was accepted: see {_report(dst, results)}")
        samples, sha256 = save_table(dst / split / SAMPLES_FILE, (result.rows for result in filled))
        splits[split] = SplitIndex(
            shards=tuple(result.shard for result in filled if result.shard),
            samples=samples,
            samples_sha256=sha256,
        )
    _report(dst, results)
    index = SetIndex(
        root=dst,
        classes=source.classes,
        splits=splits,
        settings=settings_document(settings),
        source={"layout": source.layout, "notes": list(source.notes)},
        counts={
            split: {action: counts[split][action] for action in (KEPT, REPAIRED, REJECTED)}
            for split in counts
        },
    )
    save_index(index)
    return index


def _report(dst: Path, results: Sequence[ShardResult]) -> str:
    """Write the report beside the set; gives its path."""
    path = dst / REPORT_FILE
    write_text_whole(path, report_text(f for result in results for f in result.findings))
    return shown(path)
