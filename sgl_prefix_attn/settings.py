"""Settings of the `prefixpack` backend: the one place that says which keys exist and what they mean.

Order of precedence, weakest first: the defaults below, the TOML file named by `PREFIXPACK_CONFIG`, the variables
`PREFIXPACK_<KEY>` (upper case). `python -m sgl_prefix_attn settings` prints what is in force and why.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

PREFIX = "PREFIXPACK_"
CONFIG_VARIABLE = "PREFIXPACK_CONFIG"
# Variables with our prefix that are no settings: the config file's name, and what build and tests read.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "TOML file with settings, one `key = value` a line",
    "PREFIXPACK_CUDA": "build: auto, 0 or 1: compile the CUDA part",
    "PREFIXPACK_CUDA_ARCHS": "build: CUDA architectures, for example 80;90a",
    "PREFIXPACK_BUILD_JOBS": "build: parallel compiler processes",
    "PREFIXPACK_WHEEL_CACHE": "tests: folder with downloaded SGLang wheels",
}
DEFAULT_SOURCE = "default"


class SettingsError(ValueError):
    """A setting cannot be used: the message names the key, its source, the value and what is accepted."""


class Settings(BaseModel):
    """Every setting, typed and validated. `load_settings` makes the one that reflects file and environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stock_backend: Literal["auto", "torch_native", "flashinfer", "fa3", "triton"] = Field(
        "auto",
        description="Stock SGLang backend that serves everything prefixpack does not. auto: torch_native on CPU; on "
        "CUDA the one SGLang itself would choose.",
    )
    handover: Literal["auto", "hooks", "patch"] = Field(
        "auto",
        description="How request paths travel from the scheduler to the backend. hooks: SGLang's plug-in hooks. patch: "
        "the native seam of `python -m sgl_prefix_attn patch`; not for models with layers of linear or sparse "
        "attention as well. auto: the patch where it is applied and reaches us, else hooks.",
    )
    pack_decode: bool = Field(True, description="Run decode batches packed.")
    pack_extend: Literal["auto"] | bool = Field(
        "auto",
        description="Run extend (prefill) batches packed. auto: on a CPU. Prefill is compute-bound, and on a GPU the "
        "stock backend's kernels are made for that.",
    )
    pack_mixed: Literal["auto"] | bool = Field(
        "auto",
        description="Run mixed prefill and decode batches (--enable-mixed-chunk) packed. auto: on a CPU, as above.",
    )
    allow_untested_sglang: bool = Field(
        False, description="Start with an SGLang version outside the supported range, at your own risk."
    )
    gpu_kernels: Literal["auto", "native", "triton"] = Field(
        "auto",
        description="Kernels of packed steps on a GPU. native: compiled with this package, for NVIDIA GPUs from "
        "compute capability 8.0. triton: for all others. auto: native where they run.",
    )
    route: Literal["auto", "packed", "stock"] = Field(
        "auto",
        description="Where decode steps run. packed: on the packed kernels. stock: on the stock backend. auto: each "
        "step where its predicted time is the lower one; on a CPU, packed unless route_profile is set.",
    )
    route_margin: int | None = Field(
        None,
        ge=0,
        le=1000,
        description="Percent by which packed has to be predicted faster before steps that run on the stock backend "
        "change over; they go back when packed is predicted to be slower. Unset: what the profile has found for the "
        "two kernels, or 10.",
    )
    route_profile: str | None = Field(
        None,
        description="Profile that route = auto predicts by, from `python -m sgl_prefix_attn route fit`. Unset: on a "
        "GPU the one in the package for its type of KV, measured on an H200.",
        json_schema_extra={"accepts": "the path of a JSON file, or none"},
    )
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of the CPU executor. Unset: as many as torch uses."
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Workers the planner balances a step over. Unset: what the device has (CPU threads, or the GPU's "
        "SMs times its resident CTAs).",
    )
    max_tile_rows: int = Field(
        128,
        ge=16,
        le=128,
        description="Rows (query tokens times GQA group size) of the largest tile. Larger tiles re-read shared KV "
        "less, smaller ones need fewer registers.",
        json_schema_extra={"accepts": "16, 32, 64 or 128"},
    )
    replan_growth: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="Tokens a tail may grow before its decode batch is planned anew; balance may ask for that earlier.",
    )
    pin_budget_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="Share of the KV pool, in percent, that users may pin with POST /prefixpack/pins. 0: nothing can "
        "be pinned, and the address does not exist.",
    )
    retention: Literal["off", "reuse"] = Field(
        "off",
        description="What the prefix cache gives up first. off: what SGLang's eviction policy says. reuse: what is "
        "worth least by the waiting queue and by remembered reuse.",
    )
    retention_lookahead: int = Field(
        1024, ge=0, le=65536, description="Waiting requests that retention looks at. 0: it goes by the past alone."
    )
    retention_block: int = Field(
        64, ge=1, le=65536, description="Tokens per unit of what retention remembers of prompts."
    )
    metrics: bool = Field(True, description="Export Prometheus metrics next to SGLang's (needs --enable-metrics).")
    metrics_flush_steps: int = Field(
        32, ge=1, le=1_000_000, description="Steps, packed or not, between two updates of the Prometheus metrics."
    )

    @field_validator("max_tile_rows")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two")
        return value


