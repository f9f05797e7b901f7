from __future__ import annotations

import csv
import errno
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    WNIDS,
    encoded,
    environment,
    jpeg,
    make_heavy_source,
    make_source,
    pack_folder,
    pixels,
    pool_workers,
    quiet,
    snapshot,
)
from prep.execute import Show
from prep.files import local_path
from prep.images import ImageSettings
from prep.index import INDEX_FILE, SAMPLES_FILE, load_index
from prep.pack import REPORT_FILE, pack
from prep.plan import PackSettings, plan, plan_shards, shuffled
from prep.shards import read_samples
from prep.sources import SourceImage, open_source
from prep.verify import verify

SMALL = PackSettings(shard_bytes=1_000_000)
ON_WINDOWS = os.name == "nt"


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a source that fills 4 shards of train and 2 of val."""
    return make_heavy_source(tmp_path_factory.mktemp("heavy") / "source", 36, 16, 512)


@pytest.fixture(scope="module")
def unbroken(heavy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Give the hashes of all files of `heavy` as one call packs it."""
    dst = tmp_path_factory.mktemp("unbroken") / "shards"
    index = pack(open_source(heavy), dst, SMALL, 1, quiet)
    assert [len(index.split(name).shards) for name in ("train", "val")] == [4, 2]
    return snapshot(dst)


def finished(dst: Path) -> dict[str, int]:
    """Give the shards that have a result file, with the time of their last change."""
    names = [path.stem.split("-") for path in (dst / ".prep").glob("*-*.json")]
    paths = [dst / split / f"{number}.tar" for split, number in names]
    return {path.relative_to(dst).as_posix(): path.stat().st_mtime_ns for path in paths}


def require_continues(
    heavy: Path, dst: Path, unbroken: dict[str, str], num_workers: int = 1
) -> None:
    """Pack again; finished shards stay untouched, and the end is that of an unbroken run."""
    before = finished(dst)
    assert not (dst / INDEX_FILE).exists()
    for path in dst.glob("*/*"):
        assert path.suffix in (".tmp", ".tar", ".json", ""), path
    pack(open_source(heavy), dst, SMALL, num_workers, quiet)
    assert snapshot(dst) == unbroken
    after = finished(dst)
    assert {name: after[name] for name in before} == before


