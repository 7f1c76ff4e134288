"""The policy `auto`: where decode steps run packed, by two or three thresholds for each stock backend.

Sharing that saves many KV bytes pays for a packed step's partial results. Without sharing the packed kernels are the
faster ones in large batches: over fa3 if requests are short, over FlashInfer if many run. The thresholds were chosen by
measured steps: docs/routing.md has them, and what they cost on other seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.features import MIB, StepFeatures, token_bytes
from sgl_prefix_attn.routing.policy import FixedPolicy, Policy, Route

MEASURED_CAPABILITY = "9.0"  # of an H100 and an H200


@dataclass(frozen=True)
class Rule:
    """Thresholds over one stock backend; KV of one layer on one rank, in MiB.

    Attributes:
        saved_mib: a step runs packed if sharing saves as much.
        kv_mib: it also does if its requests have as much together, shared or not, and if
        requests: as many requests run, and
        mean_tokens: they have fewer KV tokens than this on average.
    """

    saved_mib: float
    kv_mib: float
    requests: int = 1
    mean_tokens: float = math.inf

    def packs(self, step: StepFeatures, shape: ModelShape) -> bool:
        """Whether a decode step runs packed. shape: of one rank."""
        of_token = token_bytes(shape) / MIB
        if step.saved_tokens * of_token >= self.saved_mib:
            return True
        return (
            step.tokens * of_token >= self.kv_mib
            and step.requests >= self.requests
            and step.tokens < self.mean_tokens * step.requests
        )

    def __str__(self) -> str:
        """The rule in words, to stand after "if"."""
        many = f"at least {self.requests} requests run" if self.requests > 1 else ""
        short = f"requests have fewer than {self.mean_tokens:g} tokens" if self.mean_tokens < math.inf else ""
        also = " and ".join(filter(None, [f"has {self.kv_mib:g} MiB of KV", many, short]))
        return f"sharing saves {self.saved_mib:g} MiB of KV a layer, or if it {also}"


_FLASHINFER = Rule(saved_mib=12, kv_mib=32, requests=16)
# By stock backend and bytes of a KV element, for the native kernels. fa3 and SGLang's Triton decode were not measured
# with 8 bits.
RULES = {
    ("fa3", 2): Rule(saved_mib=16, kv_mib=32, mean_tokens=1024),
    ("flashinfer", 2): _FLASHINFER,
    ("flashinfer", 1): _FLASHINFER,
    ("triton", 2): Rule(saved_mib=12, kv_mib=32),
}


@dataclass(frozen=True)
class KernelPair:
    """The kernels that a decode step may run on, and their GPU.

    Attributes:
        gpu: CUDA's name; "cpu" without a GPU.
        capability: compute capability, "9.0"; "" without a GPU.
        packed: native, triton or cpu.
        stock: SGLang's name of the stock backend.
    """

    gpu: str
    capability: str
    packed: str
    stock: str


@dataclass(frozen=True)
class RulePolicy:
    """A rule as a routing policy."""

    rule: Rule
    shape: ModelShape

    def decide(self, step: StepFeatures) -> Route:
        """The route of a step."""
        return Route.PACKED if self.rule.packs(step, self.shape) else Route.STOCK

    def __str__(self) -> str:
        return str(self.rule)


def auto(kernels: KernelPair, shape: ModelShape) -> Policy:
    """The policy behind `auto` for decode steps. shape: of one rank."""
    if kernels.packed == "cpu" or kernels.stock == "torch_native":  # which runs request by request
        return FixedPolicy(Route.PACKED)
    rule = RULES.get((kernels.stock, shape.kv_bytes))
    if rule is None or kernels.packed != "native" or kernels.capability != MEASURED_CAPABILITY:
        return ConservativePolicy(shape, kernels.packed)
    return RulePolicy(rule, shape)
