"""Paths and whole files: long Windows paths, `file:` addresses, write-then-rename."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

_SLASHES = ("/", os.sep)
RENAME_TRIES = 6
"""Tries to put a finished file in place; the waits between them add up to about three seconds."""


def local_path(place: str | os.PathLike[str]) -> Path:
    r"""Turn a path or a `file:` address into an absolute path that may be as long as it likes.

    `E:\x` and `E:/x` are paths, never an address with the scheme "e". On Windows the result carries
    the prefix that lifts the limit of 260 characters.

    Raises:
        ValueError: The address has another scheme than `file`.
    """
    text = os.fspath(place)
    scheme, _, rest = text.partition(":")
    if scheme.lower() == "file" and rest:
        text = _path_of_address(text)
    elif len(scheme) > 1 and scheme.isalnum() and rest[:1] in _SLASHES:
        raise ValueError(f"{text!r} is not on this machine: give a folder or a file: address")
    return _lift_limit(Path(os.path.abspath(text)))  # noqa: PTH100 - resolve() follows links


def _path_of_address(address: str) -> str:
    """Decode `file:///E:/x`, `file://server/share/x` and `file:/x`; `#` and `?` need escapes."""
    parts = urlsplit(address.replace("\\", "/") if os.name == "nt" else address)
    path = unquote(parts.path)
    if os.name == "nt" and len(path) > 2 and path[0] == "/" and path[2] == ":":
        path = path[1:]
    return f"//{parts.netloc}{path}" if parts.netloc not in ("", "localhost") else path


def _lift_limit(path: Path) -> Path:
    r"""Prefix `\\?\` on Windows, where plain paths end at 260 characters."""
    text = str(path)
    if os.name != "nt" or text.startswith("\\\\?\\"):
        return path
    return Path("\\\\?\\UNC" + text[1:] if text.startswith("\\\\") else "\\\\?\\" + text)


def shown(path: Path) -> str:
    r"""Give the path as a person would type it, without the `\\?\` prefix."""
    text = str(path)
    if text.startswith("\\\\?\\UNC\\"):
        return "\\" + text[7:]
    return text.removeprefix("\\\\?\\")


def print_any_path() -> None:
    """Let stdout and stderr take any path: a character that they lack appears as its number.

    Windows starts a piped stream with "surrogateescape", which fails on such a character too.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and (stream.errors == "strict" or os.name == "nt"):
            stream.reconfigure(errors="backslashreplace")


def portable_name(name: str) -> str:
    """Give a name from the file system as it is spelt in UTF-8, whatever the locale."""
    return name if os.name == "nt" else os.fsencode(name).decode("utf-8", "surrogateescape")


def native_path(path: str) -> str:
    """Undo `portable_name`: give the name by which this process opens the file."""
    return path if os.name == "nt" else os.fsdecode(path.encode("utf-8", "surrogateescape"))


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a closed file over its final name.

    Windows refuses while another program (a scanner, a reader) holds the target: tried again for a
    short while.

    Raises:
        PermissionError: The target stayed locked; its name and the cure are in the text.
    """
    for tries in range(RENAME_TRIES):
        try:
            temporary.replace(final)
        except PermissionError as error:  # noqa: PERF203 - a wait dwarfs it
            if tries == RENAME_TRIES - 1:
                raise PermissionError(
                    error.errno,
                    "still open in another program: close it and run the same command again",
                    shown(final),
                ) from error
            time.sleep(0.1 * 2**tries)
        else:
            return


def write_whole(final: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it appears whole or not at all.

    Args:
        final: Where the file shall stand; its folder exists.
        fill: Writes the content to the open binary file it is given.
    """
    temporary = final.with_name(final.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_whole(final: Path, text: str) -> None:
    r"""Write UTF-8 text with plain line feeds, whole or not at all.

    Bytes of a file name that were no UTF-8 appear as `\udcXX`, which JSON reads back as they were.
    """
    write_whole(final, lambda file: file.write(text.encode("utf-8", "backslashreplace")))
