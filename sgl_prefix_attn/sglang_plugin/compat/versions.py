"""The supported SGLang versions and the differences between them: the only file that knows about versions.

Features are probed in the installed code. The version number only decides whether the plug-in registers.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
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


def default_attention_backend(runner: Any) -> str | None:
    """The backend that SGLang chooses for this model and machine by default; None if it cannot tell."""
    arguments = runner.server_args
    method = getattr(arguments, "_get_default_attn_backend", None)  # up to 0.5.18
    if method is not None:
        return method(runner.use_mla_backend, runner.model_config)
    try:
        from sglang.srt.arg_groups.model_override_base import get_default_attn_backend  # 0.5.20 and later
    except ImportError:
        return None
    return get_default_attn_backend(arguments, runner.use_mla_backend, runner.model_config)


def architectures(runner: Any) -> list[str]:
    """Class names in the model's configuration; empty if it has none."""
    return getattr(getattr(runner.model_config, "hf_config", None), "architectures", None) or []


def argument(runner: Any, name: str) -> Any:
    """A server argument as SGLang resolved it; None if this version, or a runner without arguments, lacks it.

    From 0.5.19 on the fields of ServerArgs keep what the user asked for, and decisions lie beside them.
    """
    arguments = getattr(runner, "server_args", None)
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view  # 0.5.19 and later
    except ImportError:
        return getattr(arguments, name, None)
    return getattr(resolved_view(arguments), name, None)


def backend_names(runner: Any) -> tuple[str | None, str | None]:
    """Names of the attention backends for prefill and decode of a target model's runner."""
    shared = argument(runner, "attention_backend")
    return (
        argument(runner, "prefill_attention_backend") or shared,
        argument(runner, "decode_attention_backend") or shared,
    )


def attention_dp_ranks(runner: Any) -> int:
    """Data-parallel attention groups within the tensor-parallel group; 1 without such groups."""
    if argument(runner, "enable_dp_attention"):  # up to 0.5.21; later ones resolve it to attn_dp_size
        return argument(runner, "dp_size") or 1
    return argument(runner, "attn_dp_size") or 1


