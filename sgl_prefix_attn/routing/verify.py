"""When a verify step of speculative decoding runs packed on the native kernels.

Sharing saves reads of KV tokens. The stock kernel multiplies a KV token with all query rows that a request has on its
KV head, so with many rows it is bound by arithmetic, which sharing does not save. The bounds are of 439 steps with 4
and 8 drafts over fa3, measured on an H200: docs/routing.md, "Verify steps". Tensor-parallel ranks have the same steps
and shapes, so they decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.gpus import known_gpus
from sgl_prefix_attn.routing import conservative
from sgl_prefix_attn.routing.features import MIB, StepFeatures, token_bytes
from sgl_prefix_attn.routing.policy import Policy, Route

LEAST_SAVED_BYTES = 2 * MIB  # KV bytes of a layer that sharing has to save
FEW_ROWS = 64  # query rows of a request on one KV head; with fewer, packed is rarely behind
MOST_ROWS = 128  # from here on fa3 fills its tile with the rows of one request
# In between, requests and KV bytes saved for each byte of partial results.
LEAST_REQUESTS = 6
LEAST_SAVED_PER_PARTIAL = 3
# In words, to stand after "if".
RULE = (
    f"sharing saves {LEAST_SAVED_BYTES // MIB} MiB of KV a layer, and a request has fewer than {FEW_ROWS} query rows "
    f"on a KV head; with up to {MOST_ROWS - 1} rows, if at least {LEAST_REQUESTS} requests run and sharing saves much "
    "beside the partial results"
)


def packs(step: StepFeatures, shape: ModelShape) -> bool:
    """Whether a verify step runs packed.

    Args:
        step: with the drafts of a request as its rows.
        shape: of one rank.
    """
    saved = step.saved_tokens * token_bytes(shape)
    rows = step.rows * shape.group
    if saved < LEAST_SAVED_BYTES or rows >= MOST_ROWS:
        return False
    if rows < FEW_ROWS:
        return True
    # Each is written and read: output, maximum and sum of a row.
    results = (step.links + step.requests) * step.rows * shape.q_heads
    partials = 2 * results * (shape.head_dim + 2) * shape.partial_bytes
    return step.requests >= LEAST_REQUESTS and saved >= LEAST_SAVED_PER_PARTIAL * partials


@dataclass(frozen=True)
class VerifyPolicy:
    """`packs` as a routing policy."""

    shape: ModelShape

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""
        return Route.PACKED if packs(step, self.shape) else Route.STOCK

    def __str__(self) -> str:
        return RULE


def was_measured(gpu: str, kernels: str, stock: str, shape: ModelShape) -> bool:
    """Whether the bounds were measured on a GPU, with kernels and a shape.

    Args:
        gpu: CUDA's name.
        kernels: the packed ones.
        stock: the stock backend.
        shape: of one rank.
    """
    measured = {known.name for known in known_gpus().values() if known.verify_steps}
    known = gpu in measured and (kernels, stock) == ("native", "fa3")
    return known and shape.head_dim == 128 and shape.kv_bytes == 2


def may_pack(gpu: str, kernels: str, stock: str, shape: ModelShape, drafts: int) -> bool:
    """Whether the measured rule packs any step with `drafts` drafts a request. Other arguments: see `was_measured`."""
    return was_measured(gpu, kernels, stock, shape) and drafts * shape.group < MOST_ROWS


def policy(gpu: str, kernels: str, stock: str, shape: ModelShape) -> Policy:
    """The rule of a server's verify steps: the conservative one where `was_measured` does not hold."""
    measured = was_measured(gpu, kernels, stock, shape)
    return VerifyPolicy(shape) if measured else conservative.ConservativePolicy(shape, kernels)
