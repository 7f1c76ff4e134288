"""The route of each decode or verify step that could run packed: packed, or as a whole on the stock backend.

`sgl_prefix_attn.routing` predicts the time of both. This file selects the profile and the kernels for it, and keeps a
route for some steps of a steady batch. No profile knows verify steps, so the conservative rule decides them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing import conservative
from sgl_prefix_attn.routing.cost import CostModel, Kind
from sgl_prefix_attn.routing.measured import stock_kernel
from sgl_prefix_attn.routing.policy import CostPolicy, Route, Router
from sgl_prefix_attn.routing.profile import Profile, load_profile, shipped_profile_for
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

logger = logging.getLogger(__name__)


class StepRouter:
    """Routes decode and verify steps of one backend, and counts them by route.

    Args:
        settings: settings in force.
        counters: totals of the process.
        executor: runs packed steps; the attention shape of its first planner represents all layers.
        stock_name: the stock backend's name.
        stock: the stock backend.

    Raises:
        ProfileError: `route_profile` cannot be read or is invalid.
    """

    def __init__(self, settings: Settings, counters: Counters, executor: Executor, stock_name: str, stock: Any) -> None:
        self.setting = settings.route
        self._own_margin = settings.route_margin
        self._counters = counters
        self._executor = executor
        self._stock_name, self._stock = stock_name, stock
        self._own_profile: Profile | None = None
        self._profile: Profile | None = None  # in use
        self._router: Router | None = None
        self._verify_router: Router | None = None
        self._stock_paths: StepPaths | None = None  # paths of the last step if it was routed to the stock backend
        self._age = 0
        if settings.route == "auto" and settings.route_profile is not None:
            self._own_profile = load_profile(settings.route_profile)
        self._decides_verify = settings.route == "auto" and executor.kernels != "cpu"
        self._decides = settings.route == "auto" and (self._own_profile is not None or executor.kernels != "cpu")

    @property
    def always_stock(self) -> bool:
        """Whether no decode or verify step ever runs packed."""
        return self.setting == "stock"

    def may_change(self, mode: Mode) -> bool:
        """Whether steps of a kind, decode or verify, may go either way. Valid once the layers are known."""
        return self._router_of(mode) is not None

    def state(self) -> dict[str, Any]:
        """The setting, the profile in use and the last decision, as JSON-able values."""
        router = self._verify_router or self._router
        last = None if router is None else router.last
        return {
            "setting": self.setting,
            "profile": None if self._profile is None else f"{self._profile.machine}, commit {self._profile.commit}",
            "last": last
            and {
                "route": last.route.value,
                "packed_us": last.packed_us and round(last.packed_us, 2),
                "stock_us": last.stock_us and round(last.stock_us, 2),
            },
        }

    def stays_packed(self) -> None:
        """Counts a step that could go either way and reuses the packed step before it."""
        if self._router is not None:
            self._counters.routed_steps["packed"] += 1

    def stays_stock(self, paths: StepPaths | str) -> bool:
        """Whether a step keeps the stock route of the last one: same batch, and its lengths were read lately."""
        if isinstance(paths, str) or paths.mode not in ("decode", "verify"):
            return False
        if not self.always_stock:
            if paths is not self._stock_paths or self._age + 1 >= STEPS_BETWEEN_PLANS:
                return False
            self._age += 1
        self._counters.routed_steps["stock"] += 1
        return True

    def decide(self, paths: StepPaths, host_lens: Int64Array) -> Route:
        """The route of a decode or verify step.

        Args:
            host_lens: [requests] KV lengths, including the tokens of this step.
        """
        self._stock_paths = None
        router = self._router_of(paths.mode)
        if router is None:
            return Route.PACKED
        route = router.decide(paths.forest, host_lens)
        self._counters.routed_steps[route.value] += 1
        if route is Route.STOCK:
            self._stock_paths, self._age = paths, 0
        return route

    def _router_of(self, mode: Mode) -> Router | None:
        if mode != "verify":
            return self._usable_router()
        if self._verify_router is None and self._decides_verify and self._executor.planners:
            self._verify_router = Router(conservative.ConservativePolicy(self._executor.planners[0].shape))
            logger.info("prefixpack: a verify step runs packed only if %s", conservative.RULE)
        return self._verify_router

    def _usable_router(self) -> Router | None:
        if self._router is None and self._decides and self._executor.planners:
            self._router = self._make_router(self._executor.planners[0].shape)
        return self._router

    def _make_router(self, shape: ModelShape) -> Router | None:
        """The router; None, for good, if the profile has no cost of the kernels."""
        kernel = stock_kernel(self._stock_name, shape, getattr(self._stock, "decode_use_tensor_cores", None))
        gpu = _gpu_name()
        profile = self._own_profile or shipped_profile_for(gpu, self._executor.kernels, kernel, shape.kv_bytes)
        if profile is None:
            logger.warning(
                "prefixpack: no routing profile for %s, so a decode step runs packed only if %s; measure the GPU with "
                "`python -m benchmarks.kernel.gpu_attention`, fit a profile with `python -m sgl_prefix_attn route fit` "
                "and set route_profile",
                gpu,
                conservative.RULE,
            )
            return Router(conservative.ConservativePolicy(shape))
        packed = self._cost(profile, "packed", self._executor.kernels)
        stock = self._cost(profile, "stock", kernel)
        if packed is None or stock is None:
            self._decides = False
            return None
        self._profile = profile
        own, found = self._own_margin, profile.margin(self._executor.kernels, kernel)
        margin = found if own is None else own
        logger.info(
            "prefixpack: decode steps go where they are predicted to be faster, by a profile of %s (commit %s), margin "
            "%d %%",
            profile.machine,
            profile.commit,
            margin,
        )
        if shape.kv_bytes != profile.kv_bytes:
            logger.info(
                "prefixpack: the profile was measured with %d-bit KV; of %d bits, predictions know the bytes alone",
                8 * profile.kv_bytes,
                8 * shape.kv_bytes,
            )
        return Router(CostPolicy(packed, stock, shape, margin / 100))

    def _cost(self, profile: Profile, kind: Kind, kernel: str) -> CostModel | None:
        cost = profile.cost(kind, kernel)
        if cost is None:
            logger.warning(
                "prefixpack: the routing profile has no cost of %s kernel %r, so all decode steps run packed; fit one "
                "with `python -m sgl_prefix_attn route fit`, or set route to packed or stock",
                kind,
                kernel,
            )
        return cost


def _gpu_name() -> str:
    """CUDA's name of the current GPU; that of an H200 where interpreted kernels replace one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"
