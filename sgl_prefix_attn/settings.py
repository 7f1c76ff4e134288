"""Settings of the `prefixpack` backend: keys, types, accepted values and meanings.

Precedence, lowest first: the defaults below, the TOML file named by `PREFIXPACK_CONFIG`, the variables
`PREFIXPACK_<KEY>` (upper case). `python -m sgl_prefix_attn settings` prints the values in force and their sources.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError, field_validator
from pydantic.fields import FieldInfo

from sgl_prefix_attn.routing import policy_names
from sgl_prefix_attn.variable_names import KUBERNETES, misnamed
from sgl_prefix_attn.variable_names import PREFIX as PREFIX

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

logger = logging.getLogger(__name__)

CONFIG_VARIABLE = "PREFIXPACK_CONFIG"
# Variables with this prefix that are not settings.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "path of a TOML file with settings, one `key = value` per line",
    "PREFIXPACK_CUDA": "build: auto, 0 or 1: compile the CUDA part",
    "PREFIXPACK_CUDA_ARCHS": "build: CUDA architectures, for example 80;90a",
    "PREFIXPACK_BUILD_JOBS": "build: number of parallel compiler processes",
    "PREFIXPACK_WHEEL_CACHE": "tests: folder with downloaded SGLang wheels",
}
DEFAULT_SOURCE = "default"
# Stock backends that wrap mode knows.
WRAPPABLE = ("fa3", "flashinfer", "triton", "trtllm_mha", "torch_native")


class SettingsError(ValueError):
    """A setting cannot be used: the message names the key, its source, the value and what is accepted."""


class Settings(BaseModel):
    """Every setting, typed and validated. `load_settings` builds one from file and environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    stock_backend: Literal["auto", "torch_native", "flashinfer", "fa3", "triton"] = Field(
        "auto",
        description="SGLang backend that runs every step that prefixpack does not run packed. auto: torch_native on a "
        "CPU; on CUDA the backend that SGLang would choose.",
    )
    wrap: tuple[str, ...] = Field(
        (),
        description="Stock backends that run wrapped by prefixpack under their own names. --attention-backend keeps "
        "its name, or is not given. true: all of them. Servers that this package cannot serve get SGLang's own "
        "backend, and the log says why.",
        json_schema_extra={"accepts": f"true, false, or a list of {', '.join(WRAPPABLE)}"},
    )
    pack_decode: bool = Field(True, description="Run decode batches packed.")
    pack_extend: Literal["auto"] | bool = Field(
        "auto",
        description="Run extend (prefill) batches packed. auto: on a CPU; the stock kernels are better at it on a GPU.",
    )
    pack_mixed: Literal["auto"] | bool = Field(
        "auto",
        description="Run mixed batches (--enable-mixed-chunk) packed; with speculative decoding they run stock. auto: "
        "on a CPU; on a GPU if much is shared.",
    )
    pack_verify: Literal["auto"] | bool = Field(
        "auto",
        description="Run the verify steps of speculative decoding packed: EAGLE, STANDALONE, NGRAM, DFLASH and their "
        "variants, chains and trees of drafts. auto, with pack_decode: on a CPU; on a GPU chains where a rule was "
        "measured. It needs an H100 SXM or H200, SGLang 0.5.16 or later, native kernels over fa3, head_dim 128 and "
        "16-bit KV. A request has fewer than 128 query rows on a KV head.",
    )
    one_token_steps: Literal["auto"] | bool = Field(
        "auto",
        description="Run prefill and mixed steps in which every request has one new token as decode steps: in decode "
        "graphs, and packed. They start requests whose prompt is cached. auto: on servers that can; true: others warn.",
    )
    shared_prefill: Literal["auto"] | bool = Field(
        "auto",
        description="Requests wait while another one computes a prefix of their prompt, instead of computing it too. "
        "auto: on servers that can; true: others warn.",
    )
    allow_untested_sglang: bool = Field(
        False, description="Start with an SGLang version outside the supported range, at your own risk."
    )
    gpu_kernels: Literal["auto", "native", "triton"] = Field(
        "auto",
        description="Kernels of packed steps on a GPU. native: compiled with this package, for NVIDIA GPUs with "
        "compute capability 8.0 or higher for which it has code. triton: for all GPUs. auto: native where its "
        "code has run on a GPU, which is 9.0; elsewhere triton.",
    )
    route: str = Field(
        "auto",
        description="Where decode and verify steps run: packed if all conditions of this policy hold, else stock. "
        "auto: sharing saves many KV bytes, or the batch is one that the stock kernel is slow at. Where nothing was "
        "measured: a conservative rule; on a CPU: always. batch>=N: at least N requests run. reuse>=X: each distinct "
        "KV token is read X times on average. saved>=MiB: sharing saves as much of a layer's KV on a GPU. packed: "
        "always. stock: never.",
        json_schema_extra={"accepts": policy_names.FORMS},
    )
    live_tests: bool = Field(
        False,
        description="Serve POST, GET and DELETE at /prefixpack/abtest. With it, `abtest live` (comparing-policies.md) "
        "compares two routing policies on this server. It asks for SGLang's admin key. Off: no endpoint.",
    )
    group_scheduling: bool = Field(
        False,
        description="Run the requests of offline jobs in groups that share a prefix, and let them announce their "
        "prefixes to retention. The batch command sets it for its engines. Any client can write a place in a job: set "
        "it only where all clients trust each other. Off: places are not read, and no hook on SGLang's scheduling "
        "policy is installed.",
    )
    fingerprint_key: SecretStr | None = Field(
        None,
        min_length=16,
        max_length=200,
        description="Secret of the fingerprints of running prompts at GET /prefixpack/prompts, by which explain "
        "compares servers. Give the servers the same one. The endpoint asks for SGLang's --admin-api-key. Unset: no "
        "endpoint, and nothing is hashed.",
        json_schema_extra={"accepts": "a text of 16 to 200 characters, or none"},
    )
    cpu_threads: int | None = Field(
        None, ge=1, le=1024, description="Threads of the CPU executor. Unset: as many as torch uses."
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="Workers over which the planner balances a step. Unset: the CPU threads, or the GPU's SMs times "
        "the resident CTAs of an SM.",
    )
    max_tile_rows: int = Field(
        128,
        ge=16,
        le=128,
        description="Rows (query tokens times GQA group size) of the largest tile. Larger tiles read shared KV fewer "
        "times; smaller tiles need fewer registers. On a GPU 16 counts as 32.",
        json_schema_extra={"accepts": "16, 32, 64 or 128"},
    )
    replan_growth: int = Field(
        64,
        ge=1,
        le=1_000_000,
        description="Tokens that a tail may grow before its decode batch is planned again. Imbalance may cause an "
        "earlier plan.",
    )
    pin_budget_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="Share of the KV pool, in percent, that POST /prefixpack/pins may pin. 0: pinning is off and the "
        "endpoint does not exist.",
    )
    retention: Literal["off", "hints", "reuse"] = Field(
        "hints",
        description="What the prefix cache evicts first. off: the order of SGLang's eviction policy. hints: the same, "
        "until a request has KV hints or a session (SGLang 0.5.23); then also what those say. reuse: the branches with "
        "the lowest expected reuse, from hints, sessions, the waiting queue and the reuse history.",
    )
    hint_budget_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="Share of the KV pool, in percent, that the KV hints of requests may keep. Any client can write "
        "one. 0: they keep nothing, and only sessions and hints that release are executed.",
    )
    retention_lookahead: int = Field(
        1024,
        ge=0,
        le=65536,
        description="Waiting requests that retention reads; with hints, at most 128. 0: history only.",
    )
    retention_block: int = Field(
        64, ge=1, le=65536, description="Tokens per block of the prompt history that retention keeps."
    )
    metrics: bool = Field(True, description="Export Prometheus metrics next to SGLang's (needs --enable-metrics).")
    metrics_flush_steps: int = Field(
        32, ge=1, le=1_000_000, description="Steps, packed or not, between two updates of the Prometheus metrics."
    )

    @field_validator("wrap", mode="before")
    @classmethod
    def _names(cls, value: Any) -> tuple[str, ...]:
        """The names of `true`, `false`, a list, or a text with either."""
        names = value
        if isinstance(value, str):
            names = [name.strip() for name in value.split(",")]
            if len(names) == 1 and names[0] not in WRAPPABLE:
                names = TypeAdapter(bool).validate_python(names[0])
        if isinstance(names, bool):
            return WRAPPABLE if names else ()
        if not isinstance(names, (list, tuple)) or any(name not in WRAPPABLE for name in names):
            raise ValueError("not a list of stock backends")
        return tuple(name for name in WRAPPABLE if name in names)

    @field_validator("route")
    @classmethod
    def _policy(cls, value: str) -> str:
        return str(policy_names.parse(value))

    @property
    def policy(self) -> policy_names.PolicyName:
        """The routing policy that `route` names."""
        return policy_names.parse(self.route)

    @field_validator("max_tile_rows")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("not a power of two")
        return value