def attention_ranks(runner: Any) -> int:
    """Ranks over which the attention heads of one request are spread."""
    ranks = argument(runner, "tp_size") or 1
    return max(1, ranks // attention_dp_ranks(runner) // (argument(runner, "attn_cp_size") or 1))


def microbatches(runner: Any) -> int:
    """Batches that a scheduler runs in turn: several in pipeline parallelism."""
    stages = argument(runner, "pp_size") or 1
    return stages + (argument(runner, "pp_async_batch_depth") or 0) if stages > 1 else 1


def has_decode_context_parallel(runner: Any) -> bool:
    """Whether the KV of a request is spread over ranks. Slot numbers then count the slots of all ranks."""
    return (argument(runner, "dcp_size") or 1) > 1


def has_no_decode_steps(runner: Any) -> bool:
    """Whether a server only prefills: embeddings and rewards, or the prefill side of disaggregated serving."""
    generates = getattr(runner.model_config, "is_generation", True) is not False
    return not generates or argument(runner, "disaggregation_mode") == "prefill"


def speculates(runner: Any) -> bool:
    """Whether the server uses speculative decoding."""
    algorithm = getattr(runner, "spec_algorithm", None)
    return algorithm is not None and not algorithm.is_none()


def drafts_of(runner: Any) -> int:
    """Draft tokens of each request in a verify step, the last accepted token included; 1 without speculation."""
    return (argument(runner, "speculative_num_draft_tokens") or 1) if speculates(runner) else 1


def has_draft_chains(runner: Any) -> bool:
    """Whether the drafts of each request are a chain. NGRAM's need not be, whatever its breadth."""
    return not runner.spec_algorithm.is_ngram() and (argument(runner, "speculative_eagle_topk") or 1) == 1


def has_uniform_drafts(runner: Any) -> bool:
    """Whether the server's verify steps are of a kind known here, with the same number of drafts in each step.

    With an overlapped plan stream, metadata is made before the drafts are known. With two attention backends, either
    may get the verify steps.
    """
    prefill, decode = backend_names(runner)
    if prefill != decode:
        return False
    algorithm = runner.spec_algorithm
    known = ("is_eagle", "is_standalone", "is_ngram", "is_dflash")
    if not any(getattr(algorithm, name, bool)() for name in known) or drafts_of(runner) < 2:
        return False
    return not argument(runner, "speculative_adaptive") and not plans_on_another_stream()


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


def has_multimodal_positions(runner: Any) -> bool:
    """Whether tokens have rotary positions in several dimensions (mrope)."""
    holder = runner.model_config if hasattr(runner.model_config, "model_is_mrope") else runner  # since 0.5.16
    return bool(holder.model_is_mrope)


def set_draft_backend(runner: Any, name: str) -> bool:
    """Makes the steps of a draft model use the stock backend `name` unless the user has chosen one.

    Call it while SGLang builds the draft runner's own backend. Right after that, SGLang builds the backends of the
    draft's steps from a table of names that lacks ours. Returns whether this SGLang allows the choice.
    """
    if hasattr(runner, "draft_attention_backend"):  # 0.5.18 and later
        runner.draft_attention_backend = runner.draft_attention_backend or name
        return True
    arguments = runner.server_args
    if not hasattr(arguments, "speculative_draft_attention_backend"):
        return False
    if not arguments.speculative_draft_attention_backend:
        if hasattr(arguments, "override"):  # 0.5.16 and 0.5.17 record who changes them
            arguments.override("prefixpack", speculative_draft_attention_backend=name)
        else:
            arguments.speculative_draft_attention_backend = name
    return True


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


def hides_its_tree(runner: Any) -> bool:
    """Whether the environment selects a prefix cache that shows no nodes: the C++ tree, or a native core without paths.

    Call it after `ask_for_readable_tree_core`, or for a server where that changes nothing.
    """
    from sglang.srt.environ import envs

    cpp = getattr(envs, CPP_TREE_VARIABLE, None)
    if cpp is not None and cpp.get() and not argument(runner, "radix_cache_backend"):
        return True
    core = getattr(envs, TREE_CORE_VARIABLE, None)
    if core is None or TREE_CORE_VARIABLE not in os.environ or core.get() != "rust":
        return False
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

    return not hasattr(UnifiedTreeCoreInterface, "collect_path_info")


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


def has_other_layers(runner: Any) -> bool:
    """Whether SGLang wraps ours in a backend of its own, for layers of linear attention or MiniMax's sparse layers."""
    from sglang.srt.configs.model_config import is_minimax_sparse
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    hf_config = getattr(runner.model_config, "hf_config", None)
    sparse = hf_config is not None and is_minimax_sparse(hf_config)
    return sparse or isinstance(runner.req_to_token_pool, HybridReqToTokenPool)


def argument_in_use(runner: Any, off: Mapping[str, Any]) -> str | None:
    """The first of these server arguments that is on, as `name=value`; None if all are off.

    Args:
        runner: SGLang's ModelRunner.
        off: values of the arguments when off. An SGLang without an argument lacks the feature.
    """
    for name, value_off in off.items():
        value = argument(runner, name)
        if value and value != value_off:
            return f"{name}={value!r}"
    return None


def mixes_chunks(runner: Any) -> bool:
    """Whether running requests join prefill steps. SGLang mixes chunks only: not with --chunked-prefill-size -1."""
    chunk = argument(runner, "chunked_prefill_size")
    return bool(argument(runner, "enable_mixed_chunk")) and chunk is not None and chunk > 0


def waits_for_free_slots(runner: Any) -> bool:
    """Whether SGLang (0.5.16 and later) admits no request until several slots are free; with DFlash by default."""
    least = argument(runner, "min_free_slots_delay")
    if least is None:
        return str(argument(runner, "speculative_algorithm")).upper() in ("DFLASH", "DSPARK")
    return bool(least > 1)


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
