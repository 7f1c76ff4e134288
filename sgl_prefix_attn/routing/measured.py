"""Measured decode steps from results files of `benchmarks.kernel`: features and times."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_prefix_attn.core.files import read_text
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.gpus import known_gpus
from sgl_prefix_attn.routing.features import StepFeatures

# Baseline in the results -> packed kernels.
PACKED_BASELINES = {"prefixpack": "native", "prefixpack_triton": "triton"}
BACKENDS = ("fa3", "flashinfer", "triton")
# KV type in the results -> bytes of an element.
KV_BYTES = {"bf16": 2, "fp8_e4m3": 1, "fp16": 2, "fp32": 4}
# In a model the L2 cache holds none of a layer's KV when the layer starts.
TIME = "cold_us"
_FEATURES = [field.name for field in dataclasses.fields(StepFeatures)]


class ResultsError(ValueError):
    """A results file cannot be used: the message names file and place."""


@dataclass(frozen=True)
class MeasuredCase:
    """One decode or verify step of one layer.

    Attributes:
        packed, stock: measured microseconds by kernels, and by SGLang's backend; absent if the measurement failed.
    """

    key: str
    family: str
    shape: ModelShape
    step: StepFeatures
    packed: Mapping[str, float]
    stock: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """A results file. capability: compute capability, "" if it is not known."""

    source: str
    machine: str
    commit: str
    capability: str
    cases: list[MeasuredCase]


def read_results(path: str | Path) -> Results:
    """Reads a results file of `python -m benchmarks.kernel.gpu_attention`, `gpu_drawn` or `mixed_steps --verify`.

    Raises:
        ResultsError: the file cannot be read or is not such a file.
    """
    try:
        data = json.loads(read_text(path))
        machine = data["machine"]
        rows = data["rows"]
        for row in rows:
            if "step" not in row:
                raise ResultsError(
                    f"{path}: row {row['key']} has no features of its step: measure again with this version"
                )
        defaults = {"head_dim": data.get("head_dim", 128), "kv_dtype": data.get("kv_dtype", "bf16")}
        cases = [_case({**defaults, **row}) for row in rows]
        known = {gpu.name: gpu.capability for gpu in known_gpus().values()}
        capability = machine.get("capability") or ".".join(map(str, known.get(machine["gpu"], ())))
        return Results(Path(path).name, machine["gpu"], str(data["commit"]), str(capability), cases)
    except OSError as error:
        raise ResultsError(f"{path}: cannot read the results: {error.strerror}") from error
    except (json.JSONDecodeError, RecursionError) as error:  # nested too deeply
        raise ResultsError(f"{path}: not JSON: {error}") from error
    except ResultsError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path}: not a results file of benchmarks.kernel.gpu_attention: {error!r}") from error


def features_of(row: Mapping[str, Any]) -> StepFeatures:
    """The features of a row's step; files of older commits have others beside them."""
    return StepFeatures(**{name: row["step"][name] for name in _FEATURES if name in row["step"]})


def _case(row: dict[str, Any]) -> MeasuredCase:
    shape = ModelShape(row["q_heads"], row["kv_heads"], int(row["head_dim"]), KV_BYTES[row["kv_dtype"]])
    times = {baseline: result[TIME] for baseline, result in row["baselines"].items() if TIME in result}
    # As SGLang chooses.
    tensor_cores = shape.group >= 4 or shape.kv_bytes == 1
    stock = {
        "fa3": times.get("fa3"),
        "flashinfer": times.get(f"flashinfer_decode_{'tc' if tensor_cores else 'cc'}"),
        "triton": times.get("triton"),
    }
    return MeasuredCase(
        key=row["key"],
        family=row["case"].partition("/")[0],
        shape=shape,
        step=features_of(row),
        packed={kernel: times[baseline] for baseline, kernel in PACKED_BASELINES.items() if baseline in times},
        stock={backend: us for backend, us in stock.items() if us is not None},
    )
