"""One-token steps: which batches become decode steps, what becomes of them, and what the tracker says of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handover, HandoverHooks
from sgl_prefix_attn.sglang_plugin.prefix.one_token import OneTokenSteps, why_none_decodes
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from tests.sglang_plugin.prefix.sharing import check
from tests.support.server_facts import server_facts
from tests.support.small_scheduler import TREES, Batch, SmallScheduler

PROMPT = [1] * 50
TARGET = SimpleNamespace(is_draft_worker=False)


class Rollout:
    """A rollout on one prompt: two requests decode, and one joins that finds the prompt in the cache."""

    def __init__(self) -> None:
        self.scheduler = SmallScheduler(TREES[0])
        for last in (2, 3):
            self.scheduler.join([*PROMPT, last])
        self.scheduler.decode()
        self.joining = self.scheduler.request([*PROMPT, 4])
        self.scheduler.match(self.joining)

    def batch(self, *, mixed: bool, **fields: Any) -> Batch:
        """The step in which the request joins."""
        if mixed:
            self.scheduler.decode()
        batch = self.scheduler.extend_batch([self.joining], self.scheduler.running if mixed else [])
        return dataclasses.replace(batch, **fields)


def forward_batch(mode: ForwardMode) -> Any:
    """A ForwardBatch with a value in each field of a prefill."""
    values = {field.name: "set" for field in dataclasses.fields(ForwardBatch)}
    return SimpleNamespace(**{**values, "forward_mode": mode})


def applies(batch: Any) -> bool:
    return OneTokenSteps(Counters()).applies(batch)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_forward_batch_becomes_one_of_a_decode_step(mixed: bool) -> None:
    counters = Counters()
    steps = OneTokenSteps(counters)
    batch = Rollout().batch(mixed=mixed)
    assert steps.applies(batch)
    forward = forward_batch(batch.forward_mode)
    steps.convert(batch, forward)
    assert forward.forward_mode is ForwardMode.DECODE
    changed = {name for name, value in vars(forward).items() if value is None}
    assert changed == {name for name in vars(forward) if name.startswith("extend_")}
    assert batch.forward_mode is (ForwardMode.MIXED if mixed else ForwardMode.EXTEND)
    assert counters.one_token_steps == {"mixed": int(mixed), "extend": int(not mixed)}


@pytest.mark.parametrize(
    "fields",
    [
        {"extend_lens": [1, 2, 1]}, {"extend_lens": [1, 1]}, {"extend_lens": None}, {"reqs": []},
        {"forward_mode": ForwardMode.DECODE}, {"forward_mode": ForwardMode.SPLIT_PREFILL},
        {"return_logprob": True}, {"return_hidden_states": True}, {"is_prefill_only": True},
        {"input_embeds": "some"}, {"replace_embeds": "some"}, {"multimodal_inputs": [None, "some", None]},
        {"encoder_lens": "some"}, {"global_num_tokens": [3, 3]}, {"dllm_config": "some"},
    ],
    ids=str,
)  # fmt: skip
def test_other_batches_stay_as_they_are(fields: dict[str, Any]) -> None:
    assert applies(Rollout().batch(mixed=True, multimodal_inputs=[None] * 3))
    assert not applies(Rollout().batch(mixed=True, **fields))


def test_a_step_that_starts_a_beam_search_stays_a_prefill() -> None:
    rollout = Rollout()
    rollout.joining.beam_group = "some"
    assert not applies(rollout.batch(mixed=False))


def facts(**changes: Any) -> ServerFacts:
    """Facts of a server that can run one-token steps, but for server arguments or facts of the model."""
    usual = {"pp_size": 1, "disaggregation_mode": "null", "model_is_mrope": False}
    return server_facts(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_lora": True}, "enable_lora=True"),
        ({"pp_size": 2}, "pp_size=2"),
        ({"attn_dp_size": 2}, "attn_dp_size=2"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE'"),
        ({"enable_unified_cache_external_linker": True}, "external_linker=True"),
        ({"radix_cache_backend": "flexkv"}, "radix_cache_backend='flexkv'"),
        ({"is_generation": False}, "generates no text"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_is_mrope": True}, "rotary positions"),
    ],
)
def test_servers_that_are_left_out(changes: dict[str, Any], reason: str) -> None:
    assert why_none_decodes(facts()) is None
    assert why_none_decodes(facts(dcp_size=None, enable_lora=None)) is None
    assert reason in str(why_none_decodes(facts(**changes)))


def test_models_with_other_layers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerFacts, "has_other_layers", True)
    assert "linear or sparse" in str(why_none_decodes(facts()))


class TestTracker:
    def start(self) -> tuple[Rollout, BatchTracker]:
        tracker = BatchTracker()
        tracker.runs_as_decode = applies
        return Rollout(), tracker

    def test_a_mixed_step_is_a_decode_step_of_all_its_rows(self) -> None:
        rollout, tracker = self.start()
        step = check(rollout.scheduler, tracker, rollout.batch(mixed=True))
        assert (step.mode, step.num_requests, step.query_lens) == ("decode", 3, None)
        assert step.forest.paths() == [[(0, 0, 50)]] * 3
        rollout.scheduler.running.insert(0, rollout.joining)
        rollout.scheduler.decode()
        assert tracker.step(rollout.scheduler.decode_batch()) is step, "the decode batch after it has the same forest"

    def test_a_prefill_step_leaves_the_decode_batch_known(self) -> None:
        rollout, tracker = self.start()
        before = tracker.step(rollout.scheduler.decode_batch())
        step = check(rollout.scheduler, tracker, rollout.batch(mixed=False))
        assert (step.mode, step.num_requests, step.query_lens) == ("decode", 1, None)
        rollout.scheduler.decode()
        assert tracker.step(rollout.scheduler.decode_batch()) is before

    def test_off_by_default(self) -> None:
        step = BatchTracker().step(Rollout().batch(mixed=True))
        assert isinstance(step, StepPaths)
        assert step.mode == "mixed"


class TestHandover:
    def start(self) -> tuple[HandoverHooks, Counters]:
        counters, hooks = Counters(), HandoverHooks()
        hooks.active = Handover(BatchTracker(), counters)
        hooks.active.run_one_token_steps()
        return hooks, counters

    def test_paths_and_forward_batch_say_decode(self) -> None:
        hooks, counters = self.start()
        batch = Rollout().batch(mixed=True)
        forward = forward_batch(batch.forward_mode)
        hooks.after_forward_batch_init(forward, object, batch, TARGET)
        assert forward.forward_mode is ForwardMode.DECODE
        seen: list[Any] = []
        hooks.around_forward(lambda *args: seen.append(hooks.active.take(forward)), TARGET, forward)
        assert seen[0].paths.mode == "decode"
        assert counters.one_token_steps["mixed"] == 1

    def test_an_error_leaves_a_prefill_and_is_counted(self) -> None:
        hooks, counters = self.start()
        batch = Rollout().batch(mixed=True, forward_mode=None)
        forward = forward_batch(ForwardMode.MIXED)
        hooks.after_forward_batch_init(forward, object, batch, TARGET)
        assert forward.forward_mode is ForwardMode.MIXED
        assert forward.extend_seq_lens == "set"
        assert counters.failures.counts["one_token_steps"] == 1
