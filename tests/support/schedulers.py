"""Stand-ins for parts of a scheduler process: its router of steps, and what HTTP endpoints ask of all schedulers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.live_policy import LivePolicies
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters


def step_router(
    shape: ModelShape | None,
    stock: str = "fa3",
    *,
    kernels: str = "native",
    drafts: int = 1,
    graphs: bool = False,
    counters: Counters | None = None,
    microbatches: int = 1,
    **settings: Any,
) -> StepRouter:
    """The router of a server. shape: None before the first decode step. graphs: whether steps run in graphs."""
    planners = [] if shape is None else [SimpleNamespace(shape=shape)]
    executor: Any = SimpleNamespace(kernels=kernels, planners=planners, runs_in_graphs=graphs, drafts=drafts)
    in_force = Settings(**{"metrics": False, **settings})
    policies = LivePolicies(executor, stock)
    return StepRouter(in_force, counters or Counters(), executor, policies, microbatches=microbatches)


class TokenizerManager:
    """What HTTP endpoints use of SGLang's tokenizer manager. `answers` gives each scheduler's state for a request."""

    def __init__(self, answers: Callable[[Any], list[dict[str, Any]]]) -> None:
        self._answers = answers

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        return [SimpleNamespace(internal_state=state) for state in self._answers(request)]
