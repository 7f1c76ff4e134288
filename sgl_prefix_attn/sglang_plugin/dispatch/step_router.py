"""The route of each decode or verify step that could run packed: packed, or as a whole on the stock backend.

`sgl_prefix_attn.routing` has the policies. This file keeps a route for some steps of a steady batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import MIB, token_bytes
from sgl_prefix_attn.routing.live_plan import LivePlan
from sgl_prefix_attn.routing.policy import FixedPolicy, Route, Router
from sgl_prefix_attn.routing.policy_names import PolicyName
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.live_abtest import RUNNING, LiveTest, StepClock
from sgl_prefix_attn.sglang_plugin.dispatch.live_policy import LivePolicies
from sgl_prefix_attn.sglang_plugin.dispatch.microbatches import LastSteps
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import DECODE_MODES, Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters


class LiveTestError(ValueError):
    """A live test cannot start: the message says why, and which setting to change.

    Args:
        running: what is running instead, as `StepRouter.start_live` takes it in `replace`; None: nothing is.
        silent_seconds: since its client was heard.
    """

    def __init__(self, message: str, running: tuple[str, int] | None = None, silent_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.running, self.silent_seconds = running, silent_seconds


class StepRouter:
    """Routes decode and verify steps of one backend, and counts them by route.

    Args:
        settings: settings in force.
        counters: totals of the process.
        executor: runs packed steps.
        policies: makes the policies to route by.
        microbatches: batches that take turns.

    Attributes:
        always_stock: whether no decode or verify step ever runs packed.
        watches_steps: whether `step_begins` has to be called: a test runs or was stopped since the last step,
            or its last arm has to be left. An attribute, because every step reads it.
    """

    def __init__(
        self,
        settings: Settings,
        counters: Counters,
        executor: Executor,
        policies: LivePolicies,
        *,
        microbatches: int,
    ) -> None:
        self.setting = settings.route
        self.name: PolicyName = settings.policy
        self.always_stock = self.name.fixed == "stock"
        self._counters = counters
        self.policies = policies
        self._router: Router | None = None
        self._verify_router: Router | None = None
        self._stock_steps = LastSteps[int](microbatches)  # steps that keep the stock route of one: their number so far
        self._decides = self.name.fixed is None
        self._decides_verify = self._decides and executor.kernels != "cpu"
        self._executor = executor
        self.live: LiveTest | None = None
        self.watches_steps = False
        self._arm: int | None = None  # of the present step in a live test

    # Live tests -----------------------------------------------------------------------------------------------------

    def start_live(self, plan: LivePlan, replace: Collection[tuple[str, int]] = ()) -> LiveTest:
        """Starts an A/B test.

        Args:
            replace: token and renewals of tests to end for it. A renewal in between keeps them.

        Raises:
            LiveTestError: a test is running, or decode steps of this server cannot change routes.
        """
        replaced = self._to_replace(replace)
        if self._executor.drafts > 1:
            raise LiveTestError("this server speculates: it has no decode steps, whose routes a test changes")
        if not self.policies.ready:
            raise LiveTestError("no decode step has run yet: send the server a request first")
        if self.always_stock or (self._executor.runs_in_graphs and not self.may_change("decode")):
            raise LiveTestError(
                f"decode steps of this server have one route (route = {self.setting}), and its graphs hold that one "
                "only: start it with PREFIXPACK_ROUTE=auto, or another policy that is not fixed"
            )
        first, second = (Router(self.policies.policy(name)) for name in plan.names())
        if replaced is not None:
            replaced.stop()
        self.live = LiveTest(plan, (first, second), StepClock(cuda=self._executor.kernels != "cpu"), self._counters)
        self.watches_steps = True
        return self.live

    def _to_replace(self, replace: Collection[tuple[str, int]]) -> LiveTest | None:
        """The running test, if it may be replaced; None if none is running.

        Raises:
            LiveTestError: one is running that may not be replaced.
        """
        running = self.live
        if running is None or running.status != RUNNING:
            return None
        known = (running.token, running.lease.renewals)
        if known not in replace:
            message = "a live test is running; wait for its end, or stop it"
            raise LiveTestError(message, known, running.lease.silent_seconds)
        return running

    def idle(self) -> None:
        """The server has no requests."""
        if self.live is not None:
            self.live.idle()

    def step_begins(self, is_decode: bool, requests: int) -> bool:
        """A forward begins in a live test.

        Returns:
            Whether its policy is another than that of the last decode step.
        """
        live = self.live
        runs = live is not None and live.status == RUNNING
        arm = live.step(is_decode, requests) if live is not None and runs else None
        keeps_arm = runs and not is_decode
        changed = not keeps_arm and arm != self._arm
        if changed:
            self._arm = arm
            self._stock_steps.clear()
        self.watches_steps = self._arm is not None or (live is not None and live.status == RUNNING)
        return changed

    # Decisions ------------------------------------------------------------------------------------------------------

    def may_change(self, mode: Mode) -> bool:
        """Whether steps of a kind, decode or verify, may go either way. Valid once the layers are known."""
        return self._router_of(mode) is not None

    @property
    def policy_in_use(self) -> str:
        """The policy that decides, by name. A server that speculates has verify steps in place of decode steps."""
        return self.policies.policy_in_use(self.name, verify_steps=self._routes_verify)

    @property
    def _routes_verify(self) -> bool:
        return self._executor.drafts > 1 and self._decides_verify

    def state(self) -> dict[str, Any]:
        """The setting, the policy and rule in use and the last decision, as JSON-able values."""
        return {
            "setting": self.setting,
            "policy": self.policy_in_use,
            **self.policies.state(self.name, verify_steps=self._routes_verify),
            "last": self._last(self._verify_router or self._router),
            "live": None if self.live is None else self._live_state(self.live),
        }

    def _live_state(self, live: LiveTest) -> dict[str, Any]:
        return {
            "status": live.status,
            "arms": list(live.plan.arms),
            "running": [self.policies.policy_in_use(name) for name in live.plan.names()],
            "arm": self._arm,
            "would": live.would,
            "last": [self._last(router) for router in live.routers],
        }

    def _last(self, router: Router | None) -> dict[str, Any] | None:
        return None if router is None or router.last is None else decision_state(router, self.policies.shape)

    def stays_packed(self) -> None:
        """Counts a step that could go either way and reuses the packed step before it."""
        if self._router is not None or self._arm is not None:
            self._count(Route.PACKED)

    def stays_stock(self, paths: StepPaths) -> bool:
        """Whether a step keeps the stock route of the last one: same batch, and its lengths were read lately."""
        if paths.mode not in DECODE_MODES:
            return False
        if not self.always_stock:
            age = self._stock_steps.get(paths)
            if age is None or age + 1 >= STEPS_BETWEEN_PLANS:
                return False
            self._stock_steps.keep(paths, age + 1)
        self._count(Route.STOCK)
        return True

    def decide(self, paths: StepPaths, host_lens: Int64Array) -> Route:
        """The route of a decode or verify step.

        Args:
            host_lens: [requests] KV lengths, including the tokens of this step.
        """
        self._stock_steps.drop(paths)
        arm, live = self._arm if paths.mode == "decode" else None, self.live
        router = self._router_of(paths.mode) if arm is None or live is None else live.routers[arm]
        if router is None:
            return Route.PACKED
        rows = self._executor.drafts if paths.mode == "verify" else 1
        route = router.decide(paths.forest, host_lens, rows)
        if arm is not None and live is not None:
            live.decided(paths.forest, host_lens, arm, route)
        self._count(route)
        if route is Route.STOCK:
            self._stock_steps.keep(paths, 0)
        return route

    def _count(self, route: Route) -> None:
        self._counters.routed_steps[route.value] += 1
        if self._arm is not None and self.live is not None:
            self.live.took(route is Route.PACKED)
            self._counters.arm_steps["AB"[self._arm]] += 1

    def _router_of(self, mode: Mode) -> Router | None:
        if mode != "verify":
            return self._usable_router()
        if self._verify_router is None and self._decides_verify and self.policies.ready:
            self._verify_router = Router(self.policies.policy(self.name, verify_steps=True))
        return self._verify_router

    def _usable_router(self) -> Router | None:
        """The router; None while the layers are unknown, and for good if every step runs packed."""
        if self._router is None and self._decides and self.policies.ready:
            policy = self.policies.policy(self.name)
            if isinstance(policy, FixedPolicy):
                self._decides = False
            else:
                self._router = Router(policy)
        return self._router


def decision_state(router: Router, shape: ModelShape) -> dict[str, Any]:
    """A router's last decision as JSON-able values: what sharing saves of a layer's KV, and of how much, in MiB."""
    assert router.last is not None, "it has decided a step"
    step, route = router.last
    saved, kv = (round(tokens * token_bytes(shape) / MIB, 2) for tokens in (step.saved_tokens, step.tokens))
    return {"route": route.value, "saved_mib": saved, "kv_mib": kv, "requests": step.requests}
