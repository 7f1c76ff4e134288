"""Where a step would run, packed or on the stock backend, and by which figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sgl_prefix_attn.core.cuda_step import HEAD_DIMS
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.limits import head_dim_fits
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.routing.features import MIB, ForestFacts, StepFeatures, token_bytes
from sgl_prefix_attn.routing.policy import FixedPolicy
from sgl_prefix_attn.routing.rule import KernelPair, auto


@dataclass(frozen=True)
class Machine:
    """What would run a batch.

    Attributes:
        model: what the planner plans for.
        kernels: of steps; a text says why they are not known.
        bandwidth: bytes per second of the memory, by the data sheet; 0: not known.
    """

    model: DeviceModel
    kernels: KernelPair | str
    bandwidth: float = 0.0


@dataclass(frozen=True)
class StepRoute:
    """The route of a decode step under the policy `auto`.

    Attributes:
        stock: the stock backend.
        rule: when a step runs packed, to stand after "if"; None: always.
        saved_mib: 2^20 bytes of KV of a layer that sharing saves.
        kv_mib: of all requests.
    """

    route: Literal["packed", "stock"]
    stock: str
    rule: str | None
    saved_mib: float
    kv_mib: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def why_no_kernel(packed: str, head_dim: int) -> str | None:
    """Why heads of a size have no packed kernel; None if they have one."""
    if head_dim_fits(head_dim) and (packed != "native" or head_dim in HEAD_DIMS):
        return None
    return f"no {packed} kernel has head_dim {head_dim}: such layers run on the stock backend"


def route_of(
    forest: PrefixForest, seq_lens: Int64Array, is_decode: bool, machine: Machine, shape: ModelShape
) -> StepRoute | str:
    """The route of a step; a text says why there is none."""
    kernels = machine.kernels
    if isinstance(kernels, str):
        return kernels
    if (refused := why_no_kernel(kernels.packed, shape.head_dim)) is not None:
        return refused
    if not is_decode:
        return "other rules decide prefill, mixed and verify steps"
    step = StepFeatures.of(ForestFacts.of(forest), seq_lens)
    policy = auto(kernels, shape)
    rule = None if isinstance(policy, FixedPolicy) else str(policy)
    saved, kv = (tokens * token_bytes(shape) / MIB for tokens in (step.saved_tokens, step.tokens))
    return StepRoute(policy.decide(step).value, kernels.stock, rule, saved, kv)
