"""One case over all baselines: results are checked first, then times are taken."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel.baseline import Baseline
from benchmarks.kernel.fixture import KV_DTYPES, Fixture, KvPool, relative_error
from benchmarks.kernel.gpu_limits import limits
from benchmarks.kernel.gpu_report import OURS
from benchmarks.kernel.timing import Timer
from benchmarks.simulator import figures_of, makespan
from benchmarks.workloads.case import Case
from sgl_prefix_attn.core.gpu import gpu_of
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures

TOLERANCE = 1.5e-2  # of the norm; bf16 outputs and weights round to about 3e-3
SAMPLED_REQUESTS = 3


class CaseRun:
    """One case, with the tensors all baselines share."""

    def __init__(self, case: Case, baselines: list[Baseline], pool: KvPool, timer: Timer, bandwidth: float) -> None:
        self.case, self.baselines, self.timer = case, baselines, timer
        self.fixture = Fixture(case, pool, timer.device)
        self.limits = limits(case, bandwidth, kv_bytes=pool.k.dtype.itemsize)
        last = len(case.seq_lens) - 1
        self.sample = sorted({0, last, max(range(last + 1), key=lambda request: case.seq_lens[request])})
        self.dense = torch.stack([self.fixture.dense(request) for request in self.sample[:SAMPLED_REQUESTS]])
        self.ours: torch.Tensor | None = None
        self.device_lost = False

    def row(self) -> dict[str, Any]:
        case = self.case
        baselines: dict[str, dict[str, Any]] = {}
        for baseline in self.baselines:
            result = None if self.device_lost else self.measure(baseline)
            if result is not None:
                baselines[baseline.name] = result
        return {
            "key": case.key, "case": case.name, "heads": f"{case.heads[0]}/{case.heads[1]}",
            "q_heads": case.heads[0], "kv_heads": case.heads[1], "requests": len(case.seq_lens),
            "head_dim": case.head_dim, "kv_dtype": kv_dtype_name(self.fixture.kv_dtype), "detail": case.detail,
            "tokens": case.tokens, "unique_tokens": case.unique_tokens, "reuse": case.tokens / case.unique_tokens,
            "step": asdict(StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)),
            "kv_bytes": case.kv_bytes(self.fixture.kv_dtype.itemsize),
            "limits": {
                name: round(getattr(self.limits, name), 3)
                for name in ("unique_us", "leafmerge_us", "mma_us", "per_request_us", "limit_us")
            },
            "baselines": baselines,
        }  # fmt: skip

    def measure(self, baseline: Baseline) -> dict[str, Any] | None:
        """Times and error of a baseline, or why there are none; None if the case is not for it."""
        try:
            options = baseline.bind(self.fixture)
            if not options:
                return None
            error, option = self.choose(baseline, options)
            baseline.use(option)
            baseline.plan()
            baseline.run()
            result: dict[str, Any] = {**self.timer.measure(baseline.plan, baseline.run).as_dict(), "error": error}
            if baseline.name == OURS:
                result["step_launch_us"] = round(self.steady(baseline), 3)
                result["predicted_us"] = self.predicted(baseline)
            return {**result, **baseline.facts()}
        except Exception as failure:  # a baseline that fails in one case must not end the run; the row says why
            self.device_lost = self.timer.device_is_lost()
            return {"failed": described(failure)}
        finally:
            baseline.release()

    def choose(self, baseline: Baseline, options: list[Any]) -> tuple[float, Any]:
        """(error, option) of the fastest option whose result is right."""
        right: list[tuple[float, float, Any]] = []
        failures = []
        for option in options:
            try:
                baseline.use(option)
                baseline.plan()
                error = self.check(baseline)
                right.append((self.timer.quick(baseline.run) if len(options) > 1 else 0.0, error, option))
            except Exception as failure:  # an option among several; the last failure is reported if none works
                failures.append(failure)
        if not right:
            raise failures[-1]
        _, error, option = min(right, key=lambda entry: entry[0])
        return error, option

    def check(self, baseline: Baseline) -> float:
        """Largest relative error against dense float32 attention and, once it is known, our result.

        Raises:
            ArithmeticError: beyond the tolerance.
        """
        self.fixture.out.fill_(torch.nan)
        result = baseline.run().clone()
        error = relative_error(result[self.sample[:SAMPLED_REQUESTS]], self.dense)
        if self.ours is not None:
            error = max(error, relative_error(result, self.ours))
        if not error <= TOLERANCE:
            raise ArithmeticError(f"wrong result: relative error {error:.2e}")
        if baseline.name == OURS:
            self.ours = result
        return error

    def steady(self, baseline: Any) -> float:
        """Wall time of a step that keeps forest and plan."""
        return min(self.timer.plan_and_launch(baseline.prepare, baseline.run) for _ in range(7))

    def predicted(self, baseline: Any) -> float:
        """Microseconds of the baseline's plan by the simulator."""
        figures = figures_of(gpu_of(baseline.device).name, baseline.shape)
        found = makespan(baseline.plan_made, baseline.lens, baseline.shape, baseline.model, figures)
        return round(found.seconds * 1e6, 3)


def kv_dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in KV_DTYPES.items() if known is dtype)


def described(error: BaseException) -> str:
    text = re.sub(r"/\S*/(?=site-packages/|flashinfer/|[^/\s]*cache/)", "", str(error))  # not where it is installed
    return f"{type(error).__name__}: {text}".replace("\n", " ")[:300]
