"""Routing profiles: measured coefficients of the cost models of one machine, as a JSON file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sgl_prefix_attn.core.files import read_text
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.gpus import profile_files, read_profile
from sgl_prefix_attn.routing.cost import SMS, TERMS, KernelCost, KernelKind
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.versions import UNRECORDED_VERSION

VERSION = 1
DEFAULT_MARGIN = 10  # percent, for kernels without a margin in the profile
SHIPPED = {2: "h200.json", 1: "h200_fp8_kv.json"}  # of an H200: bytes of a KV element -> file
SHIPPED_FILES = profile_files()

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MOST = 2**53  # that floats count to
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountFromZero = Annotated[int, Field(ge=0, le=_MOST)]


class ProfileError(ValueError):
    """A profile cannot be used: the message names the file, the place and what is wrong there."""


def head_shape(shape: ModelShape) -> str:
    """A head shape as profiles name it: query heads/KV heads/head_dim."""
    return f"{shape.q_heads}/{shape.kv_heads}/{shape.head_dim}"


class Fit(BaseModel):
    """One kernel's fitted cost.

    Attributes:
        us: microseconds per unit, by term of `cost.TERMS`.
        cases: number of measured steps in the fit.
        error: root mean square of log(predicted / measured) over these steps.
        error_left_out: the same for each family of cases, predicted by a fit on all other families.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    us: dict[str, Coefficient]
    cases: int = 0
    error: float = 0.0
    error_left_out: dict[str, float] = {}


class MeasuredStep(BaseModel):
    """A measured decode step of one layer.

    Attributes:
        step: values of `StepFeatures`, in its order, without rows.
        packed, stock: microseconds by kernel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[Count, Count, Count, CountFromZero, CountFromZero, CountFromZero, Count, Count]
    packed: dict[str, Microseconds]
    stock: dict[str, Microseconds]

    @property
    def features(self) -> StepFeatures:
        return StepFeatures(*self.step)


class Profile(BaseModel):
    """Fitted costs of one machine.

    Attributes:
        machine: CUDA's name of the GPU.
        packed: cost by packed kernels: native, triton, cpu.
        stock: cost by kernel of the stock backend: fa3, flashinfer_tc (tensor cores), flashinfer_cc (CUDA cores),
            triton_gqa (groups of query heads), triton_mha.
        source: results file of the fit.
        kv_bytes: size of a KV element of the measured steps, in bytes.
        capability: compute capability of the GPU, for example "9.0"; "": not recorded.
        head_shapes: "query heads/KV heads/head_dim" of a rank in the measured steps; none: many, drawn.
        head_dims: of the measured steps; none: not recorded.
        dtype: of the queries: bf16, fp16 or fp32; "": not recorded.
        kernels_version: `versions.KERNELS_VERSION` of the measured packed kernels.
        page_size: of the measured steps.
        sm_count: SMs of the GPU, by which the costs count CTAs.
        margins: route margin in percent by packed and stock kernel, see `margins.py`.
        steps: measured decode steps of the one head shape, which correct predictions (`neighbours`); none in a profile
            of several head shapes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    machine: str
    commit: str
    measured: str
    source: str
    method: str
    kv_bytes: Annotated[int, Field(ge=1, le=4)] = 2
    capability: str = ""
    head_shapes: list[str] = []
    head_dims: list[int] = []
    dtype: str = ""
    kernels_version: int = UNRECORDED_VERSION
    page_size: Count = 1
    sm_count: Count = SMS
    packed: dict[str, Fit]
    stock: dict[str, Fit]
    margins: dict[str, dict[str, Annotated[int, Field(ge=0, le=1000)]]] = {}
    steps: list[MeasuredStep] = []

    @field_validator("version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != VERSION:
            raise ValueError(f"this release reads profiles of version {VERSION}")
        return value

    @field_validator("packed")
    @classmethod
    def _packed_terms(cls, fits: dict[str, Fit]) -> dict[str, Fit]:
        return _checked("packed", fits)

    @field_validator("stock")
    @classmethod
    def _stock_terms(cls, fits: dict[str, Fit]) -> dict[str, Fit]:
        return _checked("stock", fits)

    def cost(self, kind: KernelKind, kernel: str) -> KernelCost | None:
        """The cost model of a kernel for decode steps; None if the profile has none."""
        fits = self.packed if kind == "packed" else self.stock
        return KernelCost(kind, fits[kernel].us, self.sm_count) if kernel in fits else None

    def margin(self, packed: str, stock: str) -> int:
        """Route margin of a pair of kernels, in percent."""
        return self.margins.get(packed, {}).get(stock, DEFAULT_MARGIN)

    def steps_of(self, packed: str, stock: str, shape: ModelShape) -> list[MeasuredStep]:
        """The measured steps that have times of both kernels; none if they are of another head shape or KV type."""
        if self.head_shapes != [head_shape(shape)] or self.kv_bytes != shape.kv_bytes:
            return []
        return [step for step in self.steps if packed in step.packed and stock in step.stock]

    def save(self, path: Path) -> None:
        text = json.dumps(self.model_dump(exclude={"steps"}), indent=2).removesuffix("\n}")
        steps = ",\n".join(f"    {json.dumps(step.model_dump())}" for step in self.steps)  # a line each
        path.write_text(f'{text},\n  "steps": [\n{steps}\n  ]\n}}\n', encoding="utf-8")


def _checked(kind: KernelKind, fits: dict[str, Fit]) -> dict[str, Fit]:
    for kernel, fit in fits.items():
        for name in fit.us:
            if name not in TERMS[kind]:
                raise ValueError(f"{kernel}: no term {name!r}; there are {', '.join(TERMS[kind])}")
    return fits


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ProfileError: the file cannot be read or is not a profile.
    """
    try:
        text = read_text(os.path.expanduser(path))  # Path.expanduser raises for unknown users
    except OSError as error:
        raise ProfileError(f"{path}: cannot read the profile: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: the profile is not UTF-8 text: {error.reason}") from error
    except ValueError as error:  # a null byte
        raise ProfileError(f"{path!r}: cannot read the profile: {error}") from error
    return parse_profile(text, str(path))


def shipped_profile(kv_bytes: int = 2) -> Profile:
    """The package's profile of an NVIDIA H200.

    Args:
        kv_bytes: size of a KV element in bytes, 2 or 1.
    """
    return read_shipped(SHIPPED[kv_bytes])


def read_shipped(name: str) -> Profile:
    """The package's profile of this name, one of SHIPPED_FILES."""
    return parse_profile(read_profile(name), name)


def shipped_profile_of(packed: str, stock: str, kv_bytes: int) -> Profile:
    """The package's profile for these kernels: for this KV size if it has both kernels, else for 16-bit KV."""
    profile = shipped_profile(kv_bytes if kv_bytes in SHIPPED else 2)
    known = packed in profile.packed and stock in profile.stock
    return profile if known else shipped_profile()


def parse_profile(text: str, name: str) -> Profile:
    """A profile from the text of a file.

    Args:
        name: of the file, for messages.

    Raises:
        ProfileError: not a profile.
    """
    try:
        return Profile.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ProfileError(f"{name}: not a routing profile: {place}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:  # among them integers of too many digits; nested too deeply
        raise ProfileError(f"{name}: not a routing profile: the file is not JSON: {error}") from error