@dataclass(frozen=True)
class LoadedSettings:
    """Settings in force, and per key where its value came from ("default", "FILE:LINE" or the variable's name)."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings in force. `environ` replaces `os.environ`. Raises SettingsError that lists every unusable setting."""
    return load_settings_with_sources(environ).settings


def load_settings_with_sources(environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """As `load_settings`, with the source of each value."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, DEFAULT_SOURCE)
    problems: list[str] = []
    for entry in [*_file_entries(environ.get(CONFIG_VARIABLE, "")), *_environment_entries(environ)]:
        try:
            values[entry.key] = _checked(entry)
            sources[entry.key] = entry.source
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))
    return LoadedSettings(Settings(**values), sources)


def accepted_values(key: str) -> str:
    """What `key` accepts, in words, for messages and documentation."""
    field = Settings.model_fields[key]
    if isinstance(field.json_schema_extra, dict) and "accepts" in field.json_schema_extra:
        return str(field.json_schema_extra["accepts"])
    if get_origin(field.annotation) is Literal:
        return _or_list([str(choice) for choice in get_args(field.annotation)])
    if field.annotation is bool:
        return "true or false"
    if bool in get_args(field.annotation):
        words = [str(word) for choice in get_args(field.annotation) for word in get_args(choice)]
        return _or_list([*words, "true", "false"])
    lowest, highest = (next(getattr(m, bound) for m in field.metadata if hasattr(m, bound)) for bound in ("ge", "le"))
    return f"a whole number from {lowest} to {highest}" + (", or none" if _optional(field) else "")


def variable_name(key: str) -> str:
    """Name of the environment variable that sets `key`."""
    return PREFIX + key.upper()


@dataclass(frozen=True)
class _Entry:
    """One setting as found: `name` as the user wrote it, `key` what it means, `typed` false for variables' text."""

    name: str
    key: str
    value: Any
    source: str
    typed: bool


def _environment_entries(environ: Mapping[str, str]) -> Iterator[_Entry]:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            yield _Entry(name, name.removeprefix(PREFIX).lower(), environ[name], name, typed=False)


def _file_entries(name: str) -> Iterator[_Entry]:
    if not name:
        return
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name}: cannot read the file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name}: the file is not UTF-8 text: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}={name}: the file is not TOML: {error}") from error
    for key, value in table.items():
        yield _Entry(key, key, value, f"{name}{_line_suffix(text, key)}", typed=True)


def _line_suffix(text: str, key: str) -> str:
    """`:LINE` of a top-level key or table header, or nothing when it is written in an unusual way."""
    pattern = re.compile(rf"""^\s*(\[\s*)?["']?{re.escape(key)}["']?\s*[\].=]""")
    line = next((n for n, content in enumerate(text.splitlines(), 1) if pattern.match(content)), None)
    return "" if line is None else f":{line}"


def _checked(entry: _Entry) -> Any:
    """The validated value of an entry. A file's values keep their TOML type, a variable's text is converted."""
    field = Settings.model_fields.get(entry.key)
    if field is None:
        raise SettingsError(_unknown_key(entry))
    value = entry.value.strip() if isinstance(entry.value, str) else entry.value
    if value == "none" and _optional(field):
        return None
    try:
        return getattr(Settings.model_validate({entry.key: value}, strict=entry.typed), entry.key)
    except ValidationError as error:
        where = f"{entry.source}: {entry.name} = " if entry.typed else f"{entry.name}="
        raise SettingsError(
            f"{where}{entry.value!r} is not usable: accepted is {accepted_values(entry.key)}"
        ) from error


def _unknown_key(entry: _Entry) -> str:
    if entry.typed:
        what, known = f"{entry.source}: there is no setting {entry.name!r}", list(Settings.model_fields)
    else:
        known = [variable_name(key) for key in Settings.model_fields] + list(OTHER_VARIABLES)
        what = f"{entry.name}={entry.value!r}: there is no such setting"
    near = difflib.get_close_matches(entry.name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{what}; {hint}known are {', '.join(sorted(known))}"


def _optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _or_list(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
