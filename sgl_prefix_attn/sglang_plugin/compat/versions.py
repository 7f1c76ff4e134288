"""Which SGLang is supported, and what the installed one can do: the only place that knows about versions.

Everything that can be decided by looking at the code itself is probed by feature; the version number decides only
whether the plug-in registers at all.
"""

from __future__ import annotations

import importlib
from collections.abc import MutableMapping
from importlib import metadata
from typing import Any, Final

from sgl_prefix_attn.sglang_plugin.compat import targets

OLDEST: Final = targets.SUPPORTED_VERSIONS[0]
TREE_CORE_VARIABLE: Final = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"
GLUE_VARIABLE: Final = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
NEWEST: Final = targets.SUPPORTED_VERSIONS[-1]


class UnsupportedSglangError(RuntimeError):
    """The installed SGLang is outside the supported range; the message says what to do."""


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


def has_native_seam() -> bool:
    """Whether the installed SGLang hands the schedule batch to attention backends itself (our patch is applied)."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return hasattr(AttentionBackend, targets.NATIVE_SEAM)


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


def default_attention_backend(runner: Any) -> str | None:
    """The backend SGLang would choose for this model and machine if the user named none; None when it cannot say."""
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
    """The names of the model's classes, as its configuration has them; none if that does not say."""
    return getattr(getattr(runner.model_config, "hf_config", None), "architectures", None) or []


def has_decode_context_parallel(runner: Any) -> bool:
    """Whether the KV of a request is spread over ranks: slots are then numbers for all of them together."""
    return (getattr(getattr(runner, "server_args", None), "dcp_size", None) or 1) > 1


def set_draft_backend(runner: Any, name: str) -> bool:
    """Lets a draft model's steps use the stock backend `name`, where the user has chosen none; whether that worked.

    To be called while the draft runner's own backend is being built. SGLang builds those of the draft's steps right
    after it, from a table of stock names in which ours is not.
    """
    if hasattr(runner, "draft_attention_backend"):  # 0.5.18 and later
        runner.draft_attention_backend = runner.draft_attention_backend or name
        return True
    arguments = runner.server_args
    if not hasattr(arguments, "speculative_draft_attention_backend"):
        return False
    if not arguments.speculative_draft_attention_backend:
        if hasattr(arguments, "override"):  # 0.5.16 and 0.5.17 want to be told who changes them
            arguments.override("prefixpack", speculative_draft_attention_backend=name)
        else:
            arguments.speculative_draft_attention_backend = name
    return True


def ask_for_readable_tree_core(environ: MutableMapping[str, str]) -> bool:
    """Selects the radix tree's Python core where the native one is the default but cannot tell paths (0.5.21).

    To be called before SGLang builds its prefix cache. What the user has set stays. Returns whether it was changed.
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
    """Switches off what SGLang has from 0.5.19 on, if asked to: a graph of the work before a replay, kept by its size.

    It replays what the device did, without us; so the plan of the batch that was captured would serve all others.
    To be called before SGLang makes its decode graph runner. Returns whether it was on.
    """
    from sglang.srt.environ import envs

    if not hasattr(envs, GLUE_VARIABLE) or not getattr(envs, GLUE_VARIABLE).get():
        return False
    environ[GLUE_VARIABLE] = "0"
    return True


def has_other_layers(runner: Any) -> bool:
    """Whether SGLang puts a backend of its own before ours: for layers of linear attention, which keep states of their
    own, or for the sparse ones of MiniMax models.
    """
    from sglang.srt.configs.model_config import is_minimax_sparse
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    hf_config = getattr(runner.model_config, "hf_config", None)
    sparse = hf_config is not None and is_minimax_sparse(hf_config)
    return sparse or isinstance(runner.req_to_token_pool, HybridReqToTokenPool)


def has_sliding_window_pool(pool: Any) -> bool:
    """Whether the KV pool keeps sliding-window layers in slots of their own."""
    for module in ("sglang.srt.mem_cache.swa_memory_pool", "sglang.srt.mem_cache.memory_pool"):
        try:
            pool_class = importlib.import_module(module).SWAKVPool
        except (ImportError, AttributeError):
            continue
        return isinstance(pool, pool_class)
    return False
