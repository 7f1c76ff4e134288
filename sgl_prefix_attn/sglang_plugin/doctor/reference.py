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
        reasons.EXCEPTION,
        reasons.STOPPED,
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
        reasons.WHOLE_MODEL_KERNEL,
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


def markdown() -> str:
    """All reasons by section, each with its meaning and what to do about it."""
    parts = []
    for title, names in SECTIONS.items():
        parts.append(f"### {title}")
        parts.append("\n".join(_entry(name) for name in names))
    return "\n\n".join(parts)


def _entry(reason: str) -> str:
    meaning = advice.explained(reason)
    text = f"- `{reason}`: {meaning[0].lower()}{meaning[1:]}. *{advice.what_to_do(reason)}*"
    return textwrap.fill(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
