"""The supported SGLang versions and the differences between them. Those in facts of a server: `server_facts.py`.

Features are probed in the installed code. The version number only decides whether the plug-in registers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import os
from collections.abc import Callable, MutableMapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sgl_prefix_attn.sglang_plugin.compat import targets

if TYPE_CHECKING:  # loads the native module, which processes without a backend of ours do without
    from sgl_prefix_attn.core.forest import Int64Array

OLDEST: Final = targets.SUPPORTED_VERSIONS[0]
TREE_CORE_VARIABLE: Final = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
CPP_TREE_VARIABLE: Final = "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
GLUE_VARIABLE: Final = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
NEWEST: Final = targets.SUPPORTED_VERSIONS[-1]


class UnsupportedSglangError(RuntimeError):
    """The installed SGLang is outside the supported range."""


def installed_version() -> str:
    """Version of the installed sglang distribution, or "unknown" for a source tree without metadata."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module("sglang"), "__version__", "unknown"))


def check_supported(version: str, *, allow_untested: bool = False) -> None:
    """Raises UnsupportedSglangError unless `version` is within OLDEST..NEWEST (post releases included)."""
    from packaging.version import InvalidVersion, Version  # a dependency of sglang, not of ours

    try:
        release = Version(version)
    except InvalidVersion:
        inside = False
    else:
        # A pre-release of the oldest version may lack what the release has, so it counts as older.
        inside = Version(OLDEST) <= release and release.release[:3] <= Version(NEWEST).release
    if inside or allow_untested:
        return
    raise UnsupportedSglangError(
        f"sgl_prefix_attn supports sglang {OLDEST} to {NEWEST}, but {version} is installed; the attention backend "
        f"'prefixpack' is not registered. Install a supported version (for example: pip install sglang=={NEWEST}), or "
        "set PREFIXPACK_ALLOW_UNTESTED_SGLANG=1 to try this one at your own risk."
    )


def server_args() -> Any:
    """The ServerArgs of this scheduler process, or None before SGLang has published them."""
    for module, name in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        try:
            getter = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        try:
            return getter()
        except ValueError:  # nothing is published yet
            return None
    return None


def disaggregation_mode() -> str:
    """This scheduler's side of disaggregated serving: "prefill" or "decode"; "null" on other servers."""
    return getattr(server_args(), "disaggregation_mode", None) or "null"


@functools.cache
def _committed_len() -> Callable[[Any], int] | None:
    """Reads the committed KV length of a request; None where no bound of its KV follows from that length.

    Before 0.5.16, which brought ReqKvInfo, SGLang counts a token before it is computed (0.5.14), or gives verify
    graphs the lengths of an earlier step where host memory has none (0.5.15).
    """
    info = getattr(importlib.import_module("sglang.srt.managers.schedule_batch"), "ReqKvInfo", None)
    if info is None:
        return None
    in_info = "kv_committed_len" in getattr(info, "__dataclass_fields__", ())  # 0.5.19 and later
    return operator.attrgetter("kv.kv_committed_len" if in_info else "kv_committed_len")


def has_kv_hints() -> bool:
    """Whether requests carry KV hints."""
    return importlib.util.find_spec("sglang.srt.managers.kv_hints") is not None


def has_rust_server() -> bool:
    """Whether SGLang's embedded Rust server, which runs no plug-in, makes the schedulers' requests."""
    return os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y")


def keeps_committed_lens() -> bool:
    """Whether requests keep their committed KV length in host memory, in a known place.

    With overlap it lags by one verify step at most, so a request's KV is no longer than that and the drafts of a step.
    """
    return _committed_len() is not None


def committed_lens(requests: Sequence[Any]) -> Int64Array:
    """[requests] committed KV lengths, where `keeps_committed_lens`."""
    read = _committed_len()
    assert read is not None
    return np.fromiter(map(read, requests), np.int64, len(requests))


def plans_on_another_stream() -> bool:
    """Whether SGLang prepares verify steps on a stream of their own."""
    from sglang.srt.environ import envs

    variable = getattr(envs, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", None)
    return variable is not None and bool(variable.get())


def ask_for_readable_tree_core(environ: MutableMapping[str, str]) -> bool:
    """Selects the radix tree's Python core where the native core is the default but cannot list paths (0.5.21).

    Call it before SGLang builds its prefix cache. A user's choice stays. Returns whether the core was changed.
    """
    try:
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

        default = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get()
    except (ImportError, AttributeError):  # no choice of cores in this version
        return False
    if hasattr(UnifiedTreeCoreInterface, "collect_path_info") or default == "python" or TREE_CORE_VARIABLE in environ:
        return False
    environ[TREE_CORE_VARIABLE] = "python"
    return True


def keep_metadata_out_of_graphs(environ: MutableMapping[str, str]) -> bool:
    """Switches off SGLang's graphs of the work before a replay (0.5.19 and later, if asked for).

    Such a graph repeats the device work of its capture without our host code. The plan of the captured batch would
    then serve all batches. Call it before SGLang makes its decode graph runner. Returns whether they were on.
    """
    from sglang.srt.environ import envs

    if not hasattr(envs, GLUE_VARIABLE) or not getattr(envs, GLUE_VARIABLE).get():
        return False
    environ[GLUE_VARIABLE] = "0"
    return True


def matched_tokens(request: Any) -> int:
    """Tokens of a waiting request that SGLang has found in its radix tree."""
    indices = getattr(request, "prefix_indices", None)  # up to 0.5.21
    return int(request.prefix_len) if indices is None else len(indices)


def starts_beams(requests: Sequence[Any]) -> bool:
    """Whether a beam search (0.5.19 and later) is among requests."""
    return any(getattr(request, "beam_group", None) is not None for request in requests)


def anything_runs(adder: Any) -> bool:
    """Whether requests decode while SGLang's PrefillAdder admits others."""
    return adder.running_batch is not None and not adder.running_batch.is_empty()


def has_api_keys() -> bool:
    """Whether the server tells its users apart: it has an API key, or one for admins."""
    arguments = server_args()
    return any(getattr(arguments, name, None) for name in ("api_key", "admin_api_key"))


def running_requests(scheduler: Any) -> list[Any]:
    """Requests that decode. SGLang keeps those that have ended in their batch until its next step."""
    if getattr(scheduler, "running_mbs", None):  # a pipeline, whose `running_batch` is that of one microbatch
        batches, last = scheduler.running_mbs, scheduler.mbs
    else:
        batches, last = [scheduler.running_batch], [scheduler.last_batch]
    # A mixed step takes the running requests along: they are in its batch, and their own is empty.
    mixed = [request for batch in last if batch is not None for request in batch.reqs if request.output_ids]
    running = [request for batch in batches for request in batch.reqs]
    return [request for request in {id(each): each for each in (*running, *mixed)}.values() if not request.finished()]
