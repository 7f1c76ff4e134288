"""Files of users: read in one way, checked before a long run, and written whole after it."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_GZIP = b"\x1f\x8b"


def read_text(path: str | Path) -> str:
    """A file of UTF-8 text, without the byte order mark that some editors write at its begin.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is no UTF-8 text.
    """
    return Path(path).read_text(encoding="utf-8-sig")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a file with their numbers from 1 on, without blank ones and without a byte order mark.

    Of a file that gzip has compressed they are those of its content.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is UTF-16 or UTF-32 text, whose lines are no UTF-8.
    """
    with path.open("rb") as file:
        start = file.peek(4)[:4]
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or start[1:3] == b"\0\0" or b"\0" in start[:2]:
        raise ValueError(f"{path}: UTF-16 or UTF-32 text; write it as UTF-8, as with iconv -t UTF-8")
    packed = start[:2] == _GZIP
    with gzip.open(path) if packed else path.open("rb") as file:
        yield from _read_lines(path, file)


def _read_lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    try:
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                yield number, text
    except (EOFError, zlib.error) as error:
        raise OSError(f"{path}: what gzip has compressed is damaged: {error}") from error


def check_writable(path: Path) -> None:
    """Checks a path before a long run, without leaving anything there.

    Raises:
        ValueError: no file can be written there.
    """
    if _is_device(path):
        if not os.access(path, os.W_OK):
            raise ValueError(f"{path}: cannot write to it")
        return
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no folder {folder}")
    if path.is_dir():
        raise ValueError(f"{path}: is a folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{path}: cannot write to {folder}")


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file as a whole. Nothing is left behind if that fails. Pipes and devices are written to.

    Raises:
        ValueError: the file cannot be written; the message says why.
    """
    target = path.resolve()  # a link stays
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        if _is_device(target):
            target.write_bytes(content)
            return
        try:
            beside.write_bytes(content)
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot write {len(content):,} bytes: {error.strerror}") from error


def _is_device(path: Path) -> bool:
    """Whether a path is no file or folder, as /dev/stdout: replacing it would take it from everybody."""
    return path.exists() and not path.is_file() and not path.is_dir()
