"""The list of all fallback reasons as Markdown: the generated part of docs/troubleshooting.md."""

from __future__ import annotations

import textwrap
from typing import Final

from sgl_prefix_attn.sglang_plugin.doctor import advice
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons

_COLUMNS = 118

SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Steps": (
        reasons.IDLE,
        reasons.NO_PATHS,
        reasons.COMPUTE_BOUND,
        reasons.DISABLED,
        reasons.MODE,
        reasons.SPECULATIVE,
        reasons.SPECULATIVE_TREE,
        reasons.BEAM_ROWS,
        reasons.ITEM_MASKS,
        reasons.PLAN_TOO_LARGE,
        reasons.GRAPH,
        reasons.ROW_MISMATCH,
        reasons.NO_HOST_LENGTHS,
        reasons.UNKNOWN_TREE,
        reasons.PLAN_REFUSED,
        reasons.HOOK_FAILED,
    ),
    "Layers": (
        reasons.HYBRID_SWA,
        reasons.HEAD_DIM,
        reasons.HEAD_GROUPS,
        reasons.QUERY_DTYPE,
        reasons.KV_SCALES,
        reasons.CROSS_ATTENTION,
        reasons.NON_CAUSAL,
        reasons.LAYER_VARIANT,
        reasons.CALL_ARGUMENTS,
        reasons.LATE_LAYER,
    ),
    "Servers": (
        reasons.NO_RADIX_CACHE,
        reasons.NO_CUDA_KERNEL,
        reasons.NO_MEMORY,
        reasons.KV_DTYPE,
        reasons.KV_LAYOUT,
        reasons.VIRTUAL_SLOTS,
        reasons.DETERMINISTIC,
        reasons.DECODE_CONTEXT_PARALLEL,
        reasons.TWO_BATCH_OVERLAP,
        reasons.PDMUX,
        reasons.ENCODER_DECODER,
        reasons.DRAFT_WORKER,
        reasons.PREFILL_ONLY,
    ),
    "Wrap mode": (
        reasons.MLA,
        reasons.IMAGE_MASKS,
        reasons.READS_METADATA,
        reasons.UNKNOWN_STOCK,
        reasons.HOOKS_MISSING,
        reasons.FAILED,
    ),
    "Doctor": tuple(advice.EXPLANATIONS),
}

_REPORT: Final = "Report it with the log: this is an error of this package or an SGLang that it does not know."
_LOOKS: Final[dict[str, str]] = {
    reasons.IDLE: "Nothing: such steps have no work.",
    reasons.NO_PATHS: "Nothing after start-up. If the number grows with every step, report it with the log.",
    reasons.MODE: "Nothing: only decode, prefill and mixed steps have packed kernels.",
    reasons.SPECULATIVE_TREE: "Leave out the options of speculative decoding, or use topk 1, and measure.",
    reasons.BEAM_ROWS: "Nothing: beam search runs stock.",
    reasons.ITEM_MASKS: "Nothing: such steps run stock.",
    reasons.PLAN_TOO_LARGE: "If the number is large, lower --max-running-requests, or --chunked-prefill-size (mixed).",
    reasons.GRAPH: "Nothing: graphs of such steps hold stock layers only.",
    reasons.ROW_MISMATCH: "Nothing for single steps. If most steps have it, report it with the launch arguments.",
    reasons.NO_HOST_LENGTHS: _REPORT,
    reasons.PLAN_REFUSED: _REPORT,
    reasons.HOOK_FAILED: _REPORT,
    reasons.HYBRID_SWA: "Nothing: the layer is where it belongs.",
    reasons.KV_SCALES: "Use a checkpoint with one scale for each layer, or 16-bit KV.",
    reasons.NO_MEMORY: "Lower --mem-fraction-static.",
    reasons.DRAFT_WORKER: "Nothing: this concerns the draft model only.",
    reasons.HOOKS_MISSING: _REPORT,
    reasons.FAILED: _REPORT,
    advice.NO_SUCH_STEPS: "Nothing.",
}
_OF_THE_MODEL: Final = frozenset(
    {
        reasons.HEAD_DIM,
        reasons.HEAD_GROUPS,
        reasons.QUERY_DTYPE,
        reasons.CROSS_ATTENTION,
        reasons.NON_CAUSAL,
        reasons.LAYER_VARIANT,
        reasons.CALL_ARGUMENTS,
        reasons.LATE_LAYER,
        reasons.ENCODER_DECODER,
        reasons.MLA,
        reasons.READS_METADATA,
    }
)


def what_to_do(reason: str) -> str:
    """What a user can do about a reason.

    Raises:
        KeyError: the reason is in no list.
    """
    if reason in _OF_THE_MODEL:
        return "Nothing: a property of the model."
    return _LOOKS[reason] if reason in _LOOKS else advice.CHANGES[reason].text


def markdown() -> str:
    """All reasons by section, each with its meaning and what to do about it."""
    parts = []
    for title, names in SECTIONS.items():
        parts.append(f"### {title}")
        parts.append("\n".join(_entry(name) for name in names))
    return "\n\n".join(parts)


def _entry(reason: str) -> str:
    meaning = advice.explained(reason)
    text = f"- `{reason}`: {meaning[0].lower()}{meaning[1:]}. *{what_to_do(reason)}*"
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
