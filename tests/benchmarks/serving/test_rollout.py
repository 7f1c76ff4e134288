"""The rollout benchmark: drawn requests, the measured window, steps of a server's log, one run of the real thing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving import rollout
from benchmarks.serving.backends import UsageError
from benchmarks.serving.drawn import WORKLOADS, Rollout, drawn_requests
from benchmarks.serving.rollout_run import Window, WindowOver, by_route
from benchmarks.serving.step_log import read_steps, summary
from sgl_prefix_attn.demo.client import Answer, Sample
from sgl_prefix_attn.demo.workload import Request, Vocabulary


def test_the_window_begins_with_the_steady_state_and_ends_by_itself() -> None:
    request = Request("r", (1,), 4)
    window = Window(begin_after=1, end_after=9, seconds=0.0)
    sample = Sample("id", [1, 2], 0, 0, "", 0.0, 0.0)
    window.on_token(request, sample)
    assert window.tokens == 0, "tokens before the window do not count"
    window.on_answer(Answer(request, (sample,)))
    sample.tokens = [1, 2, 3, 4, 5]
    with pytest.raises(WindowOver):
        window.on_token(request, sample)
    assert window.tokens == 3


def test_a_whole_run_goes_on_after_its_steady_state() -> None:
    request, sample = Request("r", (1,), 4), Sample("id", [1], 0, 0, "", 0.0, 0.0)
    window = Window(begin_after=1, end_after=2, seconds=None)
    window.on_answer(Answer(request, (sample,)))
    window.on_token(request, sample)
    window.on_answer(Answer(request, (sample,)))
    assert window.over is not None
    sample.tokens = [1, 2, 3]
    window.on_token(request, sample)
    assert window.tokens == 1


def test_every_step_has_one_route() -> None:
    counted = {"routed_steps": {"packed": 3, "stock": 2}, "steps_packed": {"decode": 4, "mixed": 1}}
    wanted = {"routed packed": 3, "routed stock": 2, "packed decode": 1, "packed mixed": 1, "fallback x": 1}
    assert by_route({**counted, "fallbacks": {"x": 1}}) == wanted


def test_a_verify_step_has_one_route() -> None:
    steps = by_route({"routed_steps": {"packed": 100}, "steps_packed": {"verify": 100, "mixed": 3}})
    assert {name: count for name, count in steps.items() if count} == {"routed packed": 100, "packed mixed": 3}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_draws_share_prompts_and_fit_the_context(workload: str) -> None:
    sizes = Rollout(6, 4, 512, 700, 131072, seed=3)
    requests = drawn_requests(workload, sizes, Vocabulary(10, 1000))
    assert requests == drawn_requests(workload, sizes, Vocabulary(10, 1000))
    assert all(len(request.prompt) + request.max_new_tokens <= sizes.longest for request in requests)
    groups = {request.name.rpartition("-")[0] for request in requests}
    assert len({request.prompt[:100] for request in requests}) == len(groups) < len(requests)


def test_accepted_tokens_are_a_mean_over_requests() -> None:
    line = "[2026-11-23 14:41:52.{}] Decode batch, #running-req: {}, #token: 0, token usage: 0.00{}, cpu graph: False"
    log = [line.format(*fields) for fields in (("000", 8, ""), ("010", 3, ", accept len: 3.00"), ("020", 1, ""))]
    assert summary(read_steps(log))["accepted_tokens"] == (3 * 3.0 + 1) / 4


def test_prompts_that_the_context_would_cut_are_refused() -> None:
    with pytest.raises(
        UsageError, match="4097 tokens need a context of 8194 at least, not 8192; raise --context-length"
    ):
        rollout.run(rollout.parser().parse_args(["--prompt-tokens", "64", "4097"]))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_rollout_on_the_cpu_and_its_resumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rollout.json"
    sizes = ["--prompt-tokens", "64", "--output-tokens", "16", "--groups", "60", "--samples", "4", "--running", "8"]
    arguments = [*sizes, "--window", "2", "--out", str(out), "--seed", "1"]
    assert rollout.main(["--backends", "prefixpack", *arguments]) == 0
    first = json.loads(out.read_text())
    assert first["runs"][0]["steps"]["steps"] > 10
    assert sum(first["runs"][0]["steps_packed"].values()) > 10
    assert rollout.main(["--backends", "prefixpack,torch_native", *arguments, "--resume"]) == 0
    both = json.loads(out.read_text())
    assert both["runs"][0] == first["runs"][0]
    assert [row["backend"] for row in both["runs"]] == ["prefixpack", "torch_native"]
    assert "torch_native" in capsys.readouterr().out
