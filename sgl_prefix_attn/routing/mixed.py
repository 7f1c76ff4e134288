"""When a mixed step (prefill chunks beside decodes) runs packed on the native kernels.

Sharing saves reads of KV tokens. New tokens cost arithmetic, packed or not. The bound is of 330 steps measured on an
H100 and an H200: docs/design-notes/simulator.md, "Mixed steps". Tensor-parallel ranks have the same steps and shapes,
so they decide alike.
"""

from __future__ import annotations

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import MIB, StepFeatures, token_bytes

# Pairs (see `packs`) for each KV token that sharing saves, with one query head for each KV head.
MOST_PAIRS_PER_SAVED_TOKEN = 600
# KV bytes of a layer that sharing has to save. The measured steps save 20 MB or more. By simulation, steps that save
# less than 2 MB gain no more than their plan costs, or lose: docs/design-notes/simulator.md.
LEAST_SAVED_BYTES = 2 * MIB
# In words, to stand after "if".
RULE = "the model has head_dim 128 and 16-bit KV, and sharing saves much beside the arithmetic of the prefill"


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
    saved = step.saved_tokens
    if not was_measured(shape) or saved * token_bytes(shape) < LEAST_SAVED_BYTES:
        return False
    return 0 < shape.group * pairs <= MOST_PAIRS_PER_SAVED_TOKEN * saved
