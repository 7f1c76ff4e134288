"""Memory that SGLang releases and maps again, with stand-ins for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.core.step_buffers import StepBuffers, StepLimits
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend.memory_release import after_resume_memory_occupation
from tests.sglang_plugin.gpu_fixture import GpuFixture, assert_same, graphs


def resume(*tags: str) -> None:
    after_resume_memory_occupation(None, None, SimpleNamespace(tags=list(tags) or None))


def lose_content(fixture: GpuFixture) -> None:
    """What a release does to the buffers, should they be in memory of graphs."""
    fixture.device_step._plan, fixture.device_step.lost = None, True
    for state in fixture.executor._shapes:
        state.graph_out.fill_(torch.nan)


@pytest.fixture
def replayed() -> GpuFixture:
    fixture = graphs(4, settings=Settings(metrics=False, route="packed"))
    fixture.graphs.replay()
    return fixture


@pytest.mark.parametrize("tags", [("cuda_graph",), ("weights", "cuda_graph"), ()])
def test_a_steady_step_loads_its_plan_again(replayed: GpuFixture, tags: tuple[str, ...]) -> None:
    loads = len(replayed.device_step.loads)
    replayed.graphs.replay()
    assert len(replayed.device_step.loads) == loads
    lose_content(replayed)
    resume(*tags)
    assert_same(replayed.graphs.replay(), replayed.run_stock())
    assert len(replayed.device_step.loads) == loads + 1
    padding = replayed.executor._shapes[0].graph_out
    assert padding.isfinite().all()


def test_memory_of_another_kind_leaves_the_buffers_alone(replayed: GpuFixture) -> None:
    """Memory of graphs may still be unmapped: a write would end the process."""
    plan, out = replayed.device_step._plan, replayed.executor._shapes[0].graph_out.clone()
    resume("kv_cache", "weights")
    assert replayed.device_step._plan is plan
    assert torch.equal(replayed.executor._shapes[0].graph_out, out)


def test_every_backend_of_the_process_is_told(replayed: GpuFixture) -> None:
    class Other:
        """A backend, of which only the record counts."""

    told: list[str] = []
    others = [Other(), Other()]
    for other in others:
        executor = SimpleNamespace(memory_resumed=lambda: told.append("resumed"))
        replayed.state.backends[other] = SimpleNamespace(executor=executor)  # type: ignore[assignment]
    resume()
    assert told == ["resumed"] * 2


def test_a_failure_does_not_reach_sglang(replayed: GpuFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed.executor, "memory_resumed", lambda: 1 / 0)
    resume()
    assert replayed.state.counters.failures.counts == {"memory_release": 1}


def test_buffers_are_as_new_at_their_addresses() -> None:
    buffers = StepBuffers(ModelShape(4, 2, 64), torch.device("cpu"), StepLimits(8, 16, 64, 8))
    tensors = {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
    ints = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
    addresses = {name: tensor.data_ptr() for name, tensor in ints.items()}
    assert {"_words", "_positions", "_kv_slots"} <= set(ints)
    for tensor in ints.values():
        tensor.fill_(7)
    buffers.reset()
    assert all(not tensor.any() for tensor in ints.values())
    assert {name: getattr(buffers, name).data_ptr() for name in ints} == addresses
