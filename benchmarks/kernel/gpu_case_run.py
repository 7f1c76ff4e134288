"""One case over all ways: results are checked first, then times are taken."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel.gpu_cases import Case
from benchmarks.kernel.gpu_limits import limits
from benchmarks.kernel.gpu_report import OURS
from benchmarks.kernel.gpu_timing import Timer
from benchmarks.kernel.gpu_ways import Way
from benchmarks.kernel.gpu_world import KvPool, World, relative_error
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures

TOLERANCE = 1.5e-2  # of the norm; bf16 outputs and weights round to about 3e-3
SAMPLED_REQUESTS = 3


class CaseRun:
    """One case, with the tensors all ways share."""

    def __init__(self, case: Case, ways: list[Way], pool: KvPool, timer: Timer, bandwidth: float) -> None:
        self.case, self.ways, self.timer = case, ways, timer
        self.world = World(case, pool, timer.device)
        self.limits = limits(case, bandwidth, kv_bytes=pool.k.dtype.itemsize)
        last = len(case.seq_lens) - 1
        self.sample = sorted({0, last, max(range(last + 1), key=lambda request: case.seq_lens[request])})
        self.dense = torch.stack([self.world.dense(request) for request in self.sample[:SAMPLED_REQUESTS]])
        self.ours: torch.Tensor | None = None
        self.device_lost = False

    def row(self) -> dict[str, Any]:
        case = self.case
        ways: dict[str, dict[str, Any]] = {}
        for way in self.ways:
            result = None if self.device_lost else self.measure(way)
            if result is not None:
                ways[way.name] = result
        return {
            "key": case.key, "case": case.name, "heads": f"{case.heads[0]}/{case.heads[1]}",
            "q_heads": case.heads[0], "kv_heads": case.heads[1], "requests": len(case.seq_lens),
            "tokens": case.tokens, "unique_tokens": case.unique_tokens, "reuse": case.tokens / case.unique_tokens,
            "step": asdict(StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)),
            "kv_bytes": case.kv_bytes(self.world.kv_dtype.itemsize),
            "limits": {
                name: round(getattr(self.limits, name), 3)
                for name in ("unique_us", "leafmerge_us", "mma_us", "per_request_us", "limit_us")
            },
            "ways": ways,
        }  # fmt: skip

    def measure(self, way: Way) -> dict[str, Any] | None:
        """Times and error of a way, or why there are none; None if the case is not for it."""
        try:
            options = way.bind(self.world)
            if not options:
                return None
            error, option = self.choose(way, options)
            way.use(option)
            way.plan()
            way.run()
            result: dict[str, Any] = {**self.timer.measure(way.plan, way.run).as_dict(), "error": error}
            if way.name == OURS:
                result["step_launch_us"] = round(self.steady(way), 3)
            return {**result, **way.facts()}
        except Exception as failure:  # a baseline that fails in one case must not end the run; the row says why
            self.device_lost = self.timer.device_is_lost()
            return {"failed": described(failure)}
        finally:
            way.release()

    def choose(self, way: Way, options: list[Any]) -> tuple[float, Any]:
        """(error, option) of the fastest option whose result is right."""
        right: list[tuple[float, float, Any]] = []
        failures = []
        for option in options:
            try:
                way.use(option)
                way.plan()
                error = self.check(way)
                right.append((self.timer.quick(way.run) if len(options) > 1 else 0.0, error, option))
            except Exception as failure:  # an option among several; the last failure is reported if none works
                failures.append(failure)
        if not right:
            raise failures[-1]
        _, error, option = min(right, key=lambda entry: entry[0])
        return error, option

    def check(self, way: Way) -> float:
        """Largest relative error against dense float32 attention and, once it is known, our result.

        Raises:
            ArithmeticError: beyond the tolerance.
        """
        self.world.out.fill_(torch.nan)
        result = way.run().clone()
        error = relative_error(result[self.sample[:SAMPLED_REQUESTS]], self.dense)
        if self.ours is not None:
            error = max(error, relative_error(result, self.ours))
        if not error <= TOLERANCE:
            raise ArithmeticError(f"wrong result: relative error {error:.2e}")
        if way.name == OURS:
            self.ours = result
        return error

    def steady(self, way: Any) -> float:
        """Wall time of a step that keeps forest and plan."""
        return min(self.timer.plan_and_launch(way.prepare, way.run) for _ in range(7))


def described(error: BaseException) -> str:
    text = re.sub(r"/\S*/(?=site-packages/|[^/\s]*cache/)", "", str(error))  # not where it is installed
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:300]
