"""The runner on engines without a model: nothing lost, nothing repeated, bad lines stand aside, groups stay whole."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgl_prefix_attn.offline.engines import EngineError
from sgl_prefix_attn.offline.journal import Finished, Journal, may_replace
from sgl_prefix_attn.offline.runner import journal_of
from tests.offline import batches, fake_engine
from tests.offline.fake_engine import engines_of_groups, executed, run

REPOSITORY = Path(__file__).parents[2]


def test_results_are_those_of_the_requests_in_the_order_of_the_input(tmp_path):
    lines = batches.grouped(60)
    source = batches.write(tmp_path / "in.jsonl", lines)
    summary = run(source, tmp_path / "out.jsonl")
    results = batches.read(tmp_path / "out.jsonl")
    assert [result["custom_id"] for result in results] == [line["custom_id"] for line in lines]
    for line, result in zip(lines, results, strict=True):
        body, request = result["response"]["body"], line["body"]
        expected = fake_engine.tokens_for([*request["prompt"], 0], request["max_tokens"])
        assert body["choices"][0]["token_ids"] == list(expected)
        assert body["usage"]["prompt_tokens"] == len(request["prompt"])
        assert result["error"] is None
    assert (summary.requests, summary.failed, summary.resumed) == (60, 0, 0)
    assert not (tmp_path / "out.jsonl.journal").exists()
    assert not (tmp_path / "out.errors").exists()


def test_as_they_finish_unless_ordered(tmp_path):
    source = batches.write(tmp_path / "in.jsonl", batches.grouped(60))
    run(source, tmp_path / "out.jsonl", ordered=False)
    done = [prompt for _, prompt in executed(tmp_path / "out.jsonl")]
    by_id = {line["custom_id"]: str(line["body"]["prompt"]) for line in batches.read(source)}
    assert [by_id[result["custom_id"]] for result in batches.read(tmp_path / "out.jsonl")] == done


def test_the_saving_is_that_of_requests_with_one_sample(tmp_path):
    shared = list(range(100))
    lines = [batches.line(n, [*shared, 100 + n], n=1 + n % 2) for n in range(8)]
    summary = run(batches.write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert (summary.prompt_tokens, summary.single_tokens) == (8 * 101, 4 * 101)
    assert summary.saving == 0  # the engine without a model has no cache
    assert 3 * 100 <= summary.shared_tokens <= 4 * 100
    only = run(batches.write(tmp_path / "n.jsonl", lines[1::2]), tmp_path / "n.out.jsonl")
    assert (only.prompt_tokens, only.saving, only.possible_saving) == (4 * 101, 0, 0)


def test_bad_lines_stand_aside_and_the_rest_runs(tmp_path):
    lines = [
        batches.line(0, [1, 2]),
        "{malformed",
        batches.line(0, [3]),  # its custom_id is taken
        batches.line(3, [4] * 500),  # oversized
        batches.line(4, [4] * 10, max_tokens=395),  # with its output it is
        batches.line(5, [5], max_tokens=0),
        batches.line(6, "text, but there is no tokenizer"),
        batches.line(7, [fake_engine.REFUSED_TOKEN]),
        batches.line(8, [8], surprise=1),
    ]
    source = batches.write(tmp_path / "in.jsonl", lines)
    summary = run(source, tmp_path / "out.jsonl")
    assert [r["custom_id"] for r in batches.read(tmp_path / "out.jsonl")] == ["request-0", "request-8"]
    errors = {entry["line"]: entry["error"] for entry in batches.read(tmp_path / "out.errors")}
    assert {number: error["code"] for number, error in errors.items()} == {
        2: "malformed_json", 3: "duplicate_custom_id", 4: "prompt_too_long", 5: "prompt_too_long", 6: "invalid_request",
        7: "invalid_request", 8: "engine_error",
    }  # fmt: skip
    assert errors[4]["message"] == (
        "line 4: a prompt of 500 tokens and 4 tokens of output does not fit: the engine has room for 400 tokens of both"
    )
    assert "the model has no tokenizer" in errors[7]["message"]
    assert errors[8]["message"] == "line 8: no such prompts here"
    assert summary.failed == 7
    assert summary.ignored == {"surprise": 1}


def test_without_a_usable_line_no_engine_loads(tmp_path):
    source = batches.write(tmp_path / "in.jsonl", ["{malformed", batches.line(1, [1], max_tokens=0)])
    summary = run(source, tmp_path / "out.jsonl")
    assert (summary.requests, summary.failed) == (2, 2)
    assert not (tmp_path / "out.jsonl.executed").exists()
    only_form = batches.write(tmp_path / "form.jsonl", ["{malformed"])

    def none(*_):
        raise AssertionError("an engine starts")

    assert run(only_form, tmp_path / "out2.jsonl", start=none).failed == 1


def test_no_group_is_split_over_engines(tmp_path):
    source = batches.write(tmp_path / "in.jsonl", batches.grouped(120, groups=12))
    run(source, tmp_path / "out.jsonl", engines=3)
    engines = engines_of_groups(tmp_path / "out.jsonl")
    assert [len(of_group) for of_group in engines] == [1] * 12
    assert set.union(*engines) == {0, 1, 2}


def test_an_empty_batch_has_an_empty_output(tmp_path):
    source = batches.write(tmp_path / "in.jsonl", [])
    run(source, tmp_path / "out.jsonl")
    assert batches.read(tmp_path / "out.jsonl") == []


def test_the_output_of_a_run_that_ended_since_the_arguments_were_checked_is_kept(tmp_path):
    first, second = (batches.write(tmp_path / f"{n}.jsonl", [batches.line(n, [n])]) for n in (1, 2))
    output = tmp_path / "out.jsonl"
    run(first, output)
    with pytest.raises(FileExistsError, match=r"out\.jsonl exists; --overwrite replaces it"):
        run(second, output)
    assert [entry["custom_id"] for entry in batches.read(output)] == ["request-1"]
    run(second, output, overwrite=True)
    assert [entry["custom_id"] for entry in batches.read(output)] == ["request-2"]


def test_when_an_engine_dies_the_next_run_goes_on(tmp_path):
    lines = [*batches.grouped(100), batches.line(100, [fake_engine.DEADLY_TOKEN])]
    source, output = batches.write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with pytest.raises(EngineError, match="engine 0 ended with status 3") as error:
        run(source, output, seconds=0.001)
    assert "the engine has found something deadly" in str(error.value)
    assert not output.exists()
    journal = tmp_path / "out.jsonl.journal"
    assert may_replace(journal, output.with_suffix(".errors"))
    assert not may_replace(journal, tmp_path / "other.errors")
    before = len(batches.read(journal)) - 1
    summary = run(source, output)
    assert summary.resumed == before
    assert len(batches.read(output)) == 101


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors"])
def test_a_file_that_cannot_be_written_is_found_before_engines_start(tmp_path, name):
    source = batches.write(tmp_path / "in.jsonl", [batches.line(0, [1])])
    (tmp_path / f"{name}.unfinished").mkdir()
    with pytest.raises(OSError, match=rf"{name}\.unfinished"):
        run(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl.executed").exists()
    assert not journal_of(tmp_path / "out.jsonl").exists()


def test_a_line_that_an_earlier_version_ran_is_no_error_as_well(tmp_path):
    lines = [batches.line(0, [1]), batches.line(1, [2], max_tokens=0)]
    source, output = batches.write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    journal = Journal(tmp_path / "out.jsonl.journal", source, "no-model", output.with_suffix(".errors"))
    journal.append([Finished(2, ok=True, record={"custom_id": "request-1"})])
    journal.close()
    summary = run(source, output)
    assert (summary.requests, summary.resumed, summary.failed) == (2, 1, 0)
    assert [entry["custom_id"] for entry in batches.read(output)] == ["request-0", "request-1"]
    assert not output.with_suffix(".errors").exists()


def kill_and_run(source: Path, output: Path, kills: int, engines: int) -> set[str]:
    """Runs a batch that is killed `kills` times at random moments, then to its end.

    Returns:
        Prompts that were executed though a run before had finished them.
    """
    command = [sys.executable, "-m", "tests.offline.fake_engine", str(source), str(output), str(engines), "0.002"]
    prompts = [str(line["body"]["prompt"]) for line in batches.read(source)]
    rng = random.Random(len(prompts) + engines)
    noted, journal, known = Path(f"{output}.executed"), journal_of(output), []
    for number in range(kills):
        left = len(prompts) - batches.finished(output)
        # Anywhere from before the first request that finishes; the last time after all of them, before the output.
        lines = left if number == kills - 1 else rng.randrange(left // (kills - number) + 1)
        dies = ["--die-at", str(lines), str(rng.randrange(1000))]
        assert subprocess.run([*command, *dies], cwd=REPOSITORY, timeout=120).returncode == -signal.SIGKILL
        assert not output.exists()
        time.sleep(0.05)  # engines die a moment after their parent
        position = noted.stat().st_size if noted.exists() else 0
        entries = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
        known.append((position, {prompts[json.loads(entry)["line"] - 1] for entry in entries}))
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=120)
    again = set()
    for position, finished in known:
        later = noted.read_bytes()[position:].decode().splitlines()
        again |= {text.split(" ", 2)[2] for text in later if text.count(" ") > 2} & finished
    return again


@pytest.mark.parametrize(("count", "kills", "engines"), [(120, 2, 1), (120, 3, 2)])
def test_killed_at_random_moments_it_loses_nothing_and_repeats_nothing(tmp_path, count, kills, engines):
    source = batches.write(tmp_path / "in.jsonl", batches.grouped(count))
    (tmp_path / "unbroken").mkdir()
    unbroken, output = tmp_path / "unbroken" / "out.jsonl", tmp_path / "out.jsonl"
    run(source, unbroken, engines)
    assert kill_and_run(source, output, kills, engines) == set()
    assert batches.results(output) == batches.results(unbroken)
