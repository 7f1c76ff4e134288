"""`prefixpack` as a baseline of its own: with its CUDA kernels, and with its Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import Fixture
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.forest import RadixMirror
from sgl_prefix_attn.core.gpu import gpu_of, planner_model
from sgl_prefix_attn.core.limits import code_capability
from sgl_prefix_attn.core.planner import ModelShape, Planner
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.core.triton_step import TritonStep

GROWTH = 64


class PrefixPack(Baseline):
    """Planner and GPU kernels. `plan` makes forest, plan, its copy and the step's gather anew, as a changed batch does.

    Plans are made for this GPU and these kernels, as servers make them; `overrides` replaces fields of the model. A
    batch whose members stay keeps forest and plan: `steady`, prepare and launch only, is what most steps pay.
    """

    name = "prefixpack"
    levels = "shared"
    step_class: type[CudaStep] | type[TritonStep] = CudaStep

    def __init__(self, device: torch.device, overrides: dict[str, Any] | None = None) -> None:
        self.device = device
        self.overrides = overrides
        self._step: CudaStep | TritonStep | None = None

    def bind(self, fixture: Fixture) -> list[Any]:
        case = self.fixture = fixture
        q_heads, kv_heads = fixture.heads
        self.shape = ModelShape(q_heads, kv_heads, fixture.head_dim, kv_bytes=fixture.kv_dtype.itemsize)
        model = planner_model(gpu_of(self.device), self.shape, self.code())
        self.model = replace(model, **(self.overrides or {}))
        self.lens = fixture.case.lengths
        self.mirror = RadixMirror()
        self.last_nodes = self.lens * 0 - 1
        for request, path in enumerate(case.case.paths):
            parent = -1
            for node, begin, end in path:
                if not self.mirror.known(node):
                    self.mirror.put(parent, begin, [node], [end], leaf=False)
                parent = node
            self.last_nodes[request] = parent
        self._make_plan()
        # What the plan gathers, and room for its tails to grow and for each item to be rounded up.
        room = (GROWTH + 128) * (len(self.lens) + len(self.plan_made.items))
        needed = StepLimits(
            queries=len(self.lens),
            items=len(self.plan_made.items),
            kv_slots=self.plan_made.kv_tokens_packed + room,
            partials=max(1, self.plan_made.num_partials),
        )
        self._step = self.step_class(self.shape, torch.bfloat16, self.device, needed, kv_dtype=fixture.kv_dtype)
        return [None]

    def code(self) -> int | None:
        """Compute capability of the native code that runs, None for Triton's kernels."""
        return code_capability(self.device)

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
        self._step.prepare(self.fixture.table, self.fixture.rows, self.fixture.lens64)

    def run(self) -> torch.Tensor:
        assert self._step is not None
        fixture = self.fixture
        self._step.attend(fixture.q, fixture.k, fixture.v, fixture.out, scale=fixture.scale)
        return fixture.out

    def facts(self) -> dict[str, Any]:
        plan = self.plan_made
        return {
            "items": len(plan.items),
            "partial_slots": plan.num_partials,
            "kv_tokens_packed": plan.kv_tokens_packed,
            "tile_rows": {
                str(rows): int((plan.items[:, 6] == rows).sum()) for rows in sorted(set(plan.items[:, 6].tolist()))
            },
        }

    def release(self) -> None:
        self._step = None


class PrefixPackTriton(PrefixPack):
    """The Triton kernels: of installs without nvcc, and of GPUs on which the native ones never ran."""

    name = "prefixpack_triton"
    step_class = TritonStep

    def code(self) -> None:
        return None
