"""Measured decode steps from results files of `benchmarks.kernel.gpu_attention`: features and times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_prefix_attn.core.files import read_text
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import SMS
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.versions import UNRECORDED_VERSION

# Baseline in the results -> kernel in a profile.
PACKED_BASELINES = {"prefixpack": "native", "prefixpack_triton": "triton", "prefixpack_cpu": "cpu"}
# Baseline in the results -> SGLang backend and whether it uses tensor cores.
STOCK_BASELINES: dict[str, tuple[str, bool | None]] = {
    "fa3": ("fa3", None),
    "flashinfer_decode_tc": ("flashinfer", True),
    "flashinfer_decode_cc": ("flashinfer", False),
    "triton": ("triton", None),
    "torch_native": ("torch_native", None),
}
GPU_KERNELS = ("fa3", "flashinfer_tc", "flashinfer_cc", "triton_gqa", "triton_mha")
BACKENDS = tuple(dict.fromkeys(backend for backend, _ in STOCK_BASELINES.values()))
# KV type in the results -> bytes of an element.
KV_BYTES = {"bf16": 2, "fp8_e4m3": 1, "fp16": 2, "fp32": 4}
HEAD_DIMS = (64, 128, 256)  # that calibrate measures
# Names of the number of SMs in `machine`, the present one first.
_SM_COUNTS = ("sm_count", "num_sms", "multiprocessors")
# In a model the L2 cache holds none of a layer's KV when the layer starts.
TIME = "cold_us"


class ResultsError(ValueError):
    """A results file cannot be used: the message names file and place."""


@dataclass(frozen=True)
class MeasuredCase:
    """One decode step of one layer.

    Attributes:
        packed, stock: measured microseconds by kernel name of profiles; absent if the measurement failed.
    """

    key: str
    family: str
    shape: ModelShape
    step: StepFeatures
    packed: Mapping[str, float]
    stock: Mapping[str, float]

    def stock_us(self, backend: str) -> float | None:
        """Microseconds of an SGLang backend; None if it was not measured."""
        return self.stock.get(stock_kernel(backend, self.shape))


@dataclass(frozen=True)
class Results:
    """A results file. capability, head_shapes, dtype, kernels_version, page_size, sm_count: as in a profile."""

    source: str
    machine: str
    commit: str
    measured: str
    kv_bytes: int
    cases: list[MeasuredCase]
    capability: str = ""
    head_shapes: tuple[str, ...] = ()
    dtype: str = ""
    kernels_version: int = UNRECORDED_VERSION
    page_size: int = 1
    sm_count: int = SMS


def stock_kernel(backend: str, shape: ModelShape, tensor_cores: bool | None = None) -> str:
    """The name in profiles of an SGLang backend's decode kernel.

    Args:
        tensor_cores: whether flashinfer uses tensor cores; None: as SGLang chooses.
    """
    if backend == "triton":  # one kernel for groups of query heads, another for one query head for each KV head
        return "triton_gqa" if shape.group > 1 else "triton_mha"
    if backend != "flashinfer":
        return backend
    if tensor_cores is None:
        tensor_cores = shape.q_heads // shape.kv_heads >= 4 or shape.kv_bytes == 1
    return "flashinfer_tc" if tensor_cores else "flashinfer_cc"


def read_results(path: str | Path) -> Results:
    """Reads a results file of `python -m benchmarks.kernel.gpu_attention`.

    Raises:
        ResultsError: the file cannot be read or is not such a file.
    """
    try:
        data = json.loads(read_text(path))
        machine = data["machine"]
        rows = data["rows"]
        head_dim = int(data.get("head_dim", 128))
        kv_bytes = KV_BYTES[data.get("kv_dtype", "bf16")]
        for row in rows:
            if "step" not in row:
                raise ResultsError(
                    f"{path}: row {row['key']} has no features of its step: measure again with this version"
                )
        cases = [
            _case(row, row.get("head_dim", head_dim), KV_BYTES[row["kv_dtype"]] if "kv_dtype" in row else kv_bytes)
            for row in rows
        ]
        return Results(
            Path(path).name, machine["gpu"], str(data["commit"]), str(machine["date"]), kv_bytes, cases,
            str(machine.get("capability", "")), tuple(data.get("head_shapes", ())), str(data.get("dtype", "")),
            int(data.get("kernels_version", UNRECORDED_VERSION)), int(data.get("page_size", 1)),
            int(next((machine[name] for name in _SM_COUNTS if name in machine), SMS)),
        )  # fmt: skip
    except OSError as error:
        raise ResultsError(f"{path}: cannot read the results: {error.strerror}") from error
    except (json.JSONDecodeError, RecursionError) as error:  # nested too deeply
        raise ResultsError(f"{path}: not JSON: {error}") from error
    except ResultsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path}: not a results file of benchmarks.kernel.gpu_attention: {error!r}") from error


def _case(row: dict[str, Any], head_dim: int, kv_bytes: int) -> MeasuredCase:
    shape = ModelShape(row["q_heads"], row["kv_heads"], head_dim, kv_bytes)
    times = {baseline: result[TIME] for baseline, result in row["baselines"].items() if TIME in result}
    return MeasuredCase(
        key=row["key"],
        family=row["case"].partition("/")[0],
        shape=shape,
        step=StepFeatures(**row["step"]),
        packed={kernel: times[baseline] for baseline, kernel in PACKED_BASELINES.items() if baseline in times},
        stock={
            stock_kernel(backend, shape, tensor_cores): times[baseline]
            for baseline, (backend, tensor_cores) in STOCK_BASELINES.items()
            if baseline in times
        },
    )
