"""State of pinning in this process: its settings, and one manager for each prefix cache that a hook has seen."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.metrics import PinningMetrics
from sgl_prefix_attn.sglang_plugin.pinning.registration import why_not_read
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import lockable_tree
from sgl_prefix_attn.sglang_plugin.telemetry.failures import OF_AN_EXCEPTION, Failures
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Refused
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import MetricsExporter

logger = logging.getLogger(__name__)

# Waiting requests that count where hints began retention: any client can, and a queue that SGLang sorts anew in each
# pass is read anew. SGLang itself looks for the prefixes of so many.
HINTED_LOOKAHEAD = 128


@dataclass(frozen=True)
class PinningSettings:
    """The settings of pinning and retention.

    Attributes:
        budget_percent: share of the KV pool that may be pinned; 0: no pins.
        retention: whether retention chooses what is evicted, from the start and with the memory of past use.
        hints: whether it does so from the first request with hints or a session on.
        hint_budget_percent: share of the KV pool that hints may keep.
        jobs: whether requests may announce the shared prefixes of their offline job to retention.
        lookahead: waiting requests that retention counts.
        block: tokens per prefix key of retention.
        flush_steps: scheduler steps between two updates of the metrics; they are updated when a pin changes too.
        metrics: whether there are any.
    """

    budget_percent: int = 0
    retention: bool = False
    hints: bool = False
    hint_budget_percent: int = 0
    jobs: bool = False
    lookahead: int = 1024
    block: int = 64
    flush_steps: int = 32
    metrics: bool = True

    @classmethod
    def of(cls, settings: Settings) -> PinningSettings:
        return cls(
            budget_percent=settings.pin_budget_percent,
            retention=settings.retention == "reuse",
            hints=settings.retention == "hints",
            hint_budget_percent=settings.hint_budget_percent,
            jobs=settings.group_scheduling,
            lookahead=settings.retention_lookahead,
            block=settings.retention_block,
            flush_steps=settings.metrics_flush_steps,
            metrics=settings.metrics,
        )


class PinningState:
    """The managers of a process: one per prefix cache, as a rule one in all.

    Args:
        failures: exceptions of the process, and what is off.

    Attributes:
        settings: the settings.
        metrics: None before the first update, and if SGLang exports no metrics.
        awake: whether there is anything to do: pins or retention are asked for, or a request had hints or a session.
        sends_kv: whether this is a prefill server of disaggregated serving. Known once there is a manager.
    """

    def __init__(self, settings: PinningSettings, failures: Failures) -> None:
        self.settings, self.failures = settings, failures
        self.metrics: PinningMetrics | None = None
        self.sends_kv = False
        self.awake = settings.budget_percent > 0 or settings.retention
        self._hinted = self._listens = False
        # By id(cache); the cache is kept alive, so the id stays its own.
        self._managers: dict[int, tuple[Any, PinningManager | None]] = {}
        self._steps = 0

    def manager_of(self, cache: Any) -> PinningManager | None:
        """The manager of this cache, None if there is no cache, nothing to do, or it cannot be pinned. Never raises."""
        if cache is None or not self.awake:
            return None
        known = self._managers.get(id(cache))
        if known is None:
            try:
                manager = self._make(cache)
            except Exception as error:  # the one guard of making a manager
                self.failures.failed("pins", error)
                self._off(OF_AN_EXCEPTION)
                manager = None
            known = self._managers[id(cache)] = (cache, manager)
        return known[1]

    def hinted(self) -> None:
        """A request has hints or a session. The first one starts retention, where the settings leave it to hints."""
        if self._hinted:
            return
        self._hinted = True
        if not self.settings.hints and not self.settings.retention:
            return
        refusal = why_not_read("reuse" if self.settings.retention else "hints", versions.server_args())
        if refusal is not None:
            logger.warning("prefixpack: KV hints and sessions are not read: %s", refusal)
            self.failures.switch_off("hints", refusal)
            return
        self.awake = self._listens = True
        for _, manager in self._managers.values():
            if manager is not None:
                manager.listen()

    def step_done(self, scheduler: Any, manager: PinningManager) -> None:
        """Updates the metrics every `flush_steps` steps."""
        self._steps += 1
        if self._steps >= self.settings.flush_steps:
            self.flush_metrics(scheduler, manager)

    def idle(self, scheduler: Any, manager: PinningManager) -> None:
        """Updates the metrics if a step ran since the last time: it may be the last one for long."""
        if self._steps:
            self.flush_metrics(scheduler, manager)

    def flush_metrics(self, scheduler: Any, manager: PinningManager) -> None:
        """Updates the metrics; the first call makes them, where SGLang and the settings want any."""
        self._steps = 0
        if self.metrics is None and self.settings.metrics:
            facts = ServerFacts.of(scheduler.tp_worker.model_runner)
            exporter = MetricsExporter.of_server(facts.server_args, facts.ranks)
            self.metrics = None if exporter is None else PinningMetrics(exporter.labels)
        if self.metrics is not None:
            self.metrics.update(manager.counters)

    def _make(self, cache: Any) -> PinningManager | None:
        mode = versions.disaggregation_mode()
        self.sends_kv = mode == "prefill"
        if mode == "decode":
            # Its queue admits without the adder that sheds pins, so a request could wait for pinned tokens for ever.
            self._off("this is a decode server of disaggregated serving")
            return None
        tree = lockable_tree(cache)
        if isinstance(tree, Refused):
            self._off(tree.detail)
            return None
        size = cache.token_to_kv_pool_allocator.size
        budget = size * self.settings.budget_percent // 100
        logger.info(
            "prefixpack: pins in %s through %s: budget %d of %d tokens, retention %s",
            type(cache).__name__,
            tree.name,
            budget,
            size,
            "on" if self.settings.retention else "by hints" if self.settings.hints else "off",
        )
        manager = PinningManager(
            tree,
            cache,
            budget=budget,
            retention=self.settings.retention,
            remember=self.settings.retention,
            hint_tokens=size * self.settings.hint_budget_percent // 100,
            jobs=self.settings.jobs,
            lookahead=self.settings.lookahead
            if self.settings.retention
            else min(self.settings.lookahead, HINTED_LOOKAHEAD),
            block=self.settings.block,
        )
        manager.counters.record = self.failures
        if self._listens:
            manager.listen()
        return manager

    def _off(self, why: str) -> None:
        """Logs and records why this process has no pins and no retention."""
        logger.warning("prefixpack: no pins and no retention: %s", why)
        if self.settings.budget_percent:
            self.failures.switch_off("pin_budget_percent", why)
        if self.settings.retention:
            self.failures.switch_off("retention", why)
        if self._listens:
            self.failures.switch_off("hints", why)
