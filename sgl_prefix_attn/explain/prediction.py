"""The time of a step on its device, and its gain over the stock backend, by a routing profile."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sgl_prefix_attn.core.forest import Int64Array, PrefixForest
from sgl_prefix_attn.core.limits import head_dim_fits
from sgl_prefix_attn.core.planner import DeviceModel
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.measured import HEAD_DIMS
from sgl_prefix_attn.routing.policy import cost_policy
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts, facts_as_text

CALIBRATE = "`python -m sgl_prefix_attn calibrate` measures one"


@dataclass(frozen=True)
class Machine:
    """What would run a batch.

    Attributes:
        model: what the planner plans for.
        facts: what a profile has to fit; a text says why they are not known.
    """

    model: DeviceModel
    facts: ServerFacts | str


@dataclass(frozen=True)
class Gain:
    """Times of one layer by a profile, in microseconds.

    Attributes:
        stock: the stock backend's kernel, as profiles name it.
        profile: origin and name.
        borrowed: what of the machine the profile was not measured with, or "".
        route: of a step under the policy `cost`, after a step on the stock backend.
    """

    stock: str
    profile: str
    borrowed: str
    packed_us: float
    stock_us: float
    route: Literal["packed", "stock"]

    @property
    def ratio(self) -> float:
        """Stock time / packed time."""
        return self.stock_us / self.packed_us

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ratio": self.ratio}


def why_no_kernel(packed: str, head_dim: int) -> str | None:
    """Why heads of a size have no packed kernel; None if they have one."""
    if head_dim_fits(head_dim) and (packed != "native" or head_dim in HEAD_DIMS):
        return None
    return f"no {packed} kernel has head_dim {head_dim}: such layers run on the stock backend"


def predicted_gain(
    forest: PrefixForest, seq_lens: Int64Array, is_decode: bool, machine: Machine, store: ProfileStore
) -> Gain | str:
    """The gain of a step over the stock backend; a text says why there is no prediction."""
    facts = machine.facts
    if isinstance(facts, str):
        return facts
    head_dim = facts.shape.head_dim
    if (refused := why_no_kernel(facts.packed, head_dim)) is not None:
        return refused
    if not is_decode:
        return "profiles know decode steps only"
    found = store.find(facts)
    policy = None if found is None else cost_policy(found.stored.profile, facts.packed, facts.stock, facts.shape)
    step = StepFeatures.of(ForestFacts.of(forest), seq_lens)
    if found is None or policy is None:
        route = ConservativePolicy(facts.shape, facts.packed).decide(step).route.value
        then = "every step packed" if facts.packed == "cpu" else f"this step {route}, by the conservative rule"
        how = CALIBRATE if head_dim in HEAD_DIMS else f"none can be measured with head_dim {head_dim}"
        return f"no routing profile fits ({facts_as_text(facts)}): the policy cost runs {then}; {how}"
    decision = policy.decide(step)
    assert decision.packed_us is not None
    assert decision.stock_us is not None
    return Gain(
        facts.stock, str(found.stored), found.borrowed, decision.packed_us, decision.stock_us, decision.route.value
    )
