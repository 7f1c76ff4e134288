"""When a mixed step (prefill chunks beside decodes) runs packed on the native kernels.

Sharing saves reads of KV tokens. New tokens cost arithmetic, packed or not. Bounds are of 180 steps measured on an
H100: docs/design-notes/simulator.md, "Mixed steps". Tensor-parallel ranks have the same steps and shapes, so they
decide alike.
"""

from __future__ import annotations

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures

# KV tokens of all requests for each distinct one.
LEAST_REUSE = 2
# Pairs (see `packs`) for each KV token that sharing saves, with one query head for each KV head.
MOST_PAIRS_PER_SAVED_TOKEN = 400
# In words, to stand after "if".
RULE = (
    f"the model has head_dim 128 and 16-bit KV, the requests of the step read each KV token {LEAST_REUSE} times "
    "on average or more, and this saves much beside the prefill's arithmetic"
)


def was_measured(shape: ModelShape) -> bool:
    """Whether mixed steps were measured with this head size and KV type."""
    return shape.head_dim == 128 and shape.kv_bytes == 2


def packs(step: StepFeatures, shape: ModelShape, pairs: int) -> bool:
    """Whether a mixed step runs packed.

    Args:
        step: sharing of all its requests.
        shape: of one rank.
        pairs: of a new token and a KV token that it attends to, over all requests, for one query head.
    """
    saved = step.tokens - step.unique_tokens
    return (
        was_measured(shape)
        and step.tokens >= LEAST_REUSE * step.unique_tokens
        and shape.group * pairs <= MOST_PAIRS_PER_SAVED_TOKEN * saved
    )
