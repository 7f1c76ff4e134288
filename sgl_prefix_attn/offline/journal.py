"""The checkpoint of a batch run: an append-only file of finished requests, each written to disk before it counts.

A killed run leaves at most one incomplete line at the end. The next run cuts it off, once the rest has been
found to be a journal: a file of the user's own stays as it is. Every line ends with a checksum of what it says.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

_VERSION = 2
# Start of every header.
_HEADER = b'{"version":2,"input_sha256":"'
_ERRORS_FILE = "the errors file"


class JournalError(Exception):
    """The journal cannot be used; the message gives the reason and the remedy."""


@dataclass(frozen=True)
class Finished:
    """A finished request.

    Attributes:
        line: its line in the input, from 1.
        ok: whether it succeeded.
        record: the line of the output or of the errors file.
    """

    line: int
    ok: bool
    record: dict[str, Any]


class Journal:
    """Opens the journal at `path`, or starts one, for an input file and a model.

    A journal of another input, model or job that has no results is overwritten.

    Args:
        source: the input file.
        errors: the errors file of the job, which a later run may replace.
        kept: files that only the job that they belong to may replace: a new job is refused if one exists.
        job: what else a run has to have in common with those before it, by the name that an error gives it.
        anew: discards the results of a journal, whoever wrote it.

    Attributes:
        finished: lines of the input that are finished.

    Raises:
        JournalError: the journal belongs to another run, is damaged, or is in use by a running process.
        FileExistsError: one of `kept` exists and does not belong to this job.
    """

    def __init__(
        self,
        path: Path,
        source: Path,
        model: str,
        errors: Path | None = None,
        kept: Sequence[Path] = (),
        job: Mapping[str, str] | None = None,
        *,
        anew: bool = False,
    ) -> None:
        self.path = path
        self._kept = kept
        self._anew = anew
        self.finished: set[int] = set()
        self._fd = self._locked()
        if os.path.isdir(model):
            model = os.path.normpath(model)  # with a slash at its end it is the same
        try:
            of_errors = {} if errors is None else {_ERRORS_FILE: _name(errors)}
            self._open(_digest(source), model, {**of_errors, **(job or {})})
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, results: Sequence[Finished]) -> None:
        """Adds finished requests; when it returns, they are on disk."""
        lines = [_sealed({"line": r.line, "ok": r.ok, "record": r.record}) for r in results]
        self._write(b"".join(lines))
        self.finished.update(result.line for result in results)

    def read(self) -> Iterator[tuple[int, Finished]]:
        """The finished requests and their byte offsets, in the order in which they finished."""
        with self.path.open("rb") as file:
            offset = len(file.readline())
            for text in file:
                yield offset, self._finished(text, offset)
                offset += len(text)

    def read_at(self, offsets: Sequence[int]) -> Iterator[Finished]:
        """The finished requests at these byte offsets, in this order."""
        with self.path.open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                yield self._finished(file.readline(), offset)

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """Deletes the file. Call it when all results have been written to the output."""
        self.path.unlink(missing_ok=True)

    def _locked(self) -> int:
        """The open file, with the lock on what is at `path`."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise JournalError(f"{self.path}: another process is running this batch") from None
            except FileNotFoundError:
                pass
            except OSError as error:
                os.close(fd)
                what = f"{self.path}: this file system cannot lock files ({error.strerror})"
                raise JournalError(f"{what}; choose an output on another one") from error
            os.close(fd)  # of a run that ended in between and deleted it: its lock would keep nobody out

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _open(self, digest: str, model: str, job: dict[str, str]) -> None:
        start = os.pread(self._fd, len(_HEADER), 0)
        if not _HEADER.startswith(start):
            raise self._damaged("line 1", start)
        header: dict[str, Any] = {}
        end = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(() if self._anew else file, 1):
                if not text.endswith(b"\n"):
                    if _is_whole(text[:-1] + b"\n"):  # a torn line lacks more than that
                        raise self._damaged("its last byte", b"")
                    break
                entry = self._parsed(text, f"line {number}")
                if number == 1:
                    header = entry
                else:
                    self.finished.add(entry["line"])
                end += len(text)
        wrong = _difference(header, {"input_sha256": digest, "model": model, "job": job}) if header else None
        if wrong is not None and self.finished:
            raise JournalError(f"{self.path} was written {wrong}; --restart starts anew, or choose another output")
        # A run without results, because of an error in its input or model, has nothing to lose.
        if header and wrong is None:
            os.ftruncate(self._fd, end)
            return
        try:
            _refuse_existing(self._kept)
        except FileExistsError:
            if not header:
                self.remove()  # or the next run would take the existing files for its own
            raise
        os.ftruncate(self._fd, 0)
        self._start(digest, model, job)

    def _start(self, digest: str, model: str, job: dict[str, str]) -> None:
        """Writes the header to the empty file."""
        self._write(_sealed({"version": _VERSION, "input_sha256": digest, "model": model, "job": job}))
        _sync_folder(self.path)

    def _parsed(self, text: bytes, where: str) -> dict[str, Any]:
        """What a line says. Raises JournalError unless it is as it was written."""
        if not _is_whole(text):
            raise self._damaged(where, text)
        value: dict[str, Any] = orjson.loads(text)
        return value

    def _finished(self, text: bytes, offset: int) -> Finished:
        entry = self._parsed(text, f"byte {offset}")
        return Finished(entry["line"], entry["ok"], entry["record"])

    def _damaged(self, where: str, text: bytes) -> JournalError:
        line = re.match(rb'{"line":(\d+),', text)
        if line is not None:
            where += f" (the result of line {int(line[1])} of the batch file)"
        what = f"{self.path}, {where}: not what a batch wrote there"
        return JournalError(f"{what}; delete the file to start anew, or choose another output")


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} exists; --overwrite replaces it")