@dataclass(frozen=True)
class LoadedSettings:
    """Settings in force. sources: by key "default", "FILE:LINE" or the variable's name."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force.

    Args:
        environ: variables to read instead of `os.environ`.

    Raises:
        SettingsError: lists every setting that cannot be used.
    """
    return load_settings_with_sources(environ).settings


def load_settings_with_sources(environ: Mapping[str, str] | None = None) -> LoadedSettings:
    """The settings as `load_settings` reads them, with the source of each value."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, DEFAULT_SOURCE)
    problems: list[str] = []
    for entry in (*_file_entries(environ.get(CONFIG_VARIABLE, "")), *_environment_entries(environ)):
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
    """One setting as found.

    Attributes:
        name: as the user wrote it.
        key: key of `Settings`.
        source: file and line, or the variable's name.
        typed: whether the value has a TOML type; False for the text of a variable.
    """

    name: str
    key: str
    value: Any
    source: str
    typed: bool

    def title(self, name: str | None = None) -> str:
        """Where and how the setting was written; `name` replaces the entry's own."""
        return f"{self.source}: {name or self.name}" if self.typed else name or self.name


def _environment_entries(environ: Mapping[str, str]) -> Iterator[_Entry]:
    injected = []
    for name in sorted(environ):
        # An empty variable is the same as none: compose files and pod specs cannot always remove one.
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or not environ[name].strip():
            continue
        if KUBERNETES.fullmatch(name):
            injected.append(name)
            continue
        yield _Entry(name, name.removeprefix(PREFIX).lower(), environ[name], name, typed=False)
    if injected:
        logger.warning(
            "prefixpack: ignoring %s: Kubernetes sets such variables for a service; enableServiceLinks: false in the "
            "pod's specification stops that",
            ", ".join(injected),
        )


def _file_entries(name: str) -> Iterator[_Entry]:
    if not name.strip():
        return
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for unknown users
    try:
        text = path.read_text(encoding="utf-8-sig")
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
        where = f"{entry.title()} = " if entry.typed else f"{entry.name}="
        told = "(secret)" if SecretStr in get_args(field.annotation) else repr(entry.value)
        raise SettingsError(f"{where}{told} is not usable: accepted is {accepted_values(entry.key)}") from error


def _unknown_key(entry: _Entry) -> str:
    if entry.typed:
        what, known = f"{entry.source}: there is no setting {entry.name!r}", list(Settings.model_fields)
    else:
        known = _known_variables()
        what = f"{entry.name}: there is no such setting"  # its value may be a secret
    near = difflib.get_close_matches(entry.name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{what}; {hint}known are {', '.join(sorted(known))}"


def misnamed_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """A warning for each variable that looks like one of ours and is not read, with the nearest name."""
    return misnamed(os.environ if environ is None else environ, _known_variables())


def _known_variables() -> list[str]:
    return [variable_name(key) for key in Settings.model_fields] + list(OTHER_VARIABLES)


def _optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _or_list(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
