"""The choice of the stock backend, which runs all steps and layers that are not packed."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

import torch

from sgl_prefix_attn.settings import accepted_values
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts

logger = logging.getLogger(__name__)

# Attribute of the factories that wrap mode puts into SGLang's registry: SGLang's own factory.
STOCK_FACTORY = "prefixpack_stock_factory"
CPU_DEFAULT = "torch_native"
# Backends of CUDA builds that can be wrapped, and the one for servers where SGLang would choose another.
CUDA_CHOICES = ("flashinfer", "fa3", "triton")
CUDA_DEFAULT = "triton"
# Backends that ignore the KV scales of a layer, both when they store and when they read.
_WITHOUT_KV_SCALES = frozenset({"torch_native", "flex_attention"})
_GRAPHS_SHARE_METADATA = frozenset({"fa3", "triton"})
# Backends that SGLang refuses by name for a model, and the one that it takes instead.
_UNSUITED = {
    ("Olmo2ForCausalLM", "flashinfer"): "triton",
    ("Lfm2ForCausalLM", "triton"): "flashinfer",
    ("Lfm2MoeForCausalLM", "triton"): "flashinfer",
}


def stock_name(facts: ServerFacts, setting: str) -> str:
    """The stock backend's name for a server and the setting `stock_backend`.

    Raises:
        ValueError: a setting that cannot work on the server's device.
    """
    on_cpu = facts.is_cpu
    if setting != "auto":
        if on_cpu and setting != CPU_DEFAULT:
            raise ValueError(
                f"stock_backend={setting!r} needs a GPU, but SGLang runs on the CPU here; use {CPU_DEFAULT!r} or "
                f"'auto' (accepted: {accepted_values('stock_backend')})"
            )
        return setting if on_cpu else _suited(facts, setting)
    if on_cpu:
        return CPU_DEFAULT
    chosen = facts.default_attention_backend()
    if chosen in CUDA_CHOICES:
        return _suited(facts, str(chosen))
    logger.warning("prefixpack: SGLang would choose %r here, which needs its own name; using %r", chosen, CUDA_DEFAULT)
    return _suited(facts, CUDA_DEFAULT)


def _suited(facts: ServerFacts, name: str) -> str:
    """`name`, or the backend to use instead where `name` cannot serve on a GPU.

    SGLang makes such changes by the name in its arguments, but that is ours.
    """
    for architecture in facts.architectures:
        other = _UNSUITED.get((architecture, name))
        if other is not None:
            name = _replaced(name, other, f"SGLang does not run {architecture} on it")
    if name == "fa3" and facts.kv_cache_dtype is torch.float8_e5m2:
        name = _replaced(name, "triton", "it reads no fp8_e5m2 KV cache, of 8-bit ones only fp8_e4m3")
    if name != "triton" and facts.has_decode_context_parallel:
        name = _replaced(name, "triton", "it does not know KV that is spread over ranks (--dcp-size)")
    if name == CPU_DEFAULT:
        logger.warning("prefixpack: stock backend %r needs --disable-cuda-graph: no graph can hold it", name)
    return name


def _replaced(name: str, other: str, why: str) -> str:
    logger.warning("prefixpack: stock backend %r instead of %r: %s", other, name, why)
    return other


def build_stock(runner: Any, name: str) -> Any:
    """Builds a stock backend through SGLang's own registry, never wrapped."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    try:
        factory = ATTENTION_BACKENDS[name]
    except KeyError:
        raise ValueError(
            f"stock_backend={name!r}: SGLang {versions.installed_version()} has no such attention backend; it has "
            f"{', '.join(sorted(ATTENTION_BACKENDS))}"
        ) from None
    if name == "flashinfer":
        _warn_of_old("flashinfer-python")
    return getattr(factory, STOCK_FACTORY, factory)(runner)


def set_draft_backend(runner: Any, name: str) -> None:
    """Makes the steps of a draft model use the stock backend `name` unless the user has chosen one.

    Call it while SGLang builds the draft runner's own backend. Right after that, SGLang builds the backends of the
    draft's steps from a table of names that lacks ours.

    Raises:
        ValueError: this SGLang does not allow the choice.
    """
    if hasattr(runner, "draft_attention_backend"):  # 0.5.18 and later
        runner.draft_attention_backend = runner.draft_attention_backend or name
        return
    arguments = runner.server_args
    if not hasattr(arguments, "speculative_draft_attention_backend"):
        raise ValueError(
            "attention backend 'prefixpack' cannot choose a backend for the draft model in SGLang "
            f"{versions.installed_version()}; name one with --speculative-draft-attention-backend, for example {name!r}"
        )
    if not arguments.speculative_draft_attention_backend:
        if hasattr(arguments, "override"):  # 0.5.16 and 0.5.17 record who changes them
            arguments.override("prefixpack", speculative_draft_attention_backend=name)
        else:
            arguments.speculative_draft_attention_backend = name


def _warn_of_old(package: str) -> None:
    """Logs a warning if a package is older than SGLang requires. SGLang looks itself where it sees its own names.

    Never raises: a server must start with any metadata, a wildcard or a broken installation included.
    """
    try:
        for requirement in _unmet(package):
            logger.warning("prefixpack: %s is older than SGLang requires: %s", package, requirement)
    except Exception as error:  # the one guard: nobody knows what a build of one's own needs
        logger.debug("prefixpack: version of %s not checked: %s", package, error)


def _unmet(package: str) -> list[str]:
    """Requirements of the installed SGLang that a package is too old for."""
    from packaging.requirements import Requirement  # a dependency of sglang, not of ours
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    installed = Version(importlib.metadata.version(package))
    found = []
    for requirement in map(Requirement, importlib.metadata.requires("sglang") or ()):
        if canonicalize_name(requirement.name) != package:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        least = [limit.version for limit in requirement.specifier if limit.operator in ("==", ">=", "~=")]
        if any(installed < Version(version.removesuffix(".*")) for version in least):
            found.append(f"{requirement}, installed is {installed}")
    return found


def knows_kv_scales(name: str) -> bool:
    """Whether a stock backend stores fp8 KV divided by the layers' scales, and multiplies by them when it reads."""
    return name not in _WITHOUT_KV_SCALES


def graphs_share_metadata(name: str) -> bool:
    """Whether two captured graphs of one size may hold layers of a stock backend.

    Such a backend keeps what its layers read in buffers that all graphs share. Others, FlashInfer and trtllm_mha, make
    objects for each capture and update the newest at a replay.
    """
    return name in _GRAPHS_SHARE_METADATA
