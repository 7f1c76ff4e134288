"""The record of a server's facts: what it reads of SGLang's runner, and when."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture
from tests.support.server_facts import server_facts

RANKS = {"tp_rank": 1, "attn_tp_rank": 0}


def test_the_record_does_not_follow_its_runner() -> None:
    arguments = SimpleNamespace(page_size=16, speculative_num_draft_tokens=4)
    fixture = Fixture(SHARED, LENGTHS, server_args=arguments)
    facts = fixture.facts
    assert (facts.page_size, facts.is_cpu, facts.drafts, facts.dtype) == (16, True, 1, torch.float32)
    assert facts.model is fixture.model
    assert facts.token_to_kv_pool is fixture.pool
    fixture.runner.device, fixture.runner.token_to_kv_pool = "cuda:1", None
    assert facts.is_cpu
    assert facts.token_to_kv_pool is fixture.pool
    assert not fixture.facts.is_cpu
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.device = "cuda"  # type: ignore[misc]


def test_a_runner_of_sglangs_tests_has_few_attributes() -> None:
    facts = ServerFacts.of(SimpleNamespace(device="cuda", dtype=None))
    assert (facts.model, facts.server_args, facts.argument("page_size"), facts.architectures) == (None, None, None, [])
    assert not any((facts.speculates, facts.has_no_decode_steps, facts.is_draft_worker, facts.masks_images))
    assert facts.model_is_mrope, "what is not known is taken for what has no one-token steps"


@pytest.mark.parametrize("holder", ["model_config", "runner"])  # since 0.5.16, and before
@pytest.mark.parametrize("several", [True, False])
def test_rotary_positions_are_told_by_either_object(holder: str, several: bool) -> None:
    told: dict[str, Any] = {"model_is_mrope": several}
    of_config, of_runner = (told, {}) if holder == "model_config" else ({}, told)
    runner = SimpleNamespace(device="cpu", dtype=None, model_config=SimpleNamespace(**of_config), **of_runner)
    assert ServerFacts.of(runner).model_is_mrope is several


@pytest.mark.parametrize("of_runner", [RANKS, {"ps": SimpleNamespace(**RANKS)}, {}])  # 0.5.14; to 0.5.20; later
def test_ranks_are_where_the_version_keeps_them(of_runner: dict[str, Any]) -> None:
    ranks = ServerFacts.of(SimpleNamespace(device="cpu", dtype=None, **of_runner)).ranks
    assert (ranks is None) == (not of_runner)
    assert ranks is None or (ranks.tp_rank, ranks.attn_tp_rank) == (1, 0)


def test_arguments_of_backends_and_microbatches() -> None:
    facts = server_facts(attention_backend="fa3", prefill_attention_backend="triton", pp_size=2, pp_async_batch_depth=1)
    assert facts.backend_names == ("triton", "fa3")
    assert facts.microbatches == 3
    assert server_facts(pp_async_batch_depth=1).microbatches == 1
