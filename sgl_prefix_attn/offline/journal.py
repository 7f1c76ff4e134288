"""The checkpoint of a batch run: an append-only file with every finished request, on disk before it counts.

Killed at any moment, a run leaves at most one torn line at the end, which is cut off when the next run opens the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

_VERSION = 1
# Begins the line of a run with another errors file than the first one's, which the header has.
_ERRORS = b'{"errors":'


class JournalError(Exception):
    """The journal cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Finished:
    """A finished request: its line in the input, whether it succeeded, and what to write for it."""

    line: int
    ok: bool
    record: dict[str, Any]


class Journal:
    """Opens the journal at `path`, or starts one, for the input file `source` and `model`.

    One without results is rewritten if it is another input's or model's.

    Args:
        errors: the errors file that this run writes, so that a later one may replace it.

    Attributes:
        finished: lines of the input that are done.
        created: when the job was started first, in seconds since 1970.

    Raises:
        JournalError: it is another run's, broken, or in use by a process that runs.
    """

    def __init__(self, path: Path, source: Path, model: str, errors: Path | None = None) -> None:
        self.path = path
        self._errors = None if errors is None else _name(errors)
        self.finished: set[int] = set()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise JournalError(f"{path}: another process is running this batch") from None
        self.created = 0
        try:
            self._open(_digest(source), model)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, results: Sequence[Finished]) -> None:
        """Adds finished requests; when it returns, they are on disk."""
        lines = [orjson.dumps({"line": r.line, "ok": r.ok, "record": r.record}) + b"\n" for r in results]
        self._write(b"".join(lines))
        self.finished.update(result.line for result in results)

    def read(self) -> Iterator[tuple[int, Finished]]:
        """The finished requests with the offset of each, in the order in which they finished."""
        with self.path.open("rb") as file:
            offset = len(file.readline())
            for text in file:
                if not _is_errors_line(text):
                    yield offset, _finished(text)
                offset += len(text)

    def read_at(self, offsets: Sequence[int]) -> Iterator[Finished]:
        """The finished requests at these offsets, in this order."""
        with self.path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield _finished(file.readline())

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """To be called when everything it holds has been written elsewhere."""
        self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def _open(self, digest: str, model: str) -> None:
        if self._cut_torn_line() == 0:
            self._start(digest, model)
            return
        with self.path.open("rb") as file:
            header = self._parsed(file.readline(), 1)
            expected: tuple[tuple[str, object, str], ...] = (
                ("version", _VERSION, "by another version of this program"),
                ("input_sha256", digest, "for another input file, or the file was changed"),
                ("model", model, f"with the model {header.get('model')!r}, not {model!r}"),
            )
            wrong = next((what for key, value, what in expected if header.get(key) != value), None)
            first = file.readline()
            # A run that never got to a result, for a mistake in its input or model, has nothing to lose.
            empty = not first and header.get("version") == _VERSION and "input_sha256" in header
            if empty and (wrong is not None or header.get("errors") != self._errors):
                os.ftruncate(self._fd, 0)
                self._start(digest, model)
                return
            if wrong is not None:
                raise JournalError(
                    f"{self.path} was written {wrong}; delete it to start anew, or choose another output"
                )
            self.created = int(header["created"])
            for number, text in enumerate(itertools.chain([first] if first else [], file), 2):
                entry = self._parsed(text, number)
                if not _is_errors_line(text):
                    self.finished.add(int(entry["line"]))
        if self._errors is not None and self._errors not in (_errors_files(self.path) or [self._errors]):
            self._write(orjson.dumps({"errors": self._errors}) + b"\n")

    def _start(self, digest: str, model: str) -> None:
        """Writes the header to the empty file."""
        self.created = int(time.time())
        new = {"version": _VERSION, "input_sha256": digest, "model": model, "created": self.created}
        if self._errors is not None:
            new["errors"] = self._errors
        self._write(orjson.dumps(new) + b"\n")
        _sync_folder(self.path)

    def _parsed(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            return dict(orjson.loads(text))
        except (orjson.JSONDecodeError, TypeError, ValueError) as error:
            raise JournalError(
                f"{self.path}, line {number}: not readable ({error}); delete the file to start anew"
            ) from error

    def _cut_torn_line(self) -> int:
        """Cuts off what follows the last line end; returns the length that is left."""
        size = os.fstat(self._fd).st_size
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
        return end


def may_replace(journal: Path, errors: Path) -> bool:
    """Whether `errors` is an errors file of the job with this journal, if there is one. Older ones do not say."""
    if not journal.exists():
        return False
    files = _errors_files(journal)
    return files is None or _name(errors) in files


def _errors_files(journal: Path) -> list[str] | None:
    """The errors files of a job's runs so far, None if its journal does not say."""
    with journal.open("rb") as file:
        try:
            found = [orjson.loads(file.readline())["errors"]]
            return found + [orjson.loads(text)["errors"] for text in file if _is_errors_line(text)]
        except (orjson.JSONDecodeError, TypeError, KeyError):  # torn, or none: whoever opens it sees what it is
            return None


def _is_errors_line(text: bytes) -> bool:
    return text.startswith(_ERRORS) and text.endswith(b"\n")


def _name(path: Path) -> str:
    return os.fsencode(path.resolve()).decode(errors="replace")


def unfinished(path: Path) -> Path:
    """What `write_lines` calls the file until it is whole."""
    return path.with_name(path.name + ".unfinished")


def write_lines(path: Path, lines: Iterator[bytes]) -> int:
    """Writes a file so that it is there whole or not at all; returns the number of lines."""
    scratch = unfinished(path)
    count = 0
    with scratch.open("wb") as file:
        for line in lines:
            file.write(line + b"\n")
            count += 1
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    _sync_folder(path)
    return count


def _finished(text: bytes) -> Finished:
    entry = orjson.loads(text)
    return Finished(entry["line"], entry["ok"], entry["record"])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest_310(file)


def _digest_310(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
