"""What came of the tasks: the result file of each shard, and the report on odd images."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prep.files import write_text_whole
from prep.plan import ShardTask
from prep.shards import SAMPLE_DTYPE, ShardInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    path: str
    split: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """What came of one task."""

    split: str
    shard_index: int
    shard: ShardInfo | None
    """None if no image of the shard was accepted, or if nothing was to be written."""
    rows: NDArray[np.void]
    counts: dict[str, int]
    findings: tuple[Finding, ...]


def save_result(task: ShardTask, result: ShardResult) -> None:
    """Write the result file: the act that makes a shard count as finished."""
    document = {
        "digest": task.digest(),
        "shard": asdict(result.shard) if result.shard else None,
        "rows": base64.b64encode(result.rows.tobytes()).decode("ascii"),
        "counts": result.counts,
        "findings": [asdict(finding) for finding in result.findings],
    }
    write_text_whole(task.result_file(), json.dumps(document))


def load_result(task: ShardTask) -> ShardResult | None:
    """Read a result file; None unless it is whole, of this task, and its shard is in place."""
    try:
        document = json.loads(task.result_file().read_text(encoding="utf-8"))
        if document["digest"] != task.digest():
            return None
        result = _result(task, document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if result.shard is not None:
        path = task.folder / result.shard.name
        if not path.is_file() or path.stat().st_size != result.shard.num_bytes:
            return None
    return result


def _result(task: ShardTask, document: dict[str, Any]) -> ShardResult:
    return ShardResult(
        split=task.split,
        shard_index=task.shard_index,
        shard=ShardInfo(**document["shard"]) if document["shard"] else None,
        rows=np.frombuffer(base64.b64decode(document["rows"]), SAMPLE_DTYPE),
        counts=dict(document["counts"]),
        findings=tuple(Finding(**finding) for finding in document["findings"]),
    )


def report_text(findings: Iterable[Finding]) -> str:
    """Give the findings as CSV: path, split, action, reason; sorted by path."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "split", "action", "reason"))
    for finding in sorted(findings, key=lambda finding: finding.path):
        writer.writerow((finding.path, finding.split, finding.action, finding.reason))
    return text.getvalue()
