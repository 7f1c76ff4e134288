"""Measured decode steps: what `benchmarks.kernel.gpu_attention` writes, as features and times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures

# Ways in the results -> kernels in a profile.
PACKED_WAYS = {"prefixpack": "native", "prefixpack_triton": "triton"}
# By way of the benchmark, the SGLang backend and whether it uses tensor cores.
STOCK_WAYS: dict[str, tuple[str, bool | None]] = {
    "fa3": ("fa3", None),
    "flashinfer_decode_tc": ("flashinfer", True),
    "flashinfer_decode_cc": ("flashinfer", False),
    "triton": ("triton", None),
}
# Bytes of an element by the results' name for the type of KV.
KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}
# Layers are far apart in a model, so nothing of their KV is in the L2 cache when their turn comes.
TIME = "cold_us"


class ResultsError(ValueError):
    """A results file cannot be used: the message names file and place."""


@dataclass(frozen=True)
class MeasuredCase:
    """One decode step of one layer.

    Attributes:
        packed, stock: measured microseconds, by kernel as profiles name them; absent if it failed.
    """

    key: str
    family: str
    shape: ModelShape
    step: StepFeatures
    packed: Mapping[str, float]
    stock: Mapping[str, float]

    def stock_us(self, backend: str) -> float | None:
        """The time of an SGLang backend, None if it was not measured."""
        return self.stock.get(stock_kernel(backend, self.shape))


@dataclass(frozen=True)
class Results:
    """A results file."""

    source: str
    machine: str
    commit: str
    measured: str
    kv_bytes: int
    cases: list[MeasuredCase]


def stock_kernel(backend: str, shape: ModelShape, tensor_cores: bool | None = None) -> str:
    """The name in profiles of what an SGLang backend runs decode steps with.

    Args:
        tensor_cores: whether flashinfer uses them; None: as SGLang chooses.
    """
    if backend == "triton":  # one kernel for groups of query heads, another where each has a KV head of its own
        return "triton_gqa" if shape.group > 1 else "triton_mha"
    if backend != "flashinfer":
        return backend
    if tensor_cores is None:
        tensor_cores = shape.q_heads // shape.kv_heads >= 4 or shape.kv_bytes == 1
    return "flashinfer_tc" if tensor_cores else "flashinfer_cc"


def read_results(path: str | Path) -> Results:
    """Reads a results file of `python -m benchmarks.kernel.gpu_attention`.

    Raises:
        ResultsError: unreadable, or not such a file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        machine, rows = data["machine"], data["rows"]
        head_dim = int(data.get("head_dim", 128))
        kv_bytes = KV_BYTES[data.get("kv_dtype", "bf16")]
        for row in rows:
            if "step" not in row:
                raise ResultsError(
                    f"{path}: row {row['key']} does not say what its step looks like: measure again with this version"
                )
        cases = [
            _case(row, row.get("head_dim", head_dim), KV_BYTES[row["kv_dtype"]] if "kv_dtype" in row else kv_bytes)
            for row in rows
        ]
        return Results(Path(path).name, machine["gpu"], str(data["commit"]), str(machine["date"]), kv_bytes, cases)
    except OSError as error:
        raise ResultsError(f"{path}: cannot read the results: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path}: not a results file of benchmarks.kernel.gpu_attention: {error!r}") from error


def _case(row: dict[str, Any], head_dim: int, kv_bytes: int) -> MeasuredCase:
    shape = ModelShape(row["q_heads"], row["kv_heads"], head_dim, kv_bytes)
    times = {way: result[TIME] for way, result in row["ways"].items() if TIME in result}
    return MeasuredCase(
        key=row["key"],
        family=row["case"].partition("/")[0],
        shape=shape,
        step=StepFeatures(**row["step"]),
        packed={kernel: times[way] for way, kernel in PACKED_WAYS.items() if way in times},
        stock={
            stock_kernel(backend, shape, tensor_cores): times[way]
            for way, (backend, tensor_cores) in STOCK_WAYS.items()
            if way in times
        },
    )
