"""The rule for a GPU without a routing profile: packed only where the gain is large on every GPU.

The bounds come from the shipped H200 measurements; `python -m sgl_prefix_attn abtest steps RESULTS.json conservative`
shows what they cost. Tensor-parallel ranks have the same steps and shapes, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import Decision, Route

LEAST_REQUESTS = 64
LEAST_KV_HEADS = 4
LEAST_REUSE = 2  # KV tokens of all requests per distinct KV token
RULE = (
    f"at least {LEAST_REQUESTS} requests run, they read each KV token {LEAST_REUSE} times on average or more, and the "
    f"model has at least {LEAST_KV_HEADS} KV heads on each GPU"
)


def packs(step: StepFeatures, shape: ModelShape) -> bool:
    """Whether a decode step runs packed.

    Args:
        shape: of one rank.
    """
    return (
        step.requests >= LEAST_REQUESTS
        and step.tokens >= LEAST_REUSE * step.unique_tokens
        and shape.kv_heads >= LEAST_KV_HEADS
    )


@dataclass(frozen=True)
class ConservativePolicy:
    """`packs` as a routing policy. Its decisions have no predicted times."""

    shape: ModelShape

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The route of a step; `before`, the route of the last one, has no influence."""
        return Decision(Route.PACKED if packs(step, self.shape) else Route.STOCK)
