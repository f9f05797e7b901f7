"""The command line of `prep`: shard, scan, labels, verify, info."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import tyro
from tqdm import tqdm

from prep.execute import Show, StoppedError, WorkerDiedError, default_workers, open_pool
from prep.files import local_path, print_any_path, shown, write_text_whole
from prep.images import KEPT, REJECTED, REPAIRED, ImageSettings
from prep.index import SetIndex, load_index
from prep.pack import REPORT_FILE, compile_kernels, judge_task, pack
from prep.plan import PackSettings, plan
from prep.results import report_text
from prep.sources import Source, open_source
from prep.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Check every image of a source and write the good ones into tar shards.

    Stopped or crashed, the same command continues. Rejected images are normal: they are listed in
    report.csv, and the exit code is 0 once the set is whole.
    """

    src: Path
    """Folder with `train` and/or `val`."""
    dst: Path
    """New folder for the shards."""
    val_labels: Path | None = None
    """Labels of a flat `val`: `file-name class-index` a line. Default: SRC/val_label.txt."""
    workers: int = field(default_factory=default_workers)
    """Processes; default: one a core."""
    shard_mb: int = 128
    """Size of a shard in MB (1,000,000 bytes)."""
    seed: int = 0
    """Of the order in which images are packed."""
    short_side: int = 0
    """Shrink images to this shorter side in pixels; 0 keeps them as they are."""
    quality: int = 90
    """JPEG quality of shrunk images, 1 to 100."""
    restarts: bool = True
    """Write JPEGs again, without loss, with restart markers, so that `train` decodes only what lies
    under a crop; `--no-restarts` keeps their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Check every image of a source as `shard` would, and write only a report.

    Exit code 1 if something would be repaired or rejected.
    """

    src: Path
    """Folder with `train` and/or `val`."""
    report: Path = Path(REPORT_FILE)
    """Where the report goes."""
    val_labels: Path | None = None
    """Labels of a flat `val`: `file-name class-index` a line. Default: SRC/val_label.txt."""
    workers: int = field(default_factory=default_workers)
    """Processes; default: one a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Write the validation labels of a source, `file-name class-index` a line."""

    src: Path
    """Folder with `train` and/or `val`."""
    out: Path
    """The file to write, for example val_label.txt."""
    val_labels: Path | None = None
    """Labels of a flat `val`: `file-name class-index` a line. Default: SRC/val_label.txt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Check a packed set: hashes, lengths, labels, and that every image decodes.

    Exit code 1 if a shard is damaged; each is named. To mend one, delete it and run the same
    `prep shard` again: only that shard is written anew.
    """

    shards: Path
    """Folder that `prep shard` wrote."""
    workers: int = field(default_factory=default_workers)
    """Processes; default: one a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """Tell what is in a packed set."""

    shards: Path
    """Folder that `prep shard` wrote."""


def run_shard(options: Shard) -> int:
    """Pack; prints the closing summary."""
    settings = PackSettings(
        shard_bytes=options.shard_mb * 1_000_000,
        seed=options.seed,
        image=ImageSettings(
            short_side=options.short_side, quality=options.quality, restarts=options.restarts
        ),
    )
    start = time.perf_counter()
    source = _listed(options.src, options.val_labels)
    _load_kernels()
    with _progress(source) as show:
        index = pack(source, options.dst, settings, options.workers, show)
    _print_counts(index)
    seconds = time.perf_counter() - start
    print(f"packed {shown(source.root)} into {shown(index.root)} in {_duration(seconds)}")
    print(f"report: {shown(index.root / REPORT_FILE)}")
    return 0


def run_scan(options: Scan) -> int:
    """Judge every image; exit code 1 if one would not be kept."""
    start = time.perf_counter()
    source = _listed(options.src, options.val_labels)
    tasks = plan(source, source.root, PackSettings())
    _load_kernels()
    with _progress(source) as show, open_pool(min(options.workers, len(tasks))) as pool:
        results = list(pool.run(judge_task, tasks, show))
    report = local_path(options.report)
    write_text_whole(report, report_text(f for result in results for f in result.findings))
    for split in source.splits:
        counts = sum((Counter(r.counts) for r in results if r.split == split), Counter[str]())
        print(f"{split}: " + ", ".join(f"{counts[a]} {a}" for a in (KEPT, REPAIRED, REJECTED)))
    print(f"scanned {shown(source.root)} in {_duration(time.perf_counter() - start)}")
    print(f"report: {shown(report)}")
    return int(any(r.counts[REPAIRED] or r.counts[REJECTED] for r in results))


def run_labels(options: Labels) -> int:
    """Write `name index` for each validation image."""
    source = _listed(options.src, options.val_labels)
    images = source.splits.get("val")
    if not images:
        raise ValueError(f"{shown(source.root)} has no val images")
    lines = [f"{PurePosixPath(image.path).name} {image.label}\n" for image in images]
    out = local_path(options.out)
    write_text_whole(out, "".join(sorted(lines)))
    print(f"{len(lines)} labels of {len(source.classes.wnids)} classes: {shown(out)}")
    return 0


def run_verify(options: Verify) -> int:
    """Check a set; prints each thing that is wrong."""
    start = time.perf_counter()
    index = load_index(options.shards)
    with _bar(sum(split.num_samples for split in index.splits.values())) as show:
        problems = verify(index, options.workers, show)
    for problem in problems:
        print(problem)
    num_shards = sum(len(split.shards) for split in index.splits.values())
    verdict = f"{len(problems)} damaged" if problems else "all whole"
    print(f"{num_shards} shards, {verdict}, checked in {_duration(time.perf_counter() - start)}")
    return int(bool(problems))


def run_info(options: Info) -> int:
    """Print what the index tells."""
    index = load_index(options.shards)
    layout = index.source.get("layout", "not packed by prep shard")
    print(f"{shown(index.root)}: {len(index.classes.wnids)} classes ({layout})")
    _print_counts(index)
    for name, value in index.settings.items():
        print(f"{name}: {value}")
    return 0


def _listed(src: Path, val_labels: Path | None) -> Source:
    """List the source with a counter on stderr."""
    terminal = sys.stderr.isatty()

    def count(num_files: int) -> None:
        if terminal:
            print(f"\rlisting: {num_files} files", end="", file=sys.stderr, flush=True)

    source = open_source(src, val_labels, count)
    num_images = sum(len(images) for images in source.splits.values())
    print(
        f"{chr(13) if terminal else ''}listed {num_images} images of "
        f"{len(source.classes.wnids)} classes ({source.layout})",
        file=sys.stderr,
    )
    for note in source.notes:
        print(f"note: {note}", file=sys.stderr)
    return source


def _load_kernels() -> None:
    """Say what the first run takes its time for."""
    print("loading the kernels (the first run compiles them: half a minute)", file=sys.stderr)
    compile_kernels()


def _progress(source: Source) -> AbstractContextManager[Show]:
    return _bar(sum(len(images) for images in source.splits.values()))


@contextmanager
def _bar(total: int) -> Iterator[Show]:
    """Show images/s, MB/s, rejected and time left; few lines where stderr is a file."""
    terminal = sys.stderr.isatty()
    with tqdm(
        total=total, unit="img", ascii=True, file=sys.stderr, mininterval=0.2 if terminal else 10.0
    ) as bar:
        start = time.perf_counter()

        def show(num_done: int, num_bytes: int, num_rejected: int) -> None:
            mb_per_s = num_bytes / 1e6 / max(time.perf_counter() - start, 1e-9)
            bar.set_postfix_str(f"{mb_per_s:.0f} MB/s, {num_rejected} rejected", refresh=False)
            bar.update(num_done - bar.n)

        show(0, 0, 0)
        bar.refresh()
        yield show


def _print_counts(index: SetIndex) -> None:
    for name, split in index.splits.items():
        counts = index.counts.get(name, {KEPT: split.num_samples})
        gigabytes = sum(shard.num_bytes for shard in split.shards) / 1e9
        print(
            f"{name}: {split.num_samples} samples in {len(split.shards)} shards, "
            f"{gigabytes:.3f} GB ("
            + ", ".join(f"{count} {action}" for action, count in counts.items())
            + ")"
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes}:{rest:02d} min"


RUNNERS: dict[type, Callable[..., int]] = {
    Shard: run_shard,
    Scan: run_scan,
    Labels: run_labels,
    Verify: run_verify,
    Info: run_info,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code: 0 fine, 1 findings or failure, 2 wrong use."""
    commands: dict[str, Callable[..., object]] = {
        command.__name__.lower(): command for command in RUNNERS
    }
    options = tyro.extras.subcommand_cli_from_dict(
        commands, prog="prep", description=__doc__, args=argv
    )
    try:
        return RUNNERS[type(options)](options)
    except KeyboardInterrupt:
        print("stopped: the same command continues", file=sys.stderr)
    except (ValueError, OSError, WorkerDiedError, StoppedError) as error:
        print(f"prep: {_one_line(error)}", file=sys.stderr)
    return 1


def _one_line(error: Exception) -> str:
    """Say what went wrong in one line, the place first."""
    text = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str):
        text = f"{shown(Path(error.filename))}: {error.strerror}"
    return " ".join(text.splitlines())


def entry() -> None:
    """Run as a program."""
    print_any_path()
    sys.exit(main())


if __name__ == "__main__":
    entry()
