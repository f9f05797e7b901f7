from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers import WNIDS, jpeg, make_source
from prep.files import local_path, shown
from prep.sources import Source, open_source

ON_WINDOWS = os.name == "nt"


def labelled(source: Source, split: str) -> dict[str, int]:
    return {image.path: image.label for image in source.splits[split]}


def flatten_val(root: Path) -> dict[str, int]:
    """Turn `val/<wnid>/x` into a flat `val/x`; gives the labels."""
    labels = {}
    for label, wnid in enumerate(WNIDS):
        for path in sorted((root / "val" / wnid).iterdir()):
            path.rename(root / "val" / path.name)
            labels[path.name] = label
        (root / "val" / wnid).rmdir()
    return labels


def write_labels(path: Path, labels: dict[str, int]) -> Path:
    path.write_text("".join(f"{n} {v}\n" for n, v in labels.items()), encoding="utf-8")
    return path


def test_class_folders_are_labelled_by_the_sorted_wnids(source: Path) -> None:
    found = open_source(source)
    assert found.classes.wnids == WNIDS
    assert found.layout == "train: class folders, val: class folders"
    assert found.notes == ()
    assert len(found.splits["train"]) == 16
    assert labelled(found, "val") == {
        f"val/{wnid}/{wnid}_val_{number}.JPEG": label
        for label, wnid in enumerate(WNIDS)
        for number in range(2)
    }
    first = found.splits["train"][0]
    assert first.num_bytes == (source / first.path).stat().st_size


def test_a_flat_val_takes_its_labels_from_val_label_txt(source: Path) -> None:
    labels = flatten_val(source)
    write_labels(source / "val_label.txt", labels)
    found = open_source(source)
    assert found.layout == "train: class folders, val: flat, labels from val_label.txt"
    assert labelled(found, "val") == {f"val/{name}": label for name, label in labels.items()}
    (source / "val_label.txt").rename(source / "val" / "val_label.txt")
    assert labelled(open_source(source), "val") == labelled(found, "val")
    assert open_source(source).notes == ()


def test_val_labels_are_taken_from_the_file_that_is_given(source: Path, tmp_path: Path) -> None:
    labels = flatten_val(source)
    write_labels(source / "val_label.txt", dict.fromkeys(labels, 0))
    other = write_labels(tmp_path / "其他 labels.txt", labels)
    found = open_source(source, other)
    assert labelled(found, "val") == {f"val/{name}": label for name, label in labels.items()}
    assert found.layout.endswith("labels from 其他 labels.txt")


def test_given_labels_win_over_class_folders_under_val(source: Path, tmp_path: Path) -> None:
    names = [path.name for path in sorted((source / "val").rglob("*.JPEG"))]
    given = write_labels(tmp_path / "l.txt", dict.fromkeys(names, 3))
    assert set(labelled(open_source(source, given), "val").values()) == {3}


def test_a_flat_val_without_labels_is_refused(source: Path) -> None:
    flatten_val(source)
    with pytest.raises(ValueError, match=r"val is flat and has no labels: put val_label\.txt"):
        open_source(source)


def test_an_image_without_a_label_is_refused(source: Path) -> None:
    labels = flatten_val(source)
    missing = labels.popitem()[0]
    write_labels(source / "val_label.txt", labels)
    with pytest.raises(ValueError, match=f"no label for 1 of 8 validation images, .*'{missing}'"):
        open_source(source)


def test_a_label_file_that_is_not_there_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--val-labels '.*nowhere\.txt' is not a file"):
        open_source(source, tmp_path / "nowhere.txt")


def test_other_class_folders_under_val_are_refused(source: Path) -> None:
    (source / "val" / WNIDS[1]).rename(source / "val" / "n99999999")
    with pytest.raises(
        ValueError,
        match=r"val has 4 class folders, train has 4 \(missing \['n02102040'\], "
        r"surplus \['n99999999'\]\): they must be the same, else labels would be shifted; "
        "an empty folder is enough for a class without images",
    ):
        open_source(source)


