"""The time that routing policies would have taken over measured steps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.margins import margins_of
from sgl_prefix_attn.core.gpu import H200
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import policy_names, verify
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.measured import BACKENDS, MeasuredCase, Results, stock_kernel
from sgl_prefix_attn.routing.policy import CostPolicy, FixedPolicy, Route, cost_policy, policy_of
from sgl_prefix_attn.routing.profile import SHIPPED_FILES, Profile, load_profile, read_shipped, shipped_profile_of
from sgl_prefix_attn.routing.profile_store import SHIPPED_ORIGIN, ProfileStore, ServerFacts, StoredProfile

BEHIND = 0.02  # fraction of the stock backend's time
Choose = Callable[[MeasuredCase], Route]
POLICIES = f"{policy_names.FORMS}; left-out[@PERCENT] or PROFILE[@PERCENT], for example shipped@20"


@dataclass(frozen=True)
class Candidate:
    """A policy under test; `name` as the user wrote it. notes: what of its decisions is by another machine's costs."""

    name: str
    choose: Choose
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One step under a policy, and the measured microseconds of both routes."""

    case: MeasuredCase
    route: Route
    packed_us: float
    stock_us: float

    @property
    def us(self) -> float:
        return self.packed_us if self.route is Route.PACKED else self.stock_us

    @property
    def best_us(self) -> float:
        return min(self.packed_us, self.stock_us)


@dataclass(frozen=True)
class Verdict:
    """A policy over many steps. Losses are ratios minus one: 0.1 is 10 % slower.

    Attributes:
        steps: number of steps.
        regret: total time against the total of an oracle that knows both times.
        mean_regret: geometric mean of the steps' times against the oracle.
        worst_regret: largest loss of a step against the oracle, and the step's key.
        worst_loss: largest loss of a step against the stock backend, and the step's key.
        packed: number of steps that ran packed.
        wrong: number of steps that ran on the slower route.
        behind: steps behind the stock backend by more than BEHIND.
        gain: time on the stock backend over time by the policy, geometric mean of the steps.
    """

    steps: int
    regret: float
    mean_regret: float
    worst_regret: tuple[float, str]
    worst_loss: tuple[float, str]
    packed: int
    wrong: int
    behind: int
    gain: float


def candidate(text: str, packed: str, backend: str, results: Results) -> Candidate:
    """A policy from its name on the command line.

    - A name of `routing.policy_names`, as the setting `route` takes it. `cost` is by the shipped profiles.
    - PROFILE[@MARGIN] with PROFILE a file or `shipped`: by predicted cost. The default margin is the profile's.
    - `left-out[@MARGIN]`: each family of steps by a profile fitted on all other families. The default margin is fitted
      on all families.

    Args:
        packed: name of the packed kernels in profiles.
        backend: the stock SGLang backend.
        results: what `left-out` is fitted on.

    Raises:
        ValueError: another form, an unusable profile, or a profile without these kernels.
    """
    try:
        return _named(text, policy_names.parse(text), results, packed, backend)
    except policy_names.PolicyNameError:
        if ">=" in text:  # no file name
            raise
    name, at, margin_text = text.rpartition("@")
    if at and not margin_text.isdigit():
        raise ValueError(f"{text!r}: expected {POLICIES}")
    name, margin = (name, int(margin_text)) if at else (text, None)
    if name == "left-out":
        return Candidate(text, _left_out(results, packed, backend, margin))
    if name == "shipped":
        return _shipped(text, results, packed, backend, margin)
    if not os.path.exists(os.path.expanduser(name)):
        raise ValueError(f"{text!r}: no such file, and no policy: expected {POLICIES}")
    return Candidate(text, profile_choice(load_profile(name), packed, backend, margin))


def _named(text: str, name: policy_names.PolicyName, results: Results, packed: str, backend: str) -> Candidate:
    by_cost = _shipped(text, results, packed, backend, None) if name.predicts else None

    def choose(case: MeasuredCase) -> Route:
        cost = FixedPolicy(Route.STOCK if by_cost is None else by_cost.choose(case))
        return policy_of(name, cost, ConservativePolicy(case.shape, packed)).decide(case.step).route

    return Candidate(text, choose, () if by_cost is None else by_cost.notes)


def _shipped(text: str, results: Results, packed: str, backend: str, margin: int | None) -> Candidate:
    """The policy by the shipped profile that a server of this machine would take, else by an H200's."""
    store = ProfileStore([StoredProfile(SHIPPED_ORIGIN, name, read_shipped(name)) for name in SHIPPED_FILES], [])
    choices: dict[tuple[str, int], Choose] = {}
    notes: list[str] = []

    def key_of(case: MeasuredCase) -> tuple[str, int]:
        return stock_kernel(backend, case.shape), case.shape.kv_bytes

    timed = {key_of(case) for case in results.cases if packed in case.packed and case.stock_us(backend) is not None}
    for case in results.cases:
        kernel, kv_bytes = key = key_of(case)
        if key in choices:
            continue
        facts = ServerFacts(results.machine, results.capability, case.shape, results.dtype, packed, kernel)
        found = store.find(facts)
        if found is None:
            profile = shipped_profile_of(packed, kernel, kv_bytes)
            kernels = f"packed {packed}, stock {kernel} and {8 * kv_bytes}-bit KV"
            if key in timed:
                notes.append(
                    f"no shipped profile is of {results.machine} with {kernels}: that of {profile.machine} decides"
                )
        else:
            profile = found.stored.profile
        choices[key] = profile_choice(profile, packed, backend, margin)
    return Candidate(text, lambda case: choices[key_of(case)](case), tuple(notes))