def may_replace(journal: Path, errors: Path) -> bool:
    """Whether `errors` is the errors file of the job with this journal. Opening a damaged one gives the error."""
    try:
        with journal.open("rb") as file:
            return bool(orjson.loads(file.readline())["job"].get(_ERRORS_FILE) == _name(errors))
    except FileNotFoundError:
        return False
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError):
        return True


def has_results(journal: Path) -> bool:
    """Whether a journal has finished requests."""
    try:
        with journal.open("rb") as file:
            return any(text.startswith(b'{"line":') and text.endswith(b"\n") for text in file)
    except OSError:
        return False


def _name(path: Path) -> str:
    return os.fsencode(path.resolve()).decode(errors="replace")


def unfinished(path: Path) -> Path:
    """The name of a file while `write_lines` writes it."""
    return path.with_name(path.name + ".unfinished")


def check_writable(path: Path) -> None:
    """Raises OSError if `write_lines` cannot write the file."""
    scratch = unfinished(path)
    with scratch.open("ab"):
        pass
    scratch.unlink()


def write_lines(path: Path, lines: Iterator[bytes]) -> int:
    """Writes a file atomically: it is complete, or not written at all. Returns the number of lines."""
    scratch = unfinished(path)
    count = 0
    try:
        with scratch.open("wb") as file:
            for line in lines:
                file.write(line + b"\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        scratch.unlink(missing_ok=True)  # a full disk needs the room
        raise
    scratch.replace(path)
    _sync_folder(path)
    return count


def _sealed(entry: dict[str, Any]) -> bytes:
    """A line of the journal. Its checksum is that of all that stands before it."""
    text = orjson.dumps(entry)[:-1] + b',"sum":"'
    return text + _sum(text) + b'"}\n'


def _is_whole(line: bytes) -> bool:
    text = line[:-_SEAL_BYTES]
    return line == text + _sum(text) + b'"}\n' and text != b""


def _sum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()


_SEAL_BYTES = len(_sum(b"") + b'"}\n')


def _difference(header: dict[str, Any], now: dict[str, Any]) -> str | None:
    """How another job wrote a journal; None if it is the same job."""
    if header["input_sha256"] != now["input_sha256"]:
        return "for another input file, or the file was changed"
    if header["model"] != now["model"]:
        return f"with the model {header['model']!r}, not {now['model']!r}"
    before = header["job"]
    names = [name for name in {**before, **now["job"]} if before.get(name) != now["job"].get(name)]
    return (
        "; ".join(f"with {name} {before.get(name, 'none')}, not {now['job'].get(name, 'none')}" for name in names)
        or None
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
