"""Why a step, or a layer of it, went to the stock backend instead of the packed path: the fixed set.

A decode step whose captured graph holds packed layers cannot go anywhere else; for it, the reason says why its
requests were read one by one, without sharing.

The strings are the `reason` label of the metrics and the keys of `counters.fallbacks` in the server's state.
"""

from __future__ import annotations

from typing import Final

NO_PATHS: Final = "no_paths"
HOOK_FAILED: Final = "hook_failed"
EXCEPTION: Final = "exception"
STOPPED: Final = "stopped"
PLAN_REFUSED: Final = "plan_refused"
ROW_MISMATCH: Final = "row_mismatch"
BEAM_ROWS: Final = "beam_rows"
ITEM_MASKS: Final = "item_masks"
NO_RADIX_CACHE: Final = "no_radix_cache"
UNKNOWN_TREE: Final = "unknown_tree"
NO_HOST_LENGTHS: Final = "no_host_lengths"
MODE: Final = "mode"
IDLE: Final = "idle"
SPECULATIVE: Final = "speculative"
SPECULATIVE_TREE: Final = "speculative_tree"
DRAFT_WORKER: Final = "draft_worker"
GRAPH: Final = "graph"
TWO_BATCH_OVERLAP: Final = "two_batch_overlap"
ENCODER_DECODER: Final = "encoder_decoder"
HYBRID_SWA: Final = "hybrid_swa"
VIRTUAL_SLOTS: Final = "virtual_slots"
KV_LAYOUT: Final = "kv_layout"
KV_DTYPE: Final = "kv_dtype"
KV_SCALES: Final = "kv_scales"
QUERY_DTYPE: Final = "query_dtype"
HEAD_DIM: Final = "head_dim"
HEAD_GROUPS: Final = "head_groups"
CROSS_ATTENTION: Final = "cross_attention"
NON_CAUSAL: Final = "non_causal"
LAYER_VARIANT: Final = "layer_variant"
CALL_ARGUMENTS: Final = "call_arguments"
DISABLED: Final = "disabled"
COMPUTE_BOUND: Final = "compute_bound"
NO_CUDA_KERNEL: Final = "no_cuda_kernel"
PLAN_TOO_LARGE: Final = "plan_too_large"
NO_MEMORY: Final = "no_memory"
LATE_LAYER: Final = "late_layer"
PDMUX: Final = "pdmux"
DECODE_CONTEXT_PARALLEL: Final = "decode_context_parallel"
WHOLE_MODEL_KERNEL: Final = "whole_model_kernel"
DETERMINISTIC: Final = "deterministic"
PREFILL_ONLY: Final = "prefill_only"
# Reasons of wrap mode only: the server runs SGLang's own backend.
MLA: Final = "mla"
UNKNOWN_STOCK: Final = "unknown_stock"
IMAGE_MASKS: Final = "image_masks"
READS_METADATA: Final = "reads_metadata"
HOOKS_MISSING: Final = "hooks_missing"
FAILED: Final = "failed"

# Reasons of layers that belong to the stock backend by the model's design. They are not counted. The server's state
# tells under `layers` how many layers they concern.
BY_DESIGN: Final = frozenset({HYBRID_SWA})

