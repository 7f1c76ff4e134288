"""From batch to backend: what is handed over when, and that nothing that goes wrong in it reaches the server."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handover, HandoverHooks
from sgl_prefix_attn.sglang_plugin.telemetry import failures, fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

STEP = StepPaths(PrefixForest.from_paths([[], []]), "decode", 2)
BATCH = SimpleNamespace(req_pool_indices="rows", seq_lens_cpu="lengths")
TARGET = SimpleNamespace(is_draft_worker=False)
DRAFT = SimpleNamespace(is_draft_worker=True)
NO_BATCH = SimpleNamespace()  # of a graph capture or a warm-up


class Tracker:
    """Gives the same step for every batch, or raises."""

    def __init__(self, step: Any = STEP) -> None:
        self.result = step
        self.calls = self.forgotten = 0

    def step(self, batch: Any) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def forget(self) -> None:
        self.forgotten += 1


def started(step: Any = STEP) -> tuple[HandoverHooks, Handover, Counters]:
    counters, hooks = Counters(), HandoverHooks()
    hooks.active = Handover(Tracker(step), counters)  # type: ignore[arg-type]
    return hooks, hooks.active, counters


def announced(hooks: HandoverHooks, runner: Any = TARGET) -> Any:
    """A forward batch whose paths SGLang has shown to the hooks."""
    forward_batch = SimpleNamespace()
    hooks.after_forward_batch_init(forward_batch, object, BATCH, runner)
    return forward_batch


class TestHooks:
    def test_paths_are_there_inside_the_forward_and_gone_after(self) -> None:
        hooks, active, _ = started()
        forward_batch = announced(hooks)
        assert active.take(NO_BATCH) is NOTHING
        seen = []

        def forward(runner: Any, batch: Any, *, pp_proxy_tensors: Any = None) -> str:
            seen.append((active.take(NO_BATCH), active.take(NO_BATCH), pp_proxy_tensors))
            return "logits"

        assert hooks.around_forward(forward, TARGET, forward_batch, pp_proxy_tensors=1) == "logits"
        first, again, proxy = seen[0]
        assert first.paths is STEP
        assert first.rows == "rows"
        assert again is first
        assert proxy == 1
        assert active.take(NO_BATCH) is NOTHING
        by_name = hooks.around_forward(
            lambda runner, forward_batch: active.take(NO_BATCH), TARGET, forward_batch=forward_batch
        )
        assert by_name is first

    def test_paths_are_there_for_a_worker_that_prepares_the_backend_itself(self) -> None:
        """Before it calls the runner's forward, as DFLASH's verify steps without a graph."""
        hooks, active, _ = started()
        assert active.take(announced(hooks)).paths is STEP

    def test_a_forward_that_raises_leaves_nothing_behind(self) -> None:
        hooks, active, counters = started()
        forward = Mock(side_effect=RuntimeError("out of memory"))
        with pytest.raises(RuntimeError, match="out of memory"):
            hooks.around_forward(forward, TARGET, announced(hooks))
        assert active.take(NO_BATCH) is NOTHING
        assert not counters.fallbacks

    def test_draft_models_are_left_alone(self) -> None:
        hooks, active, _ = started()
        assert vars(announced(hooks, DRAFT)) == {}
        assert active.take(NO_BATCH) is NOTHING

    def test_without_a_prefixpack_backend_the_hooks_do_nothing(self) -> None:
        hooks = HandoverHooks()
        forward_batch = announced(hooks)
        assert vars(forward_batch) == {}
        assert hooks.around_forward(lambda runner, batch: 5, TARGET, forward_batch) == 5

    def test_an_exception_is_counted_logged_once_and_the_step_falls_back(self, caplog):
        hooks, active, counters = started(step=AttributeError("no such field"))
        seen = []
        for _ in range(3):
            hooks.around_forward(
                lambda runner, batch: seen.append(active.take(NO_BATCH).paths), TARGET, announced(hooks)
            )
        assert seen == [fallback_reasons.HOOK_FAILED] * 3
        assert counters.failures.counts == {"request_paths": 3}
        assert active._tracker.forgotten == 3, "an exception may have come anywhere in what is known of batches"
        assert caplog.text.count("Traceback") == 1
        assert "no such field" in caplog.text

    def test_a_rank_without_memory_raises_where_others_replay_packed_graphs(self) -> None:
        hooks, active, counters = started(step=MemoryError())
        announced(hooks)
        assert counters.failures.counts == {"request_paths": 1}
        counters.may_stop = False
        with pytest.raises(MemoryError):
            active.read(TARGET)

    def test_paths_are_there_while_a_decode_graph_is_loaded(self) -> None:
        """Outside of the runner's forward for some verify steps, inside of it for others."""
        hooks, active, _ = started()
        forward_batch = announced(hooks)
        seen = []

        def load_batch(runner: Any, batch: Any, pp_proxy_tensors: Any = None) -> None:
            seen.append(active.take(NO_BATCH).paths)

        def forward(runner: Any, batch: Any) -> None:
            hooks.around_forward(load_batch, runner, batch)
            seen.append(active.take(NO_BATCH).paths)

        hooks.around_forward(load_batch, TARGET, forward_batch, None)
        assert active.take(NO_BATCH) is NOTHING
        hooks.around_forward(forward, TARGET, forward_batch)
        assert seen == [STEP] * 3


@pytest.mark.parametrize("ranks", [False, True])
def test_a_rank_alone_without_memory_does_not_turn_a_prefill_into_another_step_than_the_others(monkeypatch, ranks):
    counters = Counters()
    handover = Handover(BatchTracker(1), counters)
    handover.run_one_token_steps()
    monkeypatch.setattr(failures, "several_ranks", lambda: ranks)
    monkeypatch.setattr(handover, "_one_token", Mock(applies=Mock(side_effect=MemoryError)))
    with pytest.raises(MemoryError) if ranks else contextlib.nullcontext():
        handover.one_token_step(None, None)
    assert counters.failures.counts == {"one_token_steps": 1}
