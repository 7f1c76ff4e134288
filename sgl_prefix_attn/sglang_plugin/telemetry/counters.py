"""Totals of one scheduler process: what was planned, packed, saved, and what fell back and why."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sgl_prefix_attn.core.planner import KvTokens, Planner
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

logger = logging.getLogger(__name__)

# Steps in a row that raise an exception of ours before nothing is packed any more.
MOST_FAILED_STEPS = 8
_OF_EXCEPTIONS = frozenset({fallback_reasons.EXCEPTION, fallback_reasons.HOOK_FAILED})


@dataclass
class Counters:
    """Monotonic totals since the process started; plain numbers, so that counting costs next to nothing.

    Attributes:
        host_seconds: time in our code on the scheduler thread before the model runs: paths, forest, plan, hand-over.
        kv_tokens_read: KV positions that packed steps read, per layer and KV head; `_per_request` is what
            request-wise attention would have read for them, `_unique` each position once.
        steps_packed: packed steps by mode (decode, extend, mixed, verify).
        one_token_steps: prefill (extend) and mixed steps with one token a request that ran as decode steps.
        shared_prefill_waits: how often a waiting request was passed over while another one computed its prefix.
        routed_steps: decode steps that could run packed or on the stock backend, by where they were sent (packed,
            stock). Those sent to the stock backend are no fallbacks.
        arm_steps: routed decode steps of live A/B tests, by arm (A, B).
        arm_step_seconds, arm_tokens: time and output tokens of those whose time is known, warm-up included.
        fallbacks: by reason; a step that went to the stock backend counts once, and so does, in a packed step, each
            layer that did, and a step of a packed graph that ran without sharing.
        planners: those whose plans are counted.
        plans_kept: steps that ran the plan of an earlier one without asking the planner.
        failures: exceptions of ours, and features that are off.
        may_stop: whether exceptions may end packing; not where several ranks replay packed graphs.
        stopped: whether they have.
    """

    host_seconds: float = 0.0
    kv_tokens_read: int = 0
    kv_tokens_per_request: int = 0
    kv_tokens_unique: int = 0
    steps_packed: Counter[str] = field(default_factory=lambda: Counter(decode=0, extend=0, mixed=0, verify=0))
    one_token_steps: Counter[str] = field(default_factory=lambda: Counter(extend=0, mixed=0))
    shared_prefill_waits: int = 0
    routed_steps: Counter[str] = field(default_factory=lambda: Counter(packed=0, stock=0))
    arm_steps: Counter[str] = field(default_factory=Counter)
    arm_step_seconds: dict[str, float] = field(default_factory=dict)
    arm_tokens: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    planners: list[Planner] = field(default_factory=list)
    plans_kept: int = 0
    failures: Failures = field(default_factory=Failures)
    may_stop: bool = True
    stopped: bool = False
    _failed_in_row: int = field(default=0, repr=False)
    _others_at_failure: int = field(default=-1, repr=False)  # steps without an exception before the last one

    def count_planners(self, planners: list[Planner]) -> None:
        """From now on, the totals have the plans of these planners in them."""
        self.planners += [planner for planner in planners if planner not in self.planners]

    def packed(self, mode: str, kv_tokens: KvTokens) -> None:
        """Counts a packed step of a mode, by what its plan reads."""
        self.steps_packed[mode] += 1
        self.kv_tokens_read += kv_tokens.packed
        self.kv_tokens_per_request += kv_tokens.per_request
        self.kv_tokens_unique += kv_tokens.unique

    def packed_on(self, num_requests: int, kv_tokens: KvTokens, steps: int) -> None:
        """Counts a decode step that runs the plan of `steps` steps ago, which read `kv_tokens`, without the planner."""
        grown = num_requests * steps
        self.plans_kept += 1
        self.steps_packed["decode"] += 1
        self.kv_tokens_read += kv_tokens.packed + grown
        self.kv_tokens_per_request += kv_tokens.per_request + grown
        self.kv_tokens_unique += kv_tokens.unique + grown

    def arm_timed(self, arm: str, seconds: float, tokens: int) -> None:
        """Counts a decode step of a live test whose time is known."""
        self.arm_step_seconds[arm] = self.arm_step_seconds.get(arm, 0.0) + seconds
        self.arm_tokens[arm] += tokens

    def fallback(self, reason: Reason) -> None:
        """Counts a fallback; the first one of each reason is logged with what it means."""
        if reason not in self.fallbacks:
            logger.info("prefixpack: first fallback to the stock backend for %r: %s", reason.key, reason.text)
        self.fallbacks[reason] += 1

    def fallbacks_by_key(self) -> dict[str, float]:
        """Fallbacks by the keys of their reasons."""
        return {reason.key: count for reason, count in self.fallbacks.items()}

    def plan_refused(self) -> None:
        """Logs the planner's first error; to be called while it is handled."""
        if fallback_reasons.PLAN_REFUSED not in self.fallbacks:
            logger.exception("prefixpack: the planner refused a batch; this and such steps use the stock backend")

    def plan_too_large(self, message: str) -> None:
        """Logs the first plan that did not fit, with the limit it broke."""
        if fallback_reasons.PLAN_TOO_LARGE not in self.fallbacks:
            logger.warning("prefixpack: %s; this and such steps run without it", message)

    def step_failed(self, part: str, error: BaseException, *, counted: bool = False) -> None:
        """Counts an exception for which a step, or the rest of it, runs on the stock backend.

        Nothing is packed any more after MOST_FAILED_STEPS in a row, if `may_stop`. Other totals tell whether a step
        went well in between, so that such steps do not pay for it.

        Args:
            counted: whether the step has been counted as a packed one.
        """
        self.failures.failed(part, error, "this step runs on the stock backend")
        others = sum(self.steps_packed.values()) + self.routed_steps["stock"] - counted
        others += sum(count for reason, count in self.fallbacks.items() if reason not in _OF_EXCEPTIONS)
        self._failed_in_row = self._failed_in_row + 1 if others == self._others_at_failure else 1
        self._others_at_failure = others + counted
        if self._failed_in_row >= MOST_FAILED_STEPS and self.may_stop and not self.stopped:
            self.stopped = True
            self.failures.switch_off("packing", fallback_reasons.STOPPED.key)
            logger.error("prefixpack: %s", fallback_reasons.STOPPED.text)

    @property
    def kv_tokens_saved(self) -> int:
        return self.kv_tokens_per_request - self.kv_tokens_read

    @property
    def plans_made(self) -> int:
        return sum(planner.plans_made for planner in self.planners)

    @property
    def plans_reused(self) -> int:
        return self.plans_kept + sum(planner.plans_reused for planner in self.planners)

    @property
    def plan_seconds(self) -> float:
        return sum(planner.plan_seconds for planner in self.planners)

    def as_dict(self) -> dict[str, Any]:
        """The totals as JSON-able values."""
        return {
            "plans_made": self.plans_made,
            "plans_reused": self.plans_reused,
            "plan_seconds": self.plan_seconds,
            "host_seconds": self.host_seconds,
            "kv_tokens_read": self.kv_tokens_read,
            "kv_tokens_per_request": self.kv_tokens_per_request,
            "kv_tokens_unique": self.kv_tokens_unique,
            "steps_packed": dict(self.steps_packed),
            "one_token_steps": dict(self.one_token_steps),
            "shared_prefill_waits": self.shared_prefill_waits,
            "routed_steps": dict(self.routed_steps),
            "arm_steps": dict(self.arm_steps),
            "arm_step_seconds": dict(self.arm_step_seconds),
            "arm_tokens": dict(self.arm_tokens),
            "fallbacks": self.fallbacks_by_key(),
            "failures": dict(self.failures.counts),
        }
