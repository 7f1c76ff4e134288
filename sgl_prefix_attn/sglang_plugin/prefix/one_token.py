"""One-token steps: prefill and mixed steps in which each request has one new token run as decode steps.

SGLang computes the last prompt token of a request even if the whole prompt is cached. A request that joins a rollout
on a cached prompt therefore costs an eager prefill of one token, and with `--enable-mixed-chunk` the whole decode batch
runs eagerly with it. Such a step is a decode step for the model: one query a request, at the end of its KV. Here the
ForwardBatch says so. SGLang then replays its decode graph, and the step can run packed. The ScheduleBatch stays as it
is, so the scheduler processes the result as that of a prefill.

The decision reads the schedule batch and the server's arguments only, so all tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from typing import Any, Final

from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

# Server arguments with which a one-token prefill is more than a decode step, and their values when off. An SGLang
# without an argument lacks the feature. Caches on other tiers load KV while a prefill runs, layer by layer; a replayed
# graph does not wait for them.
_ARGUMENTS: Final[dict[str, Any]] = {
    "attn_cp_size": 1,
    "attn_dp_size": 1,
    "dcp_size": 1,
    "disaggregation_mode": "null",
    "dllm_algorithm": None,
    "enable_dp_attention": False,
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_hisparse": False,
    "enable_lmcache": False,
    "enable_lora": False,
    "enable_pdmux": False,
    "enable_two_batch_overlap": False,
    "enable_unified_cache_external_linker": False,
    "pp_size": 1,
    "radix_cache_backend": None,
    "speculative_algorithm": None,
}
_EXTEND_FIELDS: Final = (
    "extend_num_tokens",
    "extend_seq_lens",
    "extend_prefix_lens",
    "extend_start_loc",
    "extend_prefix_lens_cpu",
    "extend_seq_lens_cpu",
    "extend_logprob_start_lens_cpu",
    "extend_input_logprob_token_ids_gpu",
)


def why_none_decodes(facts: ServerFacts) -> str | None:
    """Why no step of a server becomes a decode step, in words; None if some may."""
    argument = facts.argument_in_use(_ARGUMENTS)
    found = (
        (argument is not None, argument),
        (not facts.is_generation, "the model generates no text"),
        (facts.is_encoder_decoder, "an encoder-decoder model"),
        (facts.model_is_mrope, "a model with multimodal rotary positions"),
        (facts.has_other_layers, "a model with layers of linear or sparse attention"),
    )
    return next((why_not for applies, why_not in found if applies), None)


class OneTokenSteps:
    """Finds one-token steps and makes decode steps of them.

    Args:
        counters: totals of the process.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def applies(self, batch: Any) -> bool:
        """Whether a batch is a prefill or mixed step that runs as a decode step.

        Args:
            batch: SGLang's ScheduleBatch.
        """
        if batch.forward_mode.name not in ("EXTEND", "MIXED"):
            return False
        lens = batch.extend_lens
        return (
            isinstance(lens, list)
            and 0 < len(lens) == lens.count(1) == len(batch.reqs) == len(batch.seq_lens)
            # The result of a prefill has log probabilities or hidden states of the prompt.
            and not batch.return_logprob
            and not batch.return_hidden_states
            and not batch.is_prefill_only
            # Inputs that are no tokens.
            and batch.input_embeds is None
            and batch.replace_embeds is None
            and not (batch.multimodal_inputs and any(inputs is not None for inputs in batch.multimodal_inputs))
            and batch.encoder_lens is None
            # Each data-parallel rank would have to do the same.
            and batch.global_num_tokens is None
            and batch.dllm_config is None
            # SGLang keeps the logits from which beams start in prefill steps only.
            and not versions.starts_beams(batch.reqs)
        )

    def convert(self, batch: Any, forward_batch: Any) -> None:
        """Makes a decode step of the ForwardBatch of a batch for which `applies` is true, and counts it.

        Positions stay: those of a prefill are lengths minus one too.
        """
        mode = forward_batch.forward_mode
        if mode is not batch.forward_mode:
            return
        kind = "mixed" if batch.decoding_reqs else "extend"
        forward_batch.forward_mode = type(mode).DECODE
        for name in _EXTEND_FIELDS:
            setattr(forward_batch, name, None)
        self._counters.one_token_steps[kind] += 1
