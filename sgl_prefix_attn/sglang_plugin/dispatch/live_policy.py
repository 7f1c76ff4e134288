"""The routing policy of a running server: the profile that it predicts by, and the policy objects."""

from __future__ import annotations

import logging
from typing import Any

from sgl_prefix_attn.core.gpu import current_gpu
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import conservative, verify
from sgl_prefix_attn.routing.cost import KernelCost, KernelKind
from sgl_prefix_attn.routing.measured import GPU_KERNELS, stock_kernel
from sgl_prefix_attn.routing.policy import CostPolicy, FixedPolicy, Policy, Route, cost_policy, policy_of
from sgl_prefix_attn.routing.policy_names import PolicyName, parse
from sgl_prefix_attn.routing.profile import Profile
from sgl_prefix_attn.routing.profile_store import FoundProfile, ProfileStore, ServerFacts, facts_as_text
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor

logger = logging.getLogger(__name__)

HOW_TO_CALIBRATE = "measure it with `python -m sgl_prefix_attn calibrate`"


class LivePolicies:
    """Makes policies for one backend, all by the same profile.

    Args:
        settings: settings in force.
        executor: runs packed steps; the attention shape of its first planner represents all layers.
        stock_name: the stock backend's name.
        stock: the stock backend.
        store: profiles to choose from; the same on all ranks.
        dtype: of queries: bf16, fp16 or fp32.
        page_size: tokens of a page of the KV cache.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Executor,
        stock_name: str,
        stock: Any,
        *,
        store: ProfileStore,
        dtype: str,
        page_size: int,
    ) -> None:
        self._own_margin = None if settings.route_margin is None else settings.route_margin / 100
        self._executor = executor
        self._stock_name, self._stock = stock_name, stock
        self._store = store
        self._dtype = dtype
        self._page_size = page_size
        self._cost: Policy | None = None
        self.found: FoundProfile | None = None
        self.margin: int | None = None

    @property
    def ready(self) -> bool:
        """Whether the layers are known."""
        return bool(self._executor.planners)

    @property
    def shape(self) -> ModelShape:
        return self._executor.planners[0].shape

    def facts(self) -> ServerFacts:
        """What a profile has to fit."""
        gpu, capability = ("cpu", "") if self._executor.kernels == "cpu" else gpu_name()
        return ServerFacts(
            gpu, capability, self.shape, self._dtype, self._executor.kernels, self._stock_kernel, self._page_size
        )

    @property
    def _stock_kernel(self) -> str:
        return stock_kernel(self._stock_name, self.shape, getattr(self._stock, "decode_use_tensor_cores", None))

    def policy(self, name: PolicyName) -> Policy:
        """The policy behind a name. Valid once the layers are known."""
        if name.predicts and self._cost is None:
            self._cost = self._cost_policy()
        rule = conservative.ConservativePolicy(self.shape, self._executor.kernels)
        return policy_of(name, self._cost or rule, rule)

    def verify_policy(self, name: PolicyName) -> Policy:
        """As `policy`, for verify steps, where a rule stands for `cost`."""
        kernels = self._executor.kernels
        found = self._verify_rule()
        if name.predicts:
            logger.info("prefixpack: a verify step runs packed only if %s", verify.rule(found, kernels))
        return policy_of(name, found, conservative.ConservativePolicy(self.shape, kernels))

    def _verify_rule(self) -> Policy:
        return verify.policy(current_gpu().name, self._executor.kernels, self._stock_kernel, self.shape)

    def verify_policy_in_use(self, name: PolicyName) -> str:
        """As `policy_in_use`, for verify steps."""
        if not name.predicts or not self.ready:
            return str(name)
        actual = "verify rule" if isinstance(self._verify_rule(), verify.VerifyPolicy) else "conservative"
        words = [actual if condition.kind == "cost" else str(condition) for condition in name.conditions]
        return " and ".join(dict.fromkeys(words))

    def policy_in_use(self, name: PolicyName) -> str:
        """What decides under a name, for logs and the server's state: the conditions, with the rule for `cost`."""
        if not name.predicts or self._cost is None:
            return str(name)
        actual = {CostPolicy: "cost", FixedPolicy: "packed"}.get(type(self._cost), "conservative")
        words = [actual if condition.kind == "cost" else str(condition) for condition in name.conditions]
        return str(parse(" and ".join(words)))

    def profile_text(self) -> str | None:
        """The profile in use on one line, None without one."""
        if self.found is None:
            return None
        profile = self.found.stored.profile
        return f"{profile.machine}, commit {profile.commit}"

    def state(self) -> dict[str, Any]:
        """The profile in use, and what one has to fit without the shape, as JSON-able values."""
        found = self.found
        facts = self.facts() if self.ready else None
        return {
            "profile": self.profile_text(),
            "profile_from": None if found is None else str(found.stored),
            "borrowed": None if found is None or not found.borrowed else found.borrowed,
            "margin": self.margin,
            "facts": None
            if facts is None
            else {
                name: getattr(facts, name) for name in ("gpu", "capability", "dtype", "packed", "stock", "page_size")
            },
        }

    def _cost_policy(self) -> Policy:
        facts = self.facts()
        for message in self._store.unreadable:
            logger.warning("prefixpack: %s", message)
        found = self._store.find(facts)
        if found is None:
            return self._without_profile(facts)
        profile = found.stored.profile
        packed = self._kernel_cost(profile, "packed", facts.packed)
        stock = self._kernel_cost(profile, "stock", facts.stock)
        if packed is None or stock is None:  # a profile named by route_profile
            return FixedPolicy(Route.PACKED)
        self.found = found
        policy = cost_policy(profile, facts.packed, facts.stock, facts.shape, margin=self._own_margin)
        assert policy is not None  # it has both costs
        self.margin = round(100 * policy.margin)
        logger.info(
            "prefixpack: decode steps go where they are predicted to be faster, by the %s of %s (commit %s), margin "
            "%d %%%s",
            found.stored,
            profile.machine,
            profile.commit,
            self.margin,
            "" if policy.neighbours is None else f" and what {len(policy.neighbours)} measured steps add",
        )
        if found.borrowed:
            logger.info("prefixpack: the profile was measured with %s", found.borrowed)
        return policy

    def _without_profile(self, facts: ServerFacts) -> Policy:
        if facts.packed == "cpu" or facts.stock not in GPU_KERNELS:  # torch_native runs request by request
            return FixedPolicy(Route.PACKED)
        logger.warning(
            "prefixpack: no routing profile for %s, so a decode step runs packed only if %s; %s (this server: %s)",
            facts.gpu,
            conservative.rule(facts.packed),
            HOW_TO_CALIBRATE,
            facts_as_text(facts),
        )
        return conservative.ConservativePolicy(facts.shape, facts.packed)

    def _kernel_cost(self, profile: Profile, kind: KernelKind, kernel: str) -> KernelCost | None:
        cost = profile.cost(kind, kernel)
        if cost is None:
            logger.warning(
                "prefixpack: the routing profile has no cost of %s kernel %r, so all decode steps run packed; %s, or "
                "set route to packed or stock",
                kind,
                kernel,
                HOW_TO_CALIBRATE,
            )
        return cost


def gpu_name() -> tuple[str, str]:
    """CUDA's name and compute capability of the current GPU; those of an H200 where interpreted kernels replace one."""
    gpu = current_gpu()
    return gpu.name, "{}.{}".format(*gpu.capability)
