"""The batch command on the real engine: killed at random moments, its output is complete and right."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import ServerOptions, ServerProcess, serve
from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.demo.workload import Request
from tests.offline import batches
from tests.support import forked_server

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
MARK = "SGLANG_BATCH_TEST"  # finds the processes of a run
# A tenth of what 200 requests need: groups come and go.
SERVER = "--max-total-tokens 2048 --max-running-requests 16 --context-length 1024"


def options() -> list[str]:
    return ["--model", str(tiny_model()), "--server-args", SERVER, "--ordered", "--device", "cpu", "--quiet"]


def run(source: Path, output: Path, *more: str) -> str:
    """The command's report; fails the test unless it ends with status 0."""
    command = [sys.executable, "-m", "sgl_prefix_attn", "batch", str(source), str(output), *options(), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=batches.RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def left(is_of_the_run: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if is_of_the_run(process) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue
    return found


def killed(words: list[str], output: Path, number: int, rng: random.Random) -> list[psutil.Process]:
    """What is left of a run that is killed, as the engine loads or at a random moment of the work."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.offline.killed_batch", *words],
        cwd=REPOSITORY, env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _may_kill_at_start(process, number, rng)
    assert process.wait(batches.RUN_SECONDS) == -signal.SIGKILL
    return left(lambda process: process.environ().get(MARK) == mark)


def _may_kill_at_start(process: ServerProcess, number: int, rng: random.Random) -> None:
    if number % 4 == 3:
        time.sleep(rng.random() * 3)  # it loads for longer
        process.send_signal(signal.SIGKILL)


def killed_forked(words: list[str], output: Path, number: int, rng: random.Random) -> list[psutil.Process]:
    """The same of processes that are forks; those that look after others are not seen."""
    run = batches.start_forked("tests.offline.killed_batch", words, output.with_suffix(".killed"))
    _may_kill_at_start(run, number, rng)
    run.wait(batches.RUN_SECONDS)
    return left(lambda process: os.getsid(process.pid) == run.pid)


def run_forked(source: Path, output: Path, *more: str) -> str:
    """As `run`, but without the exit status."""
    return batches.run_forked("sgl_prefix_attn", source, output, *options(), *more)


def resumed(source: Path, output: Path, count: int, kills: int, *, forked: bool = False) -> None:
    """A run that is killed some times, and ends in the end."""
    rng, temporary = random.Random(count), output.with_name("temporary")
    temporary.mkdir()
    for number in range(kills):
        lines = 1 + rng.randrange((count - batches.finished(output)) // (kills - number + 1))
        words = [str(lines), str(number), str(temporary), "batch", str(source), str(output), *options()]
        _, alive = psutil.wait_procs((killed_forked if forked else killed)(words, output, number, rng), timeout=60)
        assert not alive, "processes outlive a killed run"
        assert not list(temporary.glob("prefixpack-batch-*"))
    assert not output.exists()
    done_before = batches.finished(output)
    report = (run_forked if forked else run)(source, output)
    assert f"{count} of {count} requests succeeded" in report
    assert f"{done_before} of them had been finished by earlier runs" in report


def test_killed_once_the_output_has_the_tokens_of_a_stock_server(tmp_path):
    lines, output = batches.grouped(60), tmp_path / "out.jsonl"
    resumed(batches.write(tmp_path / "in.jsonl", lines), output, len(lines), kills=1, forked=True)
    stock = ServerOptions(
        str(tiny_model()), "torch_native", extra=("--max-total-tokens", "16384"),
        starter=forked_server.start_without_warm_up,
    )  # fmt: skip
    with serve(stock) as server:
        bodies = [line["body"] for line in lines]
        answers = replay(server.url, [Request("", body["prompt"], body["max_tokens"]) for body in bodies])
    for line, entry, answer in zip(lines, batches.read(output), answers, strict=True):
        body, (choice,) = entry["response"]["body"], entry["response"]["body"]["choices"]
        assert (entry["custom_id"], choice["finish_reason"]) == (line["custom_id"], "length")
        assert choice["token_ids"] == answer.samples[0].tokens
        prompt, new = len(line["body"]["prompt"]), line["body"]["max_tokens"]
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        assert usage.items() <= body["usage"].items()


def test_with_token_batching_steps_are_larger_and_tokens_the_same(tmp_path):
    source, server = batches.write(tmp_path / "in.jsonl", batches.grouped(60)), f"{SERVER} --chunked-prefill-size 64"
    means = []
    for choice, says in (("off", "is off: it was switched off"), ("on", "is on: ")):
        report = run_forked(source, tmp_path / choice, "--token-batching", choice, "--server-args", server)
        assert f"token batching {says}" in report
        means.append(float(re.search(r"steps with ([0-9.]+) tokens on average", report)[1]))
    assert batches.results(tmp_path / "on") == batches.results(tmp_path / "off")
    assert means[1] > 1.2 * means[0]


@pytest.mark.slow
def test_killed_twenty_times_the_output_is_that_of_an_unbroken_run(tmp_path):
    source = batches.write(tmp_path / "in.jsonl", batches.grouped(2000))
    unbroken, output = tmp_path / "unbroken.jsonl", tmp_path / "out.jsonl"
    run(source, unbroken)
    resumed(source, output, 2000, kills=20)
    assert batches.results(output) == batches.results(unbroken)


def one_prefix(count: int) -> list[dict[str, Any]]:
    """All share 300 tokens."""
    rng = random.Random(count)
    shared = [rng.randrange(10, 900) for _ in range(300)]
    own = [[rng.randrange(10, 900) for _ in range(rng.randrange(4, 30))] for _ in range(count)]
    return [batches.line(number, shared + tokens, max_tokens=8) for number, tokens in enumerate(own)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [batches.grouped, one_prefix])
def test_two_engines_and_the_saving_of_the_groups(tmp_path, make):
    source = batches.write(tmp_path / "in.jsonl", make(200))
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    reports = [run(source, one), run(source, two, "--engines", "2")]
    assert batches.results(one) == batches.results(two)
    for report in reports:
        saved, shared = (
            float(part.split("%")[0].split()[-1]) for part in report.splitlines()[-1].split(";")[1].split(",")
        )
        assert saved >= 0.99 * shared
