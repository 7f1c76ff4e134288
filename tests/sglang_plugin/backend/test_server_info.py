"""What a running server tells: the state in /server_info and the Prometheus metrics."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.explain.server import ServerState
from sgl_prefix_attn.explain.spread import RunningPrompts
from sgl_prefix_attn.sglang_plugin.backend import server_info
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import Fixture

PATHS = [[(1, 0, 20), (2, 20, 26)], [(1, 0, 20), (2, 20, 26)], [(1, 0, 20)], []]


def answer() -> Any:
    return SimpleNamespace(internal_state={"world_size": 1})


def batch(*prompts: Any, ended: bool = False, decodes: bool = True) -> Any:
    """A batch of SGLang's with requests of these prompts."""
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                rid=f"{number}-{len(prompt)}", origin_input_ids=prompt, output_ids=[7] * decodes, finished=lambda: ended
            )
            for number, prompt in enumerate(prompts)
        ]
    )


def running(scheduler: Any) -> RunningPrompts:
    """What a scheduler tells about its running requests."""
    result = answer()
    server_info.after_get_internal_state(result, scheduler)
    return RunningPrompts.model_validate(result.internal_state["prefixpack"]["running"])


class TestState:
    def test_it_joins_sglangs_answer_and_is_what_explain_reads(self) -> None:
        fixture = Fixture(PATHS, [30, 27, 25, 9])
        fixture.run()
        fixture.run(NOTHING)
        result = answer()
        assert server_info.after_get_internal_state(result, None, None) is None
        assert result.internal_state["world_size"] == 1
        told = json.loads(json.dumps(result.internal_state["prefixpack"]))
        ServerState.model_validate(told)
        assert told["version"] == 1
        assert told["handover"] == "hooks"
        assert told["sglang"] == "0.5.20"
        assert told["counters"]["steps_packed"] == {"decode": 1, "extend": 0, "mixed": 0, "verify": 0}
        assert told["counters"]["fallbacks"] == {fallback_reasons.NO_PATHS: 1}
        assert told["counters"]["kv_tokens_per_request"] == 30 + 27 + 25 + 9
        assert told["counters"]["kv_tokens_unique"] == 26 + 4 + 1 + 5 + 9
        assert told["shape"] == {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "kv_bytes": 4, "partial_bytes": 4}
        assert set(told["device"]) == set(asdict(fixture.backend._executor.planners[0].device))
        batch, forest = told["batch"], fixture.step.forest
        assert (batch["mode"], batch["seq_lens"], batch["query_lens"]) == ("decode", [30, 27, 25, 9], [1] * 4)
        rebuilt = PrefixForest.from_paths([[tuple(segment) for segment in path] for path in batch["paths"]])
        for name in ("node_begin", "node_end", "order"):
            assert getattr(rebuilt, name).tolist() == getattr(forest, name).tolist()

    def test_the_prompts_of_running_requests_can_be_compared(self) -> None:
        Fixture(PATHS, [30, 27, 25, 9])
        shared = list(range(600))
        prompts = [array("q", shared), [*shared, 7], [5, *shared]]
        told = running(SimpleNamespace(running_batch=batch(*prompts), last_batch=None))
        one, longer, other = told.prompts
        assert (one.tokens, longer.tokens, told.block) == (600, 601, 512)
        assert [len(prompt.hashes) for prompt in told.prompts] == [2, 2, 2]
        assert one.hashes[0] == longer.hashes[0]
        assert len({one.hashes[1], longer.hashes[1], *other.hashes}) == 4

    def test_all_microbatches_of_a_pipeline_run_and_ended_requests_do_not(self) -> None:
        Fixture(PATHS, [30, 27, 25, 9])
        microbatches = [batch([1] * 10), batch([1] * 20, [1] * 30), batch([1] * 40, ended=True)]
        told = running(SimpleNamespace(running_mbs=microbatches, mbs=[None, microbatches[1], None]))
        assert [prompt.tokens for prompt in told.prompts] == [10, 20, 30]

    def test_requests_that_a_mixed_step_took_along_run(self) -> None:
        """SGLang leaves an empty running batch behind until the next step. A prompt's first chunk decodes nothing."""
        Fixture(PATHS, [30, 27, 25, 9])
        mixed = SimpleNamespace(reqs=[*batch([1] * 10, [1] * 20).reqs, *batch([1] * 30, decodes=False).reqs])
        for scheduler in (
            SimpleNamespace(running_batch=batch(), last_batch=mixed),
            SimpleNamespace(running_mbs=[batch(), batch()], mbs=[None, mixed]),
        ):
            assert [prompt.tokens for prompt in running(scheduler).prompts] == [10, 20]

    def test_without_a_prefixpack_backend_the_answer_stays_as_it_is(self) -> None:
        result = answer()
        server_info.after_get_internal_state(result)
        server_info.after_on_idle(None)
        assert result.internal_state == {"world_size": 1}

    def test_an_exception_leaves_sglangs_answer_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        fixture = Fixture(PATHS, [30, 27, 25, 9])
        result = SimpleNamespace(internal_state=None)
        server_info.after_get_internal_state(result)
        assert fixture.fallbacks == {fallback_reasons.HOOK_FAILED: 1}
        assert "Traceback" in caplog.text
