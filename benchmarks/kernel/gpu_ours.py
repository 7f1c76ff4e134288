"""`prefixpack` as a way to compute a case: with its CUDA kernels, and with its Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernel.gpu_cases import HEAD_DIM
from benchmarks.kernel.gpu_ways import Way
from benchmarks.kernel.gpu_world import SCALE, World
from sgl_prefix_attn.core.cuda_step import GpuStep
from sgl_prefix_attn.core.forest import RadixMirror
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.core.triton_step import TritonStep

GROWTH = 64


def device_model(sm_count: int, group: int, overrides: dict[str, Any] | None = None) -> DeviceModel:
    """What plans are made for; `overrides` replaces fields by name."""
    return replace(DeviceModel.gpu(sm_count, group=group), **(overrides or {}))


class PrefixPack(Way):
    """Planner and GPU kernels. `plan` makes forest, plan, its copy and the step's gather anew, as a changed batch does.

    A batch whose members stay keeps forest and plan: `steady`, prepare and launch only, is what most steps pay.
    """

    name = "prefixpack"
    levels = "shared"
    step_class: type[GpuStep] | type[TritonStep] = GpuStep

    def __init__(self, device: torch.device, overrides: dict[str, Any] | None = None) -> None:
        self.device = device
        self.overrides = overrides
        self._step: GpuStep | TritonStep | None = None

    def bind(self, world: World) -> list[Any]:
        case = self.world = world
        q_heads, kv_heads = world.heads
        self.shape = ModelShape(q_heads, kv_heads, HEAD_DIM, kv_bytes=world.kv_dtype.itemsize)
        multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.model = device_model(multiprocessors, self.shape.group, self.overrides)
        self.lens = world.case.lengths
        self.mirror = RadixMirror()
        self.last_nodes = self.lens * 0 - 1
        for request, path in enumerate(case.case.paths):
            parent = -1
            for node, begin, end in path:
                if not self.mirror.known(node):
                    self.mirror.put(node, parent, begin, end)
                parent = node
            self.last_nodes[request] = parent
        self._make_plan()
        # What the plan gathers, and room for its tails to grow and for each item to be rounded up.
        room = (GROWTH + 128) * (len(self.lens) + len(self.plan_made.items))
        needed = StepLimits(
            queries=len(self.lens),
            items=len(self.plan_made.items),
            kv_slots=self.plan_made.kv_tokens_packed + room,
            partial_slots=max(1, self.plan_made.num_slots),
        )
        self._step = self.step_class(self.shape, torch.bfloat16, self.device, needed, kv_dtype=world.kv_dtype)
        return [None]

    def _make_plan(self) -> None:
        forest = self.mirror.forest(self.last_nodes, self.lens - 1)
        self.plan_made = Planner(self.shape, self.model).plan(forest, self.lens)

    def plan(self) -> None:
        assert self._step is not None
        self._make_plan()
        self._step.load(self.plan_made, self.lens, GROWTH)
        self.prepare()

    def prepare(self) -> None:
        assert self._step is not None
        self._step.prepare(self.world.table, self.world.rows, self.world.lens64)

    def run(self) -> torch.Tensor:
        assert self._step is not None
        world = self.world
        self._step.attend(world.q, world.k, world.v, world.out, scale=SCALE)
        return world.out

    def facts(self) -> dict[str, Any]:
        plan = self.plan_made
        return {
            "items": len(plan.items),
            "partial_slots": plan.num_slots,
            "kv_tokens_packed": plan.kv_tokens_packed,
            "tile_rows": {
                str(rows): int((plan.items[:, 6] == rows).sum()) for rows in sorted(set(plan.items[:, 6].tolist()))
            },
        }

    def release(self) -> None:
        self._step = None


class PrefixPackTriton(PrefixPack):
    """The same plans on the Triton kernels, which are what installs without nvcc."""

    name = "prefixpack_triton"
    step_class = TritonStep