def test_fewer_class_folders_under_val_are_refused(source: Path) -> None:
    for path in (source / "val" / WNIDS[0]).iterdir():
        path.unlink()
    assert open_source(source).notes == ("val: 1 of 4 classes have no image",)
    (source / "val" / WNIDS[0]).rmdir()
    with pytest.raises(ValueError, match="val has 3 class folders, train has 4"):
        open_source(source)


STRAY = (".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX", ".ipynb_checkpoints", ".git", "._x")


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("place", ["", "train", "val", f"train/{WNIDS[0]}", f"val/{WNIDS[3]}"])
def test_stray_files_and_folders_change_nothing(source: Path, name: str, place: str) -> None:
    before = open_source(source)
    if "." in name[1:]:
        (source / place / name).write_bytes(b"x")
    else:
        (source / place / name).mkdir()
        (source / place / name / "x.JPEG").write_bytes(jpeg(1))
    assert open_source(source) == before


def test_stray_files_do_not_make_a_flat_val_a_val_of_classes(source: Path) -> None:
    write_labels(source / "val_label.txt", flatten_val(source))
    before = open_source(source)
    (source / "val" / "__MACOSX").mkdir()
    (source / "val" / ".ipynb_checkpoints").mkdir()
    assert open_source(source) == before


def test_an_empty_class_keeps_its_label(source: Path) -> None:
    for path in (source / "train" / WNIDS[1]).iterdir():
        path.unlink()
    found = open_source(source)
    assert found.classes.wnids == WNIDS
    assert set(labelled(found, "train").values()) == {0, 2, 3}
    assert found.notes == ("train: 1 of 4 classes have no image",)


def test_files_without_an_image_name_are_passed_over_and_told(source: Path) -> None:
    (source / "train" / WNIDS[0] / "notes.txt").write_bytes(b"x")
    (source / "train" / WNIDS[1] / "a.mp4").write_bytes(b"x")
    found = open_source(source)
    assert len(found.splits["train"]) == 16
    assert found.notes == (
        "2 files passed over, since their names are not image names, "
        f"for example train/{WNIDS[1]}/a.mp4",
    )


@pytest.mark.parametrize("name", ["a.jpg", "b.JPG", "c.png", "d.WebP", "e.tiff", "f.g.jpeg"])
def test_images_of_any_suffix_and_depth_are_listed(source: Path, name: str) -> None:
    deep = source / "train" / WNIDS[2] / "images" / "more"
    deep.mkdir(parents=True)
    (deep / name).write_bytes(jpeg(1))
    path = f"train/{WNIDS[2]}/images/more/{name}"
    assert labelled(open_source(source), "train")[path] == 2


def test_only_train_is_accepted_and_told(tmp_path: Path) -> None:
    make_source(tmp_path / "s", num_val=0)
    for wnid in WNIDS:
        (tmp_path / "s" / "val" / wnid).rmdir()
    (tmp_path / "s" / "val").rmdir()
    found = open_source(tmp_path / "s")
    assert list(found.splits) == ["train"]
    assert found.notes == ("no val images in this source: the set will have none",)


def test_only_val_takes_its_classes_from_its_folders_or_a_class_table(source: Path) -> None:
    for path in (source / "train").rglob("*.JPEG"):
        path.unlink()
    for wnid in WNIDS:
        (source / "train" / wnid).rmdir()
    (source / "train").rmdir()
    found = open_source(source)
    assert (found.classes.wnids, list(found.splits)) == (WNIDS, ["val"])
    assert found.notes == ("no train images in this source: the set will have none",)
    wide = (*WNIDS, "n09999999")
    (source / "classes.txt").write_text("\n".join(reversed(wide)), encoding="utf-8")
    with pytest.raises(ValueError, match="val has 4 class folders, train has 5"):
        open_source(source)
    (source / "val" / "n09999999").mkdir()
    assert open_source(source).classes.wnids == wide


