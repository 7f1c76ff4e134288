"""The rule for GPUs and kernels that were not measured: packed only where the gain was large on an H200.

The Triton kernels gain less than the native ones, so their bounds are tighter. Tensor-parallel ranks have the same
steps and shapes, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import Route

LEAST_REQUESTS = 64
LEAST_KV_HEADS = 4


@dataclass(frozen=True)
class _Bounds:
    """The least that packs. reuse: KV tokens of all requests per distinct one. length: mean KV tokens of a request."""

    reuse: int
    length: int


_NATIVE = _Bounds(2, 0)
_BOUNDS = {"triton": _Bounds(4, 512)}


def rule(kernels: str) -> str:
    """The rule for packed kernels in words, to stand after "if"."""
    bounds = _BOUNDS.get(kernels, _NATIVE)
    length = f", they have {bounds.length} tokens on average or more" if bounds.length else ""
    return (
        f"at least {LEAST_REQUESTS} requests run, they read each KV token {bounds.reuse} times on average or more"
        f"{length}, and the model has at least {LEAST_KV_HEADS} KV heads on each GPU"
    )


def packs(step: StepFeatures, shape: ModelShape, kernels: str) -> bool:
    """Whether a decode step runs packed.

    Args:
        shape: of one rank.
        kernels: the packed ones.
    """
    bounds = _BOUNDS.get(kernels, _NATIVE)
    return (
        step.requests >= LEAST_REQUESTS
        and step.tokens >= bounds.reuse * step.unique_tokens
        and step.tokens >= bounds.length * step.requests
        and shape.kv_heads >= LEAST_KV_HEADS
    )


@dataclass(frozen=True)
class ConservativePolicy:
    """`packs` as a routing policy."""

    shape: ModelShape
    kernels: str

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""
        return Route.PACKED if packs(step, self.shape, self.kernels) else Route.STOCK

    def __str__(self) -> str:
        return rule(self.kernels)
