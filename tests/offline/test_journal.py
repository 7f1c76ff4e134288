"""What the journal says is finished is on disk, whole; a torn end is cut off, anything else is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
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
    assert again.created == journal.created
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
    with pytest.raises(JournalError, match="for another input file, or the file was changed; delete it"):
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


def test_a_job_may_replace_the_errors_files_of_its_own_runs(source, tmp_path):
    journal, first, second, other = (tmp_path / name for name in ("journal", "first", "b\udce4d", "other"))
    assert not may_replace(journal, first)
    for errors, lines in ((first, (1,)), (second, (2, 3)), (first, (4,)), (second, ())):
        run(source, *lines, errors=errors)
    assert all(may_replace(journal, errors) for errors in (first, tmp_path / "." / "first", second))
    assert not may_replace(journal, other)
    again = open_journal(source)
    assert again.finished == {1, 2, 3, 4}
    assert [entry for _, entry in again.read()] == results(1, 2, 3, 4)
    assert journal.read_bytes().count(b"\n") == 6


def test_a_journal_that_says_nothing_of_errors_files_stays_usable(source, tmp_path):
    journal = run(source, 1)
    assert may_replace(journal, tmp_path / "errors")
    again = open_journal(source, errors=tmp_path / "errors")
    assert again.finished == {1}
    assert may_replace(journal, tmp_path / "others")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1}\n', "was written for another input file"),
        ('{"version": 1}\n{"torn', "was written for another input file"),
        ("Monday: loss 2.1", "line 1: not readable"),
        ("Monday: loss 2.1\nTuesday: loss 2.0", "line 1: not readable"),
        ('{"version": 2, "of": "another program"', "line 1: not readable"),
        ("[1]\n[2", "line 1: not readable"),
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
    with pytest.raises(JournalError, match="line 2: not readable"):
        open_journal(source)


@pytest.mark.parametrize(
    "line",
    ["7", "[1, 2]", '"x"', "null", '[["line", 3]]', '{"line": 3}', '{"line": "3", "ok": true, "record": {}}',
     '{"line": true, "ok": true, "record": {}}', '{"line": 3, "ok": 1, "record": {}}', '{"errors": 5}',
     '{"line": 3, "ok": true, "record": []}', '{"ok": true, "record": {}}'],
)  # fmt: skip
def test_a_line_of_another_shape_is_refused_with_its_number(source, line):
    with run(source, 1).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(JournalError, match=r"line 3: not readable .*; delete the file to start anew"):
        open_journal(source)


@pytest.mark.parametrize("change", [{"created": None}, {"created": "today"}, {"created": True}, {"errors": 7}])
def test_a_header_of_another_shape_is_refused(source, change):
    journal = run(source, 1)
    header, entry = journal.read_text().splitlines()
    journal.write_text(f"{json.dumps(json.loads(header) | change)}\n{entry}\n")
    with pytest.raises(JournalError, match="line 1: not readable"):
        open_journal(source)


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
    for lines in ((), (1,)):  # a journal without results, and one with a result
        run(source, *lines, errors=kept[1])
        other = tmp_path / "other"
        other.touch()
        with pytest.raises(FileExistsError, match="other exists"):
            open_journal(source, errors=other, kept=(kept[0], other))
        other.unlink()
        open_journal(source, errors=other, kept=(kept[0], other)).close()


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
