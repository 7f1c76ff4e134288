"""Totals of one scheduler process: what was planned, packed, saved, and what fell back and why."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sgl_prefix_attn.core.planner import KvTokens, Planner
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

logger = logging.getLogger(__name__)


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
    fallbacks: Counter[str] = field(default_factory=Counter)
    planners: list[Planner] = field(default_factory=list)
    plans_kept: int = 0

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

    def fallback(self, reason: str) -> None:
        """Counts a fallback; the first one of each reason is logged with what it means."""
        if reason not in self.fallbacks:
            logger.info("prefixpack: first fallback to the stock backend for %r: %s", reason, explained(reason))
        self.fallbacks[reason] += 1

    def plan_refused(self) -> None:
        """Logs the planner's first error; to be called while it is handled."""
        if fallback_reasons.PLAN_REFUSED not in self.fallbacks:
            logger.exception("prefixpack: the planner refused a batch; this and such steps use the stock backend")

    def plan_too_large(self, message: str) -> None:
        """Logs the first plan that did not fit, with the limit it broke."""
        if fallback_reasons.PLAN_TOO_LARGE not in self.fallbacks:
            logger.warning("prefixpack: %s; this and such steps run without it", message)

    def hook_failed(self) -> None:
        """Counts an exception of ours, to be called while it is handled; the first one is logged with traceback."""
        if fallback_reasons.HOOK_FAILED not in self.fallbacks:
            logger.exception("prefixpack: reading request paths failed; this and such steps use the stock backend")
        self.fallbacks[fallback_reasons.HOOK_FAILED] += 1

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
            "fallbacks": dict(self.fallbacks),
        }


def explained(reason: str) -> str:
    """What a fallback reason means."""
    return fallback_reasons.EXPLANATIONS[reason]
