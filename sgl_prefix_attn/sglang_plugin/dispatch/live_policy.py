"""The routing policies of a running server."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from sgl_prefix_attn.core.gpu import current_gpu
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import rule, verify
from sgl_prefix_attn.routing.conservative import ConservativePolicy
from sgl_prefix_attn.routing.policy import FixedPolicy, Policy, policy_of
from sgl_prefix_attn.routing.policy_names import PolicyName
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor

logger = logging.getLogger(__name__)

_NAMES = {rule.RulePolicy: "rule", verify.VerifyPolicy: "verify rule", FixedPolicy: "packed"}


class LivePolicies:
    """Makes policies for one backend.

    Args:
        executor: runs packed steps; the attention shape of its first planner represents all layers.
        stock_name: the stock backend's name.
    """

    def __init__(self, executor: Executor, stock_name: str) -> None:
        self._executor = executor
        self._stock_name = stock_name
        self._found: dict[bool, Policy] = {}  # behind `auto`, by whether it is for verify steps
        self._told: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether the layers are known."""
        return bool(self._executor.planners)

    @property
    def shape(self) -> ModelShape:
        return self._executor.planners[0].shape

    def kernels(self) -> rule.KernelPair:
        """The kernels that a step may run on."""
        gpu, capability = ("cpu", "") if self._executor.kernels == "cpu" else gpu_name()
        return rule.KernelPair(gpu, capability, self._executor.kernels, self._stock_name)

    def policy(self, name: PolicyName, *, verify_steps: bool = False) -> Policy:
        """The policy behind a name, for decode or verify steps. Valid once the layers are known."""
        auto = self._auto(verify_steps)
        if name.automatic:
            self._tell("verify" if verify_steps else "decode", auto)
        return policy_of(name, self.shape, auto, ConservativePolicy(self.shape, self._executor.kernels))

    def policy_in_use(self, name: PolicyName, *, verify_steps: bool = False) -> str:
        """What decides under a name, for logs and the server's state: the conditions, with the rule for `auto`."""
        if not name.automatic or not self.ready:
            return str(name)
        actual = _NAMES.get(type(self._auto(verify_steps)), "conservative")
        words = [actual if condition.kind == "auto" else str(condition) for condition in name.conditions]
        others = [word for word in dict.fromkeys(words) if word != "packed"]
        return " and ".join(others) or "packed"

    def state(self, name: PolicyName, *, verify_steps: bool = False) -> dict[str, Any]:
        """The rule behind a name, None if it has none, and the kernels; both None before the layers are known."""
        if not self.ready:
            return {"rule": None, "kernels": None}
        auto = self._auto(verify_steps)
        has_rule = name.automatic and not isinstance(auto, FixedPolicy)
        return {"rule": str(auto) if has_rule else None, "kernels": asdict(self.kernels())}

    def _auto(self, verify_steps: bool) -> Policy:
        found = self._found.get(verify_steps)
        if found is None:
            kernels = self.kernels()
            found = rule.auto(kernels, self.shape)
            if verify_steps:
                found = verify.policy(kernels.gpu, kernels.packed, kernels.stock, self.shape)
            self._found[verify_steps] = found
        return found

    def _tell(self, mode: str, auto: Policy) -> None:
        """Logs the rule of `auto` once for a kind of steps, as a warning where it was not measured."""
        if mode in self._told or isinstance(auto, FixedPolicy):
            return
        self._told.add(mode)
        if isinstance(auto, ConservativePolicy) and mode == "decode":
            kernels = self.kernels()
            logger.warning(
                "prefixpack: %s kernels over %s were not measured on a %s, so a decode step runs packed only if %s",
                kernels.packed, kernels.stock, kernels.gpu, auto,
            )  # fmt: skip
        else:
            logger.info("prefixpack: a %s step runs packed only if %s", mode, auto)


def gpu_name() -> tuple[str, str]:
    """CUDA's name and compute capability of the current GPU; those of an H200 where interpreted kernels replace one."""
    gpu = current_gpu()
    return gpu.name, "{}.{}".format(*gpu.capability)