def test_any_number_of_workers_gives_the_same_bytes(
    heavy: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    pack(open_source(heavy), tmp_path / "shards", SMALL, 4, quiet)
    assert snapshot(tmp_path / "shards") == unbroken
    assert not list(tmp_path.rglob("*.tmp"))


def test_every_sample_is_packed_once_with_its_label(heavy: Path, tmp_path: Path) -> None:
    source = open_source(heavy)
    index = pack(source, tmp_path / "shards", SMALL, 1, quiet)
    for split, images in source.splits.items():
        found = [
            (sample.key, sample.label)
            for number in range(len(index.split(split).shards))
            for sample in read_samples(index.shard_path(split, number))
        ]
        assert sorted(found) == sorted((Path(i.path).stem, i.label) for i in images)
        assert len(dict(found)) == len(images)
    assert verify(index, 1, quiet) == []


def test_the_index_lists_each_shard_with_its_own_hash(
    heavy: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    index = pack(open_source(heavy), tmp_path / "shards", SMALL, 1, quiet)
    listed = {
        f"{split}/{shard.name}": shard.sha256
        for split, entry in index.splits.items()
        for shard in entry.shards
    }
    assert listed == {name: sha for name, sha in unbroken.items() if name.endswith(".tar")}
    assert len(set(listed.values())) == 6
    assert index.counts["train"] == {"kept": 36, "repaired": 0, "rejected": 0}
    document = json.loads((tmp_path / "shards" / INDEX_FILE).read_text(encoding="utf-8"))
    assert document["settings"]["shard_mb"] == 1
    assert document["source"]["layout"] == "train: class folders, val: class folders"
    assert document["splits"]["val"]["class_counts"] == [4, 4, 4, 4]


def test_neighbours_of_the_source_are_no_neighbours_in_the_shards(
    heavy: Path, tmp_path: Path
) -> None:
    index = pack(open_source(heavy), tmp_path / "shards", SMALL, 1, quiet)
    for number in range(4):
        labels = {sample.label for sample in read_samples(index.shard_path("train", number))}
        assert len(labels) > 1


def test_seed_and_place_of_the_source(source: Path, tmp_path: Path) -> None:
    first = snapshot(pack_folder(source, tmp_path / "a"))
    moved = source.rename(tmp_path / "moved away")
    assert snapshot(pack_folder(moved, tmp_path / "b")) == first
    other = snapshot(pack_folder(moved, tmp_path / "c", seed=1))
    assert other["train/000000.tar"] != first["train/000000.tar"]


def test_a_complete_set_is_left_alone(source: Path, shards: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shards.rglob("*") if path.is_file()}
    pack_folder(source, shards)
    after = {path: path.stat().st_mtime_ns for path in before}
    before.pop(shards / ".prep" / "lock", None)
    assert {path: after[path] for path in before} == before


class Break(Exception):  # noqa: N818 - it stands for a Ctrl+C
    """Stops a packing from outside."""


def stop_after(num_images: int) -> Show:
    def show(num_done: int, *_: int) -> None:
        if num_done >= num_images:
            raise Break

    return show


def test_a_stopped_packing_continues_and_leaves_nothing_half(
    heavy: Path, unbroken: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(Break):
        pack(open_source(heavy), tmp_path / "shards", SMALL, 1, stop_after(12))
    assert not list(tmp_path.rglob("*.tmp"))
    assert 1 <= len(finished(tmp_path / "shards")) < 6
    require_continues(heavy, tmp_path / "shards", unbroken)


def test_an_abort_before_the_first_shard_leaves_no_shard_and_no_index(
    source: Path, tmp_path: Path
) -> None:
    dst = tmp_path / "shards"
    with pytest.raises(Break):
        pack(open_source(source), dst, PackSettings(), 2, stop_after(0))
    assert not [path for path in dst.glob("*/*") if path.parent.name != ".prep"]
    assert not (dst / INDEX_FILE).exists()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Wait until a condition holds while a process runs; tell whether it did in time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(0.001)
    return False


@pytest.fixture
def start_prep(heavy: Path) -> Iterator[Callable[[Path, int], subprocess.Popen[bytes]]]:
    """Give a function that starts a packing of `heavy` in the background."""
    processes = []

    def start(dst: Path, num_workers: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "prep", "shard", "--src", str(heavy), "--dst", str(dst)]
        processes.append(
            subprocess.Popen(
                [*command, "--shard-mb", "1", "--workers", str(num_workers)],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the plan stands": lambda dst: (dst / ".prep" / "plan.json").exists(),
    "a shard is being written": lambda dst: any(dst.glob("train/*.tmp")),
    "two shards are finished": lambda dst: len(list((dst / ".prep").glob("train-*.json"))) >= 2,
    "val has begun": lambda dst: any(dst.glob("val/*.t*")),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_packing_continues_to_the_same_bytes(
    moment: str,
    heavy: Path,
    unbroken: dict[str, str],
    tmp_path: Path,
    start_prep: Callable[[Path, int], subprocess.Popen[bytes]],
) -> None:
    dst = tmp_path / "shards"
    process = start_prep(dst, 1)
    reached = wait_for(lambda: MOMENTS[moment](dst), process)
    process.kill()
    process.wait()
    assert reached, process.communicate()
    require_continues(heavy, dst, unbroken)


def test_a_packing_killed_with_its_workers_running_continues_to_the_same_bytes(
    heavy: Path,
    unbroken: dict[str, str],
    tmp_path: Path,
    start_prep: Callable[[Path, int], subprocess.Popen[bytes]],
) -> None:
    dst = tmp_path / "shards"
    process = start_prep(dst, 2)
    reached = wait_for(lambda: any(dst.glob("train/*.tmp")), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert reached, process.communicate()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    require_continues(heavy, dst, unbroken)


def test_a_killed_worker_ends_the_program_with_one_line_and_keeps_what_is_finished(
    heavy: Path,
    unbroken: dict[str, str],
    tmp_path: Path,
    start_prep: Callable[[Path, int], subprocess.Popen[bytes]],
) -> None:
    dst = tmp_path / "shards"
    process = start_prep(dst, 2)
    assert wait_for(lambda: any(dst.glob("train/*.tmp")), process), process.communicate()
    pool_workers(process.pid)[0].kill()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert out == b""
    assert err.splitlines()[-1].startswith(b"prep: a worker process died (killed, out of memory")
    assert b"Traceback" not in err
    assert not (dst / INDEX_FILE).exists()
    require_continues(heavy, dst, unbroken)


class FailingFile(io.FileIO):
    """A file on a disk that takes only so many writes to tars."""

    writes_left = 0
    error = OSError()

    def write(self, data: object) -> int:
        if ".tar" in str(self.name):
            if FailingFile.writes_left <= 0:
                raise FailingFile.error
            FailingFile.writes_left -= 1
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(22, "Invalid argument")]
)
@pytest.mark.parametrize("nth", [0, 3, 5])
def test_a_failing_disk_ends_with_the_place_and_keeps_what_is_finished(
    heavy: Path,
    unbroken: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
    error: OSError,
) -> None:
    dst = tmp_path / "shards"
    with monkeypatch.context() as patch:
        patch.setattr(io, "FileIO", FailingFile)
        patch.setattr(FailingFile, "writes_left", nth)
        patch.setattr(FailingFile, "error", error)
        with pytest.raises(OSError, match=f"cannot write: {error.strerror}") as caught:
            pack(open_source(heavy), dst, SMALL, 1, quiet)
    assert caught.value.filename.startswith(str(dst))
    assert not list(dst.rglob("*.tmp"))
    for path in dst.glob("*/*.tar"):
        assert path.relative_to(dst).as_posix() in finished(dst)
    require_continues(heavy, dst, unbroken)


def test_a_second_packing_into_the_same_folder_is_refused(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "shards"
    inside, leave = threading.Event(), threading.Event()

    def hold(*_: int) -> None:
        inside.set()
        leave.wait(30)

    found = open_source(source)
    first = threading.Thread(target=pack, args=(found, dst, PackSettings(), 1, hold))
    first.start()
    assert inside.wait(30)
    try:
        with pytest.raises(ValueError, match=r"^another prep is packing into .* at this moment$"):
            pack(found, dst, PackSettings(), 1, quiet)
    finally:
        leave.set()
        first.join()
    assert load_index(dst).split("train").num_samples == 16


def test_a_folder_with_other_files_is_refused_and_left_alone(source: Path, tmp_path: Path) -> None:
    dst = tmp_path / "full"
    dst.mkdir()
    (dst / "thesis.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match="is not empty and was not begun by prep: give a new"):
        pack_folder(source, dst)
    assert snapshot(dst).keys() == {"thesis.txt"}


def test_a_file_as_the_destination_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ValueError, match="file' is a file: give a folder"):
        pack_folder(source, tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (PackSettings(seed=1), "seed was 0, is 1"),
        (PackSettings(shard_bytes=2_000_000), "shard_mb was 128.0, is 2.0"),
        (PackSettings(image=ImageSettings(short_side=32)), "short_side was 0, is 32"),
    ],
)
def test_other_settings_into_the_same_folder_are_refused(
    source: Path, shards: Path, change: PackSettings, text: str
) -> None:
    before = snapshot(shards)
    with pytest.raises(
        ValueError,
        match=rf"was begun otherwise \({text}\): give a new folder, or the same source and s",
    ):
        pack(open_source(source), shards, change, 1, quiet)
    assert snapshot(shards) == before


def test_another_source_into_the_same_folder_is_refused(source: Path, shards: Path) -> None:
    (source / "train" / WNIDS[0] / "one more.JPEG").write_bytes(jpeg(9))
    with pytest.raises(ValueError, match=r"was begun otherwise \(num_images was 24, is 25\)"):
        pack_folder(source, shards)


def test_new_labels_for_the_same_images_are_refused(source: Path, tmp_path: Path) -> None:
    names = [path.name for path in (source / "val").rglob("*.JPEG")]
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{name} 0\n" for name in names), encoding="utf-8")
    pack(open_source(source, labels), tmp_path / "s", PackSettings(), 1, quiet)
    labels.write_text("".join(f"{name} 1\n" for name in names), encoding="utf-8")
    with pytest.raises(ValueError, match=r"was begun otherwise \(images_digest was"):
        pack(open_source(source, labels), tmp_path / "s", PackSettings(), 1, quiet)


@pytest.mark.parametrize("lost", [INDEX_FILE, f"train/{SAMPLES_FILE}", "train/000000.tar"])
def test_what_is_deleted_is_made_anew(source: Path, shards: Path, lost: str) -> None:
    before = snapshot(shards)
    (shards / lost).unlink()
    pack_folder(source, shards)
    assert snapshot(shards) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"digest": 1}', b"\xff", None], ids=str
)
def test_a_damaged_result_file_does_not_count(
    source: Path, shards: Path, content: bytes | None
) -> None:
    before = snapshot(shards)
    path = shards / ".prep" / "train-000000.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_bytes(
        json.dumps({**document, "rows": "AAAA"}).encode() if content is None else content
    )
    pack_folder(source, shards)
    assert snapshot(shards) == before


def test_a_shard_of_another_length_does_not_count(source: Path, shards: Path) -> None:
    before = snapshot(shards)
    path = shards / "train" / "000000.tar"
    path.write_bytes(path.read_bytes()[:-600])
    pack_folder(source, shards)
    assert snapshot(shards) == before


def report(shards: Path) -> list[dict[str, str]]:
    with (shards / REPORT_FILE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_odd_images_are_reported_and_only_good_ones_packed(source: Path, tmp_path: Path) -> None:
    folder = source / "train" / WNIDS[1]
    (folder / "n02105855_2933.JPEG").write_bytes(encoded(pixels(1), "PNG"))
    (folder / "cut.JPEG").write_bytes(jpeg(1)[:-60])
    (folder / "empty.JPEG").write_bytes(b"")
    (folder / "tail, with a comma.JPEG").write_bytes(jpeg(1) + b"x")
    index = load_index(pack_folder(source, tmp_path / "s"))
    assert index.counts["train"] == {"kept": 17, "repaired": 1, "rejected": 2}
    assert index.split("train").num_samples == 18
    rows = report(index.root)
    assert [(Path(row["path"]).name, row["action"]) for row in rows] == [
        ("cut.JPEG", "rejected"),
        ("empty.JPEG", "rejected"),
        ("n02105855_2933.JPEG", "repaired"),
        ("tail, with a comma.JPEG", "kept"),
    ]
    assert {row["split"] for row in rows} == {"train"}
    assert all(row["reason"] and row["path"].startswith("train/") for row in rows)
    with tarfile.open(index.shard_path("train", 0)) as tar:
        names = tar.getnames()
        png = tar.extractfile("n02105855_2933.jpg")
        assert png is not None
        assert png.read(2) == b"\xff\xd8"
    assert not any("cut" in name or "empty" in name for name in names)


def test_a_class_that_is_empty_after_checking_keeps_its_label(source: Path, tmp_path: Path) -> None:
    for path in (source / "train" / WNIDS[1]).iterdir():
        path.write_bytes(b"<html>")
    index = load_index(pack_folder(source, tmp_path / "s"))
    assert index.classes.wnids == WNIDS
    assert set(index.split("train").samples["label"].tolist()) == {0, 2, 3}
    assert index.counts["train"]["rejected"] == 4


def test_a_shard_without_a_good_image_is_not_listed(tmp_path: Path) -> None:
    source = make_heavy_source(tmp_path / "source", 36, 16)
    task = plan(open_source(source), tmp_path / "s", SMALL)[1]
    for image in task.images:
        path = source / image.path
        path.write_bytes(bytes(path.stat().st_size))
    index = pack(open_source(source), tmp_path / "s", SMALL, 1, quiet)
    listed = [shard.name for shard in index.split("train").shards]
    assert listed == ["000000.tar", "000002.tar", "000003.tar"]
    assert sorted(path.name for path in (tmp_path / "s" / "train").glob("*.tar")) == listed
    assert set(index.split("train").samples["shard"].tolist()) == {0, 1, 2}
    assert load_index(index.root).split("train").num_samples == 36 - len(task.images)
    assert verify(index, 1, quiet) == []
    before = snapshot(index.root)
    pack(open_source(source), tmp_path / "s", SMALL, 1, quiet)
    assert snapshot(index.root) == before


def test_a_split_without_a_good_image_is_refused_and_the_report_stands(
    source: Path, tmp_path: Path
) -> None:
    for path in (source / "val").rglob("*.JPEG"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"^not one image of val was accepted: see .*report\.csv"):
        pack_folder(source, tmp_path / "s")
    assert len(report(tmp_path / "s")) == 8
    assert not (tmp_path / "s" / INDEX_FILE).exists()


def test_a_file_that_cannot_be_read_is_a_finding(source: Path, tmp_path: Path) -> None:
    found = open_source(source)
    gone = source / found.splits["train"][0].path
    gone.unlink()
    index = pack(found, tmp_path / "s", PackSettings(), 1, quiet)
    assert index.counts["train"]["rejected"] == 1
    assert report(index.root)[0]["reason"].startswith("cannot be read: ")


def test_a_source_that_is_gone_ends_the_packing(source: Path, tmp_path: Path) -> None:
    found = open_source(source)
    source.rename(tmp_path / "unplugged")
    with pytest.raises(OSError, match="the source is gone"):
        pack(found, tmp_path / "s", PackSettings(), 1, quiet)
    assert not (tmp_path / "s" / INDEX_FILE).exists()


@pytest.mark.parametrize(
    "name", ["a b", "it's", "50%20", "a&b", "x#1", "数据 集", "{000..001}", "dotted.folder.v1"]
)
def test_odd_characters_in_any_part_of_a_path_are_packed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "train" / name
    folder.mkdir(parents=True)
    (folder / f"{name}.JPEG").write_bytes(jpeg(1))
    index = load_index(pack_folder(tmp_path / name, tmp_path / "out" / name))
    (sample,) = read_samples(index.shard_path("train", 0))
    assert "." not in sample.key
    assert index.classes.wnids == (name,)
    assert verify(index, 1, quiet) == []


@pytest.mark.skipif(
    ON_WINDOWS or sys.platform == "darwin", reason="names are always Unicode on this system"
)
def test_a_name_that_is_no_utf8_is_packed_and_reported(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/s/train/caf\xe9"
    os.makedirs(folder)  # noqa: PTH103 - a Path holds no bytes
    (Path(os.fsdecode(folder)) / os.fsdecode(b"\xff.JPEG")).write_bytes(jpeg(1) + b"x")
    index = load_index(pack_folder(tmp_path / "s", tmp_path / "out"))
    assert index.classes.wnids == ("caf\udce9",)
    assert report(index.root)[0]["path"] == "train/caf\\udce9/\\udcff.JPEG"


def test_paths_over_260_characters_are_packed(tmp_path: Path) -> None:
    part = "fifty characters of a folder name and a few more .."[:50]
    deep = local_path(tmp_path / "s").joinpath("train", WNIDS[0], *[part + "x"] * 5)
    deep.mkdir(parents=True)
    (deep / "a.JPEG").write_bytes(jpeg(1))
    dst = local_path(tmp_path / "out").joinpath(*[part + "x"] * 5)
    index = load_index(pack_folder(tmp_path / "s", dst))
    assert index.split("train").num_samples == 1
    assert verify(index, 1, quiet) == []


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=60), st.integers(1, 9))
def test_shard_boundaries_are_complete_disjoint_and_never_empty(
    sizes: list[int], shard_mb: int
) -> None:
    cuts = plan_shards(sizes, shard_mb * 1_000_000)
    assert [i for cut in cuts for i in range(len(sizes))[cut]] == list(range(len(sizes)))
    assert all(cut.start < cut.stop for cut in cuts)
    for cut in cuts:
        assert sum(sizes[cut]) <= shard_mb * 1_000_000 + 2 * max(sizes)


def test_a_large_split_is_cut_at_the_wanted_size_and_a_small_one_finer() -> None:
    assert len(plan_shards([110_000] * 20_000, 128_000_000)) == 18
    assert len(plan_shards([110_000] * 2_000, 128_000_000)) == 8
    assert len(plan_shards([110_000] * 50, 128_000_000)) == 2
    assert len(plan_shards([2_000] * 50, 128_000_000)) == 1


def test_the_order_depends_on_seed_and_paths_only() -> None:
    images = [SourceImage(path=f"train/a/{i}.jpg", label=0, num_bytes=i) for i in range(200)]
    order = shuffled(images, 0)
    assert sorted(order, key=images.index) == images
    assert order != images
    assert shuffled(images[::-1], 0) == order
    assert shuffled(images, 1) != order
    assert shuffled([replace(image, num_bytes=1) for image in images], 0) == [
        replace(image, num_bytes=1) for image in order
    ]


@pytest.mark.parametrize("shard_bytes", [0, 999_999, 16_000_000_001])
def test_a_shard_size_out_of_range_is_refused(shard_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"--shard-mb must be in 1\.\.16000, got "):
        PackSettings(shard_bytes=shard_bytes)


def test_a_set_smaller_than_a_shard_is_one_shard(tmp_path: Path) -> None:
    make_source(tmp_path / "s", num_train=1, num_val=1, num_classes=1)
    index = load_index(pack_folder(tmp_path / "s", tmp_path / "out"))
    assert [len(entry.shards) for entry in index.splits.values()] == [1, 1]
