"""Measured profiles: the coefficients of cost models, and where they come from. One JSON file each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sgl_prefix_attn.routing.cost import TERMS, CostModel, Kind

VERSION = 1
DEFAULT_MARGIN = 10  # percent, for kernels of which a profile has none
SHIPPED = {2: "h200.json", 1: "h200_fp8_kv.json"}  # by the bytes of a KV element

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ProfileError(ValueError):
    """A profile cannot be used: the message names the file, the place and what is wrong there."""


class Fit(BaseModel):
    """One kernel's fitted cost.

    Attributes:
        us: microseconds per unit, by term of `cost.TERMS`.
        cases: measured steps that it was fitted on.
        error: root mean square of log(predicted / measured) over these.
        error_left_out: the same by family of cases, each predicted by a fit on all other families.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    us: dict[str, Coefficient]
    cases: int = 0
    error: float = 0.0
    error_left_out: dict[str, float] = {}


class Profile(BaseModel):
    """Fitted costs of one machine.

    Attributes:
        packed: by the kernels that run packed steps: native, triton, cpu.
        stock: by way to run a step request by request: the name of an SGLang backend; for flashinfer, with
            `_tc` or `_cc` behind it, since SGLang chooses between tensor and CUDA cores by the model's heads; for
            triton with `_gqa` or `_mha`, its kernel for groups of query heads or the other one.
        source: what it was fitted on.
        kv_bytes: of a KV element of the steps that it was fitted on.
        margins: by packed and stock kernel, the percent by which packed has to be predicted faster, see `margins.py`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    machine: str
    commit: str
    measured: str
    source: str
    method: str
    kv_bytes: Annotated[int, Field(ge=1, le=2)] = 2
    packed: dict[str, Fit]
    stock: dict[str, Fit]
    margins: dict[str, dict[str, Annotated[int, Field(ge=0, le=1000)]]] = {}

    @field_validator("version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != VERSION:
            raise ValueError(f"profiles of version {VERSION} are understood")
        return value

    @field_validator("packed")
    @classmethod
    def _packed_terms(cls, fits: dict[str, Fit]) -> dict[str, Fit]:
        return _checked("packed", fits)

    @field_validator("stock")
    @classmethod
    def _stock_terms(cls, fits: dict[str, Fit]) -> dict[str, Fit]:
        return _checked("stock", fits)

    def cost(self, kind: Kind, kernel: str) -> CostModel | None:
        """The cost of a kernel, None if it was not measured."""
        fits: Mapping[str, Fit] = self.packed if kind == "packed" else self.stock
        return CostModel(kind, fits[kernel].us) if kernel in fits else None

    def margin(self, packed: str, stock: str) -> int:
        """Percent by which these packed kernels have to be predicted faster than that stock one."""
        return self.margins.get(packed, {}).get(stock, DEFAULT_MARGIN)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")


def _checked(kind: Kind, fits: dict[str, Fit]) -> dict[str, Fit]:
    for kernel, fit in fits.items():
        for name in fit.us:
            if name not in TERMS[kind]:
                raise ValueError(f"{kernel}: no term {name!r}; there are {', '.join(TERMS[kind])}")
    return fits


def load_profile(path: str | Path) -> Profile:
    """Reads a profile.

    Raises:
        ProfileError: the file cannot be read or is none.
    """
    try:
        return _parsed(Path(path).expanduser().read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ProfileError(f"{path}: cannot read the profile: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: the profile is not UTF-8 text: {error.reason}") from error


def shipped_profile(kv_bytes: int = 2) -> Profile:
    """The profile that comes with the package, of an NVIDIA H200. kv_bytes: of a KV element, 2 or 1."""
    name = SHIPPED[kv_bytes]
    return _parsed(resources.files(__package__).joinpath("profiles", name).read_text(encoding="utf-8"), name)


def shipped_profile_of(packed: str, stock: str, kv_bytes: int) -> Profile:
    """The shipped profile of these kernels: of KV elements of that size, if it knows both; else that of 16-bit KV."""
    profile = shipped_profile(kv_bytes if kv_bytes in SHIPPED else 2)
    known = packed in profile.packed and stock in profile.stock
    return profile if known else shipped_profile()


def _parsed(text: str, name: str) -> Profile:
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ProfileError(f"{name}: not a routing profile: {place}: {first['msg']}") from error