def test_a_flat_val_alone_needs_a_class_table(source: Path) -> None:
    labels = flatten_val(source)
    write_labels(source / "val_label.txt", labels)
    (source / "train").rename(source / "other")
    with pytest.raises(ValueError, match=r"the classes are not known: add classes\.txt with one"):
        open_source(source)
    (source / "classes.txt").write_text("\n".join(WNIDS), encoding="utf-8")
    assert set(labelled(open_source(source), "val").values()) == {0, 1, 2, 3}


@pytest.mark.parametrize("file", ["classes.txt", "LOC_synset_mapping.txt", "synset_words.txt"])
def test_class_names_are_taken_from_the_usual_files(source: Path, file: str) -> None:
    text = "".join(f"{wnid} name of {wnid}, other\n" for wnid in (*WNIDS[:3], "n77777777"))
    (source / file).write_text(text, encoding="utf-8")
    names = open_source(source).classes.names
    assert names == {wnid: f"name of {wnid}, other" for wnid in WNIDS[:3]}


def test_a_folder_that_is_no_source_is_refused_with_a_hint(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' has neither a train nor a val folder$"):
        open_source(tmp_path / "empty")
    with pytest.raises(
        ValueError, match="it holds classes such as n01440764: give its parent folder"
    ):
        open_source(source / "train")


def test_a_source_without_an_image_is_refused(tmp_path: Path) -> None:
    make_source(tmp_path / "s", num_train=0, num_val=0)
    with pytest.raises(ValueError, match="holds no image under train or val"):
        open_source(tmp_path / "s")
    for wnid in WNIDS:
        (tmp_path / "s" / "train" / wnid).rmdir()
    with pytest.raises(ValueError, match="train holds no class folders"):
        open_source(tmp_path / "s")


@pytest.mark.parametrize(
    "name", ["a b", "it's", "50%20", "a&b", "x#1", "数据 集", "dotted.folder.v1"]
)
def test_odd_characters_in_any_part_of_a_path_are_listed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "train" / name
    folder.mkdir(parents=True)
    (folder / f"{name}.JPEG").write_bytes(jpeg(1))
    found = open_source(tmp_path / name)
    assert labelled(found, "train") == {f"train/{name}/{name}.JPEG": 0}
    assert shown(found.root) == str(tmp_path / name)
    assert open_source(Path((tmp_path / name).as_uri())) == found


def test_paths_over_260_characters_are_listed(tmp_path: Path) -> None:
    deep = local_path(tmp_path / "s").joinpath(
        "train", WNIDS[0], *["fifty characters of a folder's name " * 1 + "x" * 14] * 5
    )
    deep.mkdir(parents=True)
    (deep / "a.JPEG").write_bytes(jpeg(1))
    (image,) = open_source(tmp_path / "s").splits["train"]
    assert len(image.path) > 260
    assert image.num_bytes == len(jpeg(1))


@pytest.mark.skipif(ON_WINDOWS, reason="Windows gives no links to an ordinary user")
def test_a_dead_link_is_listed_without_a_size(source: Path) -> None:
    (source / "train" / WNIDS[0] / "gone.JPEG").symlink_to(source / "nowhere")
    sizes = {image.path: image.num_bytes for image in open_source(source).splits["train"]}
    assert sizes[f"train/{WNIDS[0]}/gone.JPEG"] == 0


def test_the_counter_is_told_while_listing(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "train" / "n1"
    folder.mkdir(parents=True)
    for number in range(2500):
        (folder / f"{number}.jpg").touch()
    told: list[int] = []
    open_source(tmp_path / "s", count=told.append)
    assert told == [1000, 2000]


def test_the_list_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    for root, numbers in ((tmp_path / "a", range(9)), (tmp_path / "b", range(8, -1, -1))):
        (root / "train" / "n1").mkdir(parents=True)
        for number in numbers:
            (root / "train" / "n1" / f"{number}.jpg").write_bytes(b"x" * number)
    assert open_source(tmp_path / "a").splits == open_source(tmp_path / "b").splits