def _left_out(results: Results, packed: str, backend: str, margin: int | None) -> Choose:
    decode = [case for case in results.cases if case.step.rows == 1]
    margins = margins_of(decode, sms=results.sm_count) if margin is None else {}

    @cache
    def of_family(family: str) -> Choose:
        others = [case for case in decode if case.family != family]
        return profile_choice(fit_profile(replace(results, cases=others), margins), packed, backend, margin)

    def choose(case: MeasuredCase) -> Route:
        return _by_rule(case, packed, backend) if case.step.rows > 1 else of_family(case.family)(case)

    return choose


def _by_rule(case: MeasuredCase, packed: str, backend: str) -> Route:
    """The route of a verify step, which no profile decides: by the rule of an H200, on whatever GPU it was measured."""
    return verify.policy(H200.name, packed, stock_kernel(backend, case.shape), case.shape).decide(case.step).route


def profile_choice(profile: Profile, packed: str, backend: str, margin: int | None) -> Choose:
    """The decisions of a profile for steps that follow one on the stock backend.

    Args:
        margin: percent; None: the profile's.
    """
    if profile.cost("packed", packed) is None:
        raise ValueError(f"the profile has no cost of packed kernels {packed!r}; it has {', '.join(profile.packed)}")

    @cache
    def policy_of_steps(kernel: str, shape: ModelShape) -> CostPolicy | None:
        return cost_policy(profile, packed, kernel, shape, None if margin is None else margin / 100)

    def choose(case: MeasuredCase) -> Route:
        if case.step.rows > 1:
            return _by_rule(case, packed, backend)
        kernel = stock_kernel(backend, case.shape)
        policy = policy_of_steps(kernel, case.shape)
        if policy is None:
            raise ValueError(f"the profile has no cost of stock backend {kernel!r}; it has {', '.join(profile.stock)}")
        return policy.decide(case.step).route

    return choose


def outcomes(cases: Sequence[MeasuredCase], chosen: Candidate, packed: str, backend: str) -> list[Outcome]:
    """The measured steps with times of both routes, as the policy would have run them."""
    found = []
    for case in cases:
        packed_us, stock_us = case.packed.get(packed), case.stock_us(backend)
        if packed_us is not None and stock_us is not None:
            found.append(Outcome(case, chosen.choose(case), packed_us, stock_us))
    return found


def judge(steps: Sequence[Outcome]) -> Verdict:
    """Totals of outcomes.

    Raises:
        ValueError: there are no outcomes.
    """
    if not steps:
        raise ValueError("no measured step has both times")
    regrets = [(step.us / step.best_us - 1, step.case.key) for step in steps]
    losses = [(step.us / step.stock_us - 1, step.case.key) for step in steps]
    return Verdict(
        steps=len(steps),
        regret=sum(step.us for step in steps) / sum(step.best_us for step in steps) - 1,
        mean_regret=math.exp(sum(math.log1p(regret) for regret, _ in regrets) / len(steps)) - 1,
        worst_regret=max(regrets),
        worst_loss=max(losses),
        packed=sum(step.route is Route.PACKED for step in steps),
        wrong=sum(step.us > step.best_us for step in steps),
        behind=sum(step.us > (1 + BEHIND) * step.stock_us for step in steps),
        gain=math.exp(sum(math.log(step.stock_us / step.us) for step in steps) / len(steps)),
    )


def outcomes_by_pair(profile: Profile, cases: list[MeasuredCase]) -> dict[str, list[Outcome]]:
    """The steps as the profile would run them, by pair of measured packed and stock kernel that it has costs of."""
    found: dict[str, list[Outcome]] = {}
    for packed in profile.packed:
        for backend in BACKENDS:
            usable = [
                case
                for case in cases
                if packed in case.packed
                and case.stock_us(backend) is not None
                and (case.step.rows > 1 or stock_kernel(backend, case.shape) in profile.stock)
            ]
            if usable:
                chosen = Candidate(backend, profile_choice(profile, packed, backend, None))
                found[f"packed {packed} or stock {backend}"] = outcomes(usable, chosen, packed, backend)
    return found


def kernels_without_cost(profile: Profile, cases: Sequence[MeasuredCase]) -> list[str]:
    """The kernels with times of decode steps that `outcomes_by_pair` leaves out, because the profile cannot predict."""
    decode = [case for case in cases if case.step.rows == 1]
    packed = {kernel for case in decode for kernel in case.packed} - profile.packed.keys()
    stock = {kernel for case in decode for kernel in case.stock} - profile.stock.keys()
    return [*sorted(packed), *sorted(stock)]
