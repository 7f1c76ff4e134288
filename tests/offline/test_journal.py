"""What the journal says is finished is on disk, whole; a torn end is cut off, anything else is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
from pathlib import Path

import pytest

from sgl_prefix_attn.offline.journal import Finished, Journal, JournalError, may_replace, write_lines


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("the input\n")
    return path


def open_journal(source, model="model", errors=None, kept=()) -> Journal:
    return Journal(source.with_name("journal"), source, model, errors, kept)


def results(*lines: int) -> list[Finished]:
    return [Finished(line, ok=True, record={"of": line, "text": "äöü\n"}) for line in lines]


def run(source, *lines: int, errors=None) -> Path:
    """A run that comes to these results. Returns the path of its journal."""
    journal = open_journal(source, errors=errors)
    journal.append(results(*lines))
    journal.close()
    return journal.path


def test_what_was_appended_is_there_again(source):
    journal = open_journal(source)
    journal.append(results(3, 1))
    journal.append([Finished(2, ok=False, record={"error": "x"})])
    journal.close()
    again = open_journal(source)
    assert again.finished == {1, 2, 3}
    entries = list(again.read())
    assert [entry for _, entry in entries] == [*results(3, 1), Finished(2, ok=False, record={"error": "x"})]
    assert list(again.read_at([entries[1][0], entries[0][0]])) == results(1, 3)


def test_every_torn_end_is_cut_off_and_nothing_else(source):
    journal = open_journal(source)
    header = journal.path.stat().st_size
    journal.append(results(1))
    middle = journal.path.stat().st_size
    journal.append(results(2))
    journal.close()
    whole = journal.path.read_bytes()
    for end in range(header, len(whole)):
        journal.path.write_bytes(whole[:end])
        again = open_journal(source)
        assert again.finished == ({1} if end >= middle else set())
        again.append(results(7))
        again.close()
        last = open_journal(source)
        assert last.finished == again.finished
        last.close()


def test_a_torn_header_starts_anew(source):
    journal = run(source)
    header = journal.read_bytes()
    for end in range(len(header)):
        journal.write_bytes(header[:end])
        again = open_journal(source)
        assert again.finished == set()
        again.append(results(1))
        again.close()
        assert open_journal(source).finished == {1}
        journal.unlink()


def test_a_changed_input_or_model_is_refused(source):
    run(source, 1)
    with pytest.raises(JournalError, match="with the model 'model', not 'other'"):
        open_journal(source, "other")
    source.write_text("another input\n")
    with pytest.raises(JournalError, match="for another input file, or the file was changed; --restart starts anew"):
        open_journal(source)


def test_a_model_folder_is_the_same_with_a_slash(source, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    journal = open_journal(source, f"{folder}/")
    journal.append(results(1))
    journal.close()
    assert open_journal(source, str(folder)).finished == {1}


def test_a_file_system_without_locks_is_an_error_that_names_the_journal(source, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(JournalError, match=r"journal: this file system cannot lock files \(Function not implemented\)"):
        open_journal(source)


def test_a_start_that_came_to_no_result_does_not_keep_a_corrected_one_from_running(source):
    open_journal(source, "modle").close()
    source.write_text("the corrected input\n")
    run(source, 1)
    again = open_journal(source)
    assert again.finished == {1}
    assert [entry for _, entry in again.read()] == results(1)


def test_a_job_has_one_errors_file(source, tmp_path):
    journal, first, other = (tmp_path / name for name in ("journal", "b\udce4d", "other"))
    assert not may_replace(journal, first)
    run(source, 1, errors=first)
    assert may_replace(journal, tmp_path / "." / first.name)
    assert not may_replace(journal, other)
    with pytest.raises(JournalError, match=r"with the errors file .*d, not .*other; --restart starts anew"):
        open_journal(source, errors=other)
    assert open_journal(source, errors=first).finished == {1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1}\n', "line 1: not what"),
        ('{"version": 1}\n{"torn', "line 1: not what"),
        ("Monday: loss 2.1", "line 1: not what"),
        ("Monday: loss 2.1\nTuesday: loss 2.0", "line 1: not what"),
        ('{"version": 2, "of": "another program"', "line 1: not what"),
        ("[1]\n[2", "line 1: not what"),
    ],
)
def test_a_file_that_is_no_journal_is_not_rewritten(source, text, message):
    path = source.with_name("journal")
    path.write_text(text)
    with pytest.raises(JournalError, match=message):
        open_journal(source)
    assert path.read_text() == text


def test_damage_in_the_middle_is_refused_not_skipped(source):
    journal = run(source, 1, 2)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b"{damaged\n" + lines[2])
    with pytest.raises(JournalError, match="line 2: not what"):
        open_journal(source)


@pytest.mark.parametrize(
    "line",
    ["7", "[1, 2]", '"x"', "null", '[["line", 3]]', '{"line": 3}', '{"line": "3", "ok": true, "record": {}}',
     '{"line": true, "ok": true, "record": {}}', '{"line": 3, "ok": 1, "record": {}}',
     '{"line": 3, "ok": true, "record": []}', '{"ok": true, "record": {}}'],
)  # fmt: skip
def test_a_line_of_another_shape_is_refused_with_its_number(source, line):
    with run(source, 1).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(JournalError, match=r"line 3: not what a batch wrote there; delete the file to start anew"):
        open_journal(source)


def test_6000_changed_bytes_are_found_or_change_nothing_that_is_read(source):
    """At drawn places. The error says where, and to which line of the batch file it belongs where that can be read."""
    rng, journal = random.Random(6000), run(source, *range(1, 41))
    before, undamaged = journal.read_bytes(), state_of(source)
    named = 0
    for _ in range(6000):
        at, change = rng.randrange(len(before)), rng.randrange(1, 256)
        journal.write_bytes(before[:at] + bytes([before[at] ^ change]) + before[at + 1 :])
        with pytest.raises(JournalError, match=r"(line \d+|its last byte).*: not what .*; delete the file") as error:
            state_of(source)
        of = re.search(r"line (\d+) \(the result of line (\d+) of the batch file\)", str(error.value))
        named += of is not None
    assert named > 4500
    journal.write_bytes(before)
    assert state_of(source) == undamaged


def state_of(source) -> tuple[object, ...]:
    """All that a run learns from its journal."""
    journal = open_journal(source)
    try:
        return journal.finished, list(journal.read())
    finally:
        journal.close()


def test_a_byte_that_changes_while_the_batch_runs_is_found_when_the_output_is_written(source):
    journal = open_journal(source)
    journal.append(results(5, 6))
    (_, first), (offset, _) = journal.read()
    text = journal.path.read_bytes()
    journal.path.write_bytes(text.replace(b'"of":6', b'"of":7'))
    assert first == results(5)[0]
    for read in (lambda: list(journal.read()), lambda: list(journal.read_at([offset]))):
        with pytest.raises(JournalError, match=rf"byte {offset} \(the result of line 6 of the batch file\): not what"):
            read()
    journal.close()


def test_another_job_is_refused_and_what_differs_is_named(source):
    def opened(job: dict[str, str]) -> Journal:
        return Journal(source.with_name("journal"), source, "model", job=job)

    first = {"config.json": "one", "dtype": "half"}
    journal = opened(first)
    journal.append(results(1))
    journal.close()
    opened(dict(reversed(first.items()))).close()
    for other, message in (
        ({**first, "config.json": "two"}, "was written with config.json one, not two; --restart starts anew"),
        ({"dtype": "half"}, "with config.json one, not none"),
        ({**first, "a": "b", "dtype": "x"}, "with dtype half, not x; with a none, not b"),
    ):
        with pytest.raises(JournalError, match=message):
            opened(other)


def test_a_full_disk_is_an_error_that_names_the_file(source):
    journal = open_journal(source)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    with pytest.raises(OSError, match="No space left on device") as error:
        journal.append(results(1))
    assert error.value.filename == str(journal.path)
    journal.close()


def test_two_runs_at_once_are_refused(source):
    journal = open_journal(source)
    with pytest.raises(JournalError, match="another process is running this batch"):
        open_journal(source)
    journal.close()
    open_journal(source).close()


def test_a_new_job_is_refused_files_that_exist_and_leaves_no_journal(source, tmp_path):
    kept = (tmp_path / "out", tmp_path / "errors")
    for path in kept:
        path.touch()
        for _ in range(2):
            with pytest.raises(FileExistsError, match=rf"{path.name} exists; --overwrite replaces it"):
                open_journal(source, errors=kept[1], kept=kept)
            assert not source.with_name("journal").exists()
        path.unlink()
    open_journal(source, errors=kept[1], kept=kept).close()
    for path in kept:
        path.touch()
    open_journal(source, errors=kept[1], kept=kept).close()  # the job's own
    with pytest.raises(FileExistsError, match="out exists"):
        open_journal(source, "another model", errors=kept[1], kept=kept)


def test_a_journal_that_its_run_deletes_before_the_lock_is_taken_is_not_used(source, monkeypatch):
    first = open_journal(source)
    first.append(results(1))
    flock, ends = fcntl.flock, [first.close, first.remove]

    def late(fd: int, operation: int) -> None:
        while ends:
            ends.pop()()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = open_journal(source)
    assert second.finished == set()
    assert second.path.stat().st_size > 0
    second.close()


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out"
    path.write_text("before\n")

    def lines():
        yield b"one"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_lines(path, lines())
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]
    assert write_lines(path, iter([b"one", b"two"])) == 2
    assert path.read_text() == "one\ntwo\n"


def test_a_job_starts_anew_if_asked(source):
    """Whatever the journal holds, unless it is no journal; a running job's is not touched."""
    journal = run(source, 1)
    for damage in (b"", b"x"):
        journal.write_bytes(journal.read_bytes()[: -len(damage) or None] + damage)
        running = Journal(journal, source, "another", job={"a": "b"}, anew=True)
        assert running.finished == set()
        with pytest.raises(JournalError, match="another process"):
            Journal(journal, source, "another", anew=True)
        running.append(results(2))
        running.close()
        again = Journal(journal, source, "another", job={"a": "b"})
        assert again.finished == {2}
        again.close()
    journal.write_text("Monday: loss 2.1")
    with pytest.raises(JournalError, match="line 1: not what a batch wrote"):
        Journal(journal, source, "model", anew=True)
    assert journal.read_text() == "Monday: loss 2.1"
