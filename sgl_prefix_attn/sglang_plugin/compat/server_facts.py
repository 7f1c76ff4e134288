"""What SGLang has decided about a server when it builds an attention backend: read once, by every supported version.

Late facts stay late: `hides_its_tree` and `has_uniform_drafts` ask the environment when they are read, and what is in
`model` and the pools is read from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sgl_prefix_attn.sglang_plugin.compat import versions

if TYPE_CHECKING:
    from typing import Self

    import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerFacts:
    """Facts of one model runner. Those without a comment are attributes of it or of its ModelConfig.

    Attributes:
        server_args, arguments: as the user gave them, and as SGLang resolved them; see `argument`.
        model_is_mrope: whether tokens have rotary positions in several dimensions; True where nothing says so.
        translates_slots: whether entries of `req_to_token` are translated before attention reads them (from 0.5.19).
        ranks: holds this process's ranks, up to 0.5.20; None: SGLang's context has them.
    """

    device: str
    server_args: Any = None
    arguments: Any = None
    model_config: Any = None
    hf_config: Any = None
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype | None = None
    spec_algorithm: Any = None
    is_draft_worker: bool = False
    use_mla_backend: bool = False
    is_encoder_decoder: bool = False
    is_generation: bool = True
    model_is_mrope: bool = True
    translates_slots: bool = False
    ranks: Any = None
    model: torch.nn.Module | None = None
    req_to_token_pool: Any = None
    token_to_kv_pool: Any = None

    @classmethod
    def of(cls, runner: Any) -> ServerFacts:
        """The facts of SGLang's ModelRunner, or of what stands for one in SGLang's tests."""
        return cls.read(
            getattr(runner, "model_config", None),
            runner,
            device=str(runner.device),
            arguments=resolved(getattr(runner, "server_args", None)),
            translates_slots=bool(getattr(getattr(runner, "kv_index_translator", None), "is_translating", False)),
            ranks=next((each for each in (getattr(runner, "ps", None), runner) if hasattr(each, "tp_rank")), None),
        )

    @classmethod
    def read(cls, *holders: Any, **given: Any) -> Self:
        """A record with `given`, and with what the holders have of the other facts; a later one goes before."""
        names = [fact.name for fact in fields(cls)]
        return cls(**{name: getattr(each, name) for each in holders for name in names if hasattr(each, name)} | given)

    def argument(self, name: str) -> Any:
        """A server argument; None if this version, or a runner without arguments, lacks it."""
        return getattr(self.arguments, name, None)

    def argument_in_use(self, off: Mapping[str, Any]) -> str | None:
        """The first argument that has neither its value when off nor a false one, as `name=value`; None if none has."""
        values = ((name, self.argument(name)) for name in off)
        return next((f"{name}={value!r}" for name, value in values if value and value != off[name]), None)

    @property
    def is_cpu(self) -> bool:
        return self.device.split(":")[0] == "cpu"

    @property
    def page_size(self) -> int:
        return self.argument("page_size") or 1

    @property
    def architectures(self) -> list[str]:
        """Class names in the model's configuration; empty if it has none."""
        return getattr(self.hf_config, "architectures", None) or []

    @property
    def backend_names(self) -> tuple[str | None, str | None]:
        """Names of the attention backends for prefill and decode of a target model's runner."""
        shared = self.argument("attention_backend")
        prefill, decode = self.argument("prefill_attention_backend"), self.argument("decode_attention_backend")
        return prefill or shared, decode or shared

    @property
    def attention_dp_ranks(self) -> int:
        """Data-parallel attention groups within the tensor-parallel group; 1 without such groups."""
        if self.argument("enable_dp_attention"):  # up to 0.5.21; later ones resolve it to attn_dp_size
            return self.argument("dp_size") or 1
        return self.argument("attn_dp_size") or 1

    @property
    def attention_ranks(self) -> int:
        """Ranks over which the attention heads of one request are spread."""
        ranks = self.argument("tp_size") or 1
        return max(1, ranks // self.attention_dp_ranks // (self.argument("attn_cp_size") or 1))

    @property
    def microbatches(self) -> int:
        """Batches that a scheduler runs in turn: several in pipeline parallelism."""
        stages = self.argument("pp_size") or 1
        return stages + (self.argument("pp_async_batch_depth") or 0) if stages > 1 else 1

    @property
    def has_decode_context_parallel(self) -> bool:
        """Whether the KV of a request is spread over ranks. Slot numbers then count the slots of all ranks."""
        return (self.argument("dcp_size") or 1) > 1

    @property
    def has_no_decode_steps(self) -> bool:
        """Whether a server only prefills: embeddings and rewards, or the prefill side of disaggregated serving."""
        return not self.is_generation or self.argument("disaggregation_mode") == "prefill"

    @property
    def has_other_layers(self) -> bool:
        """Whether SGLang wraps ours in a backend of its own, for layers of linear or MiniMax's sparse attention."""
        from sglang.srt.configs.model_config import is_minimax_sparse
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

        sparse = self.hf_config is not None and is_minimax_sparse(self.hf_config)
        return sparse or isinstance(self.req_to_token_pool, HybridReqToTokenPool)

    @property
    def masks_images(self) -> bool:
        """Whether the model makes attention masks of its own for images."""
        return hasattr(self.model, "prepare_attn_masks")

    @property
    def mixes_chunks(self) -> bool:
        """Whether running requests join prefill steps. SGLang mixes chunks only: not with --chunked-prefill-size -1."""
        chunk = self.argument("chunked_prefill_size")
        return bool(self.argument("enable_mixed_chunk")) and chunk is not None and chunk > 0

    @property
    def waits_for_free_slots(self) -> bool:
        """Whether SGLang (0.5.16 and later) admits no request until several slots are free; with DFlash by default."""
        least = self.argument("min_free_slots_delay")
        if least is None:
            return str(self.argument("speculative_algorithm")).upper() in ("DFLASH", "DSPARK")
        return bool(least > 1)

    @property
    def speculates(self) -> bool:
        """Whether the server uses speculative decoding."""
        return self.spec_algorithm is not None and not self.spec_algorithm.is_none()

    @property
    def drafts(self) -> int:
        """Draft tokens of each request in a verify step, the last accepted token included; 1 without speculation."""
        return (self.argument("speculative_num_draft_tokens") or 1) if self.speculates else 1

    @property
    def has_draft_chains(self) -> bool:
        """Whether the drafts of each request are a chain. NGRAM's need not be, whatever its breadth."""
        return not self.spec_algorithm.is_ngram() and (self.argument("speculative_eagle_topk") or 1) == 1

    @property
    def has_uniform_drafts(self) -> bool:
        """Whether the server's verify steps are of a kind known here, with the same number of drafts in each step.

        With an overlapped plan stream, metadata is made before the drafts are known. With two attention backends,
        either may get the verify steps.
        """
        if len(set(self.backend_names)) > 1:
            return False
        known = ("is_eagle", "is_standalone", "is_ngram", "is_dflash")
        if not any(getattr(self.spec_algorithm, name, bool)() for name in known) or self.drafts < 2:
            return False
        return not self.argument("speculative_adaptive") and not versions.plans_on_another_stream()

    def default_attention_backend(self) -> str | None:
        """The backend that SGLang chooses for this model and machine by default; None if it cannot tell."""
        method = getattr(self.server_args, "_get_default_attn_backend", None)  # up to 0.5.18
        if method is not None:
            return method(self.use_mla_backend, self.model_config)
        try:
            from sglang.srt.arg_groups.model_override_base import get_default_attn_backend  # 0.5.20 and later
        except ImportError:
            return None
        return get_default_attn_backend(self.server_args, self.use_mla_backend, self.model_config)

    @property
    def hides_its_tree(self) -> bool:
        """Whether the environment selects a prefix cache that shows no nodes: the C++ tree, or a core without paths.

        Call it after `versions.ask_for_readable_tree_core`, or for a server where that changes nothing.
        """
        from sglang.srt.environ import envs

        cpp = getattr(envs, versions.CPP_TREE_VARIABLE, None)
        if cpp is not None and cpp.get() and not self.argument("radix_cache_backend"):
            return True
        core = getattr(envs, versions.TREE_CORE_VARIABLE, None)
        if core is None or versions.TREE_CORE_VARIABLE not in os.environ or core.get() != "rust":
            return False
        from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

        return not hasattr(UnifiedTreeCoreInterface, "collect_path_info")


def resolved(server_args: Any) -> Any:
    """Server arguments with what SGLang decided about them.

    From 0.5.19 on the fields of ServerArgs keep what the user asked for, and decisions lie beside them.
    """
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view  # 0.5.19 and later
    except ImportError:
        return server_args
    return resolved_view(server_args)
