from __future__ import annotations

import re
from pathlib import Path

import pytest

from prep.labels import ClassTable, labels_for, read_class_names, read_val_labels

TABLE = ClassTable(wnids=("n01440764", "n02102040", "n02979186"))


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "val_label.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        "a.JPEG 0\nb.JPEG 2\n",
        "a.JPEG n01440764\nb.JPEG n02979186\n",
        "val/a.JPEG 0\r\nval\\b.JPEG\t2\r\n",
        "\ufeff\n  a.JPEG   0  \n\nb.JPEG 02",
    ],
    ids=["index", "wnid", "folders and CRLF", "byte order mark and blanks"],
)
def test_each_form_of_a_label_file_gives_the_same(tmp_path: Path, content: str) -> None:
    labels = read_val_labels(written(tmp_path, content), TABLE)
    assert labels == {"a.JPEG": 0, "b.JPEG": 2}


def test_a_name_may_hold_blanks_and_any_script(tmp_path: Path) -> None:
    path = written(tmp_path, "我的 图片 1.JPEG 1\n")
    assert read_val_labels(path, TABLE) == {"我的 图片 1.JPEG": 1}


def test_the_same_line_twice_is_no_contradiction(tmp_path: Path) -> None:
    assert read_val_labels(written(tmp_path, "a 1\na 1\n"), TABLE) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a.JPEG\n", ":1: 'a.JPEG' is not `name index` or `name wnid`"),
        ("a 0\nb n99999999\n", ":2: 'n99999999' is neither an index nor one of the set's wnids"),
        ("a -1\n", ":1: '-1' is neither an index nor one of the set's wnids"),
        ("a 1.0\n", ":1: '1.0' is neither"),
        (
            "a 3\n",
            ":1: label 3 is outside 0..2; indices count from 0, "
            "in the order of the sorted wnids of train",
        ),
        ("a 0\n\nval/a 1\n", ":3: 'a' has label 0 above and 1 here"),
        (b"a\xff\xfe 0\n", " is not UTF-8 text: "),
        ("a 0".encode("utf-16"), " is not UTF-8 text: "),
    ],
)
def test_a_bad_line_is_refused_with_its_place(
    tmp_path: Path, content: str | bytes, text: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match=re.escape(f"{path}{text}")):
        read_val_labels(path, TABLE)


def test_a_number_that_is_a_class_name_with_another_label_is_refused(tmp_path: Path) -> None:
    table = ClassTable(wnids=tuple(sorted(str(number) for number in range(11))))
    assert read_val_labels(written(tmp_path, "a 0\n"), table) == {"a": 0}
    with pytest.raises(ValueError, match="'10' is a class folder with label 2, and an index too"):
        read_val_labels(written(tmp_path, "a 10\n"), table)


def test_every_image_needs_a_label() -> None:
    assert labels_for(["a", "b"], {"b": 1, "a": 0, "c": 2}, "x") == {"a": 0, "b": 1}
    with pytest.raises(
        ValueError,
        match=r"^x has no label for 2 of 3 validation images, for example 'b': "
        "every image needs a line `name index`$",
    ):
        labels_for(["a", "b", "c"], {"a": 0}, "x")


def test_class_names_follow_the_wnid(tmp_path: Path) -> None:
    path = written(tmp_path, "n01440764 tench, Tinca tinca\nn02102040\tspringer\nn02979186\n")
    assert read_class_names(path) == {
        "n01440764": "tench, Tinca tinca",
        "n02102040": "springer",
        "n02979186": "",
    }


def test_a_class_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "n1 a\nn1 b\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: class 'n1' stands here twice")):
        read_class_names(path)


@pytest.mark.parametrize(
    ("wnids", "text"),
    [
        ((), "the class table is empty"),
        (("b", "a"), "is not sorted or names a class twice"),
        (("a", "a"), "is not sorted or names a class twice"),
    ],
)
def test_a_table_in_another_order_is_refused(wnids: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ClassTable(wnids=wnids)


def test_labels_are_places_in_the_sorted_wnids() -> None:
    assert TABLE.label_of() == {"n01440764": 0, "n02102040": 1, "n02979186": 2}