EXPLANATIONS: Final[dict[str, str]] = {
    NO_PATHS: "the scheduler handed no request paths over for this forward: warm-up, a dummy batch, or a caller that "
    "does not go through the scheduler",
    HOOK_FAILED: "reading the request paths raised an exception; the first one is in the log with its traceback",
    EXCEPTION: "deciding or preparing the step, or one of its layers, raised an exception; the log has its traceback",
    STOPPED: "several steps in a row raised an exception, so nothing is packed any more until the server restarts",
    PLAN_REFUSED: "the planner found paths and lengths of a batch inconsistent; the first case is in the log",
    ROW_MISMATCH: "the batch the backend got is not the one whose paths were handed over (padded or re-batched rows)",
    BEAM_ROWS: "beam search adds rows that have no request of their own",
    ITEM_MASKS: "a prefill step of multi-item scoring (--enable-mis), whose items do not see each other",
    NO_RADIX_CACHE: "the radix cache is off, so no request shares KV with another one",
    UNKNOWN_TREE: "no reader for this kind of prefix cache, for example SGLang's experimental C++ tree",
    NO_HOST_LENGTHS: "the batch has no lengths in host memory",
    MODE: "a forward mode other than decode, extend, mixed and verify",
    IDLE: "an idle step without tokens",
    SPECULATIVE: "a draft or mixed step of speculation; an unknown or adaptive algorithm; an overlapped plan stream; "
    "drafts that pack_verify=auto leaves out",
    SPECULATIVE_TREE: "a verify step with a tree of drafts (topk above 1, NGRAM), of more than 64 drafts or on kernels "
    "without masks (triton)",
    DRAFT_WORKER: "the draft model of speculative decoding runs on the stock backend",
    GRAPH: "the step runs inside a captured graph",
    TWO_BATCH_OVERLAP: "two-batch overlap cuts the batch in two",
    ENCODER_DECODER: "an encoder-decoder model: its rows start with encoder tokens",
    HYBRID_SWA: "a sliding-window layer of a KV pool that keeps such layers in slots of their own",
    VIRTUAL_SLOTS: "unified memory (--enable-unified-memory): the requests' tables name virtual slots",
    KV_LAYOUT: "the KV buffer is not [slots, kv heads, head dim] with a contiguous last dimension, or its pool's class "
    "is not known",
    KV_DTYPE: "a KV cache dtype other than float32, bfloat16, float16 and float8_e4m3fn (fp8_e4m3), or a cache with "
    "scales for each token or block (fp4, mxfp8)",
    KV_SCALES: "scales of 8-bit KV are not one positive number a layer that the host knows and the stock backend uses "
    "as others do",
    QUERY_DTYPE: "a query dtype other than float32, bfloat16 and float16",
    HEAD_DIM: "head_dim differs between K and V, is no multiple of 16 up to 256, or, with native kernels, not 64, 128 "
    "or 256",
    HEAD_GROUPS: "the number of query heads is not a multiple of the number of KV heads",
    CROSS_ATTENTION: "a cross-attention layer",
    NON_CAUSAL: "an encoder-only or bidirectional layer",
    LAYER_VARIANT: "a layer with an attention variant the packed path does not know (logit capping other than tanh, "
    "length-dependent temperature, position encoding inside attention)",
    CALL_ARGUMENTS: "the model passes an argument to attention that the packed path does not know",
    DISABLED: "packing of this kind of step is switched off in the settings",
    COMPUTE_BOUND: "prefill on a GPU stays with the stock backend, and so do mixed steps that share little "
    "(pack_extend, pack_mixed)",
    NO_CUDA_KERNEL: "this build has no packed kernel for the device",
    PLAN_TOO_LARGE: "the plan of the batch does not fit the buffers on the GPU",
    NO_MEMORY: "the device had no memory left for the buffers of packed steps; a lower --mem-fraction-static leaves "
    "more",
    LATE_LAYER: "an attention layer of a shape that the model's modules did not show before the first step",
    PDMUX: "prefill-decode multiplexing runs several attention backends at a time",
    DECODE_CONTEXT_PARALLEL: "decode context parallelism (--dcp-size) spreads a request's KV over ranks, and each "
    "has only some of the slots that its table names",
    WHOLE_MODEL_KERNEL: "one kernel computes all layers of a decode step (--enable-nvidia-megakernel, "
    "--enable-amd-monokernel), and reads the stock backend's metadata",
    DETERMINISTIC: "deterministic inference and on-policy targets promise results that do not depend on the batch, but "
    "packs do",
    PREFILL_ONLY: "the server decodes nothing (embeddings, or --disaggregation-mode prefill), and its prefill stays "
    "with the stock backend",
    MLA: "a model with multi-head latent attention (MLA)",
    UNKNOWN_STOCK: "the object behind the stock backend's name is not of SGLang's class for it",
    IMAGE_MASKS: "images of the model have attention masks, which packed prefill does not know (pack_extend, "
    "pack_mixed)",
    READS_METADATA: "the model's own code reads the stock backend's metadata, which packed steps do not make",
    HOOKS_MISSING: "a hook on SGLang that hands over the request paths could not be applied",
    FAILED: "prefixpack raised an error while it wrapped the backend; the log has its traceback",
}
