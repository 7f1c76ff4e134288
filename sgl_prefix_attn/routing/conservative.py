"""The rule for a GPU without a routing profile: packed only where the gain is large on every GPU.

The bounds come from H200 measurements: the Triton kernels gain less than the native ones, so theirs are tighter.
`python -m sgl_prefix_attn abtest steps RESULTS.json conservative` shows what they cost. Tensor-parallel ranks have the
same steps and shapes, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.policy import Decision, Route

LEAST_REQUESTS = 64
LEAST_KV_HEADS = 4
# Of mixed steps. Sharing saves reads of KV tokens. New tokens cost products: one for each KV token that they attend to.
LEAST_MIXED_REUSE = 2
PRODUCTS_PER_SAVED_TOKEN = 400
# In words, to stand after "if".
MIXED_RULE = (
    f"the model has head_dim 128 and 16-bit KV, the requests of the step read each KV token {LEAST_MIXED_REUSE} times "
    "on average or more, and this saves much beside the prefill's arithmetic"
)


@dataclass(frozen=True)
class _Bounds:
    """By packed kernels. reuse: KV tokens of all requests per distinct one. length: mean KV tokens of a request."""

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


def may_pack_mixed(shape: ModelShape) -> bool:
    """Whether the native kernels were measured in mixed steps with this head size and KV type."""
    return shape.head_dim == 128 and shape.kv_bytes == 2


def packs_mixed(step: StepFeatures, shape: ModelShape, pairs: int) -> bool:
    """Whether a mixed step runs packed on the native kernels.

    Measured steps read each KV token once, or 3.2 times and more: docs/design-notes/simulator.md, "Mixed steps".

    Args:
        step: sharing of all its requests.
        shape: of one rank.
        pairs: of a new token and a KV token that it attends to.
    """
    saved = step.tokens - step.unique_tokens
    return (
        may_pack_mixed(shape)
        and step.tokens >= LEAST_MIXED_REUSE * step.unique_tokens
        and PRODUCTS_PER_SAVED_TOKEN * saved >= shape.group * pairs
    )


@dataclass(frozen=True)
class ConservativePolicy:
    """`packs` as a routing policy. Its decisions have no predicted times."""

    shape: ModelShape
    kernels: str

    def decide(self, step: StepFeatures, before: Route = Route.STOCK) -> Decision:
        """The route of a step; `before`, the route of the last one, has no influence."""
        return Decision(Route.PACKED if packs(step, self.shape, self.kernels) else Route.STOCK)
