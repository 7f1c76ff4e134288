"""Why a step, or a layer of it, went to the stock backend instead of the packed path: the fixed set, one row a reason.

A decode step whose captured graph holds packed layers cannot go anywhere else; for it, the reason says why its
requests were read one by one, without sharing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple


@dataclass(frozen=True, eq=False, repr=False)
class Reason:
    """One reason. There are no others than the rows below, so reasons are equal if they are the same object.

    Attributes:
        key: the `reason` label of the metrics, and the key of `counters.fallbacks` in the server's state.
        text: what it means.
        advice: what a user can do about it.
        section: of docs/troubleshooting.md, which lists it there in the order of the rows.
        variables: environment variables to set for that.
        unset: environment variables, and the settings of these names, to remove.
        without: launch arguments to leave out, with their values; a name that ends with `-` stands for all that start
            with it.
        by_design: whether layers with it belong to the stock backend by the model's design. They are not counted. The
            server's state tells under `layers` how many layers it concerns.
    """

    key: str
    text: str
    advice: str = "Nothing: a property of the model."
    _: KW_ONLY
    section: str
    variables: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    by_design: bool = False

    def __repr__(self) -> str:
        return self.key


class Refused(NamedTuple):
    """A reason, and the details of this case for the log."""

    reason: Reason
    detail: str


_REPORT = "Report it with the log."

_step = partial(Reason, section="Steps")
IDLE = _step("idle", "an idle step without tokens", "Nothing: such steps have no work.")
NO_PATHS = _step(
    "no_paths",
    "the scheduler handed no request paths over for this forward: warm-up, a dummy batch, or a caller that does not go "
    "through the scheduler",
    "Nothing after start-up. If the number grows with every step, report it with the log.",
)
COMPUTE_BOUND = _step(
    "compute_bound",
    "prefill on a GPU stays with the stock backend, and so do mixed steps that share little (pack_extend, pack_mixed)",
    "Nothing: such steps are faster on the stock backend.",
)
DISABLED = _step(
    "disabled",
    "packing of this kind of step is switched off in the settings",
    "Remove the settings that switch packing off (pack_decode, pack_verify, route), or set them to true and auto.",
    variables=(("PREFIXPACK_PACK_DECODE", "true"), ("PREFIXPACK_PACK_VERIFY", "auto"), ("PREFIXPACK_ROUTE", "auto")),
)
MODE = _step(
    "mode", "a forward mode other than decode, extend, mixed and verify", "Nothing: no other steps have packed kernels."
)
SPECULATIVE = _step(
    "speculative",
    "a draft or mixed step of speculation; an unknown or adaptive algorithm; an overlapped plan stream; drafts that "
    "pack_verify=auto leaves out",
    "Set pack_verify to true, and measure. If that changes nothing, leave out the options of speculative decoding, and "
    "measure: speculation may gain more than packing.",
    variables=(("PREFIXPACK_PACK_VERIFY", "true"),),
)
SPECULATIVE_TREE = _step(
    "speculative_tree",
    "a verify step with a tree of drafts (topk above 1, NGRAM), of more than 64 drafts or on kernels without masks "
    "(triton)",
    "Leave out the options of speculative decoding, or use topk 1, and measure.",
)
BEAM_ROWS = _step(
    "beam_rows",
    "beam search adds rows that have no request of their own",
    "Nothing: beam search uses the stock backend.",
)
ITEM_MASKS = _step(
    "item_masks",
    "a prefill step of multi-item scoring (--enable-mis), whose items do not see each other",
    "Nothing: such steps use the stock backend.",
)
PLAN_TOO_LARGE = _step(
    "plan_too_large",
    "the plan of the batch does not fit the buffers on the GPU",
    "If the number is large, lower --max-running-requests, or --chunked-prefill-size (mixed).",
)
GRAPH = _step("graph", "the step runs inside a captured graph", "Nothing: graphs of such steps hold stock layers only.")
ROW_MISMATCH = _step(
    "row_mismatch",
    "the batch the backend got is not the one whose paths were handed over (padded or re-batched rows)",
    "Nothing for single steps. If most steps have it, report it with the launch arguments.",
)
NO_HOST_LENGTHS = _step("no_host_lengths", "the batch has no lengths in host memory", _REPORT)
UNKNOWN_TREE = _step(
    "unknown_tree",
    "no reader for this kind of prefix cache, for example SGLang's experimental C++ tree",
    "Unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE and SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND, and leave out options that "
    "replace the prefix cache.",
    unset=("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"),
)
PLAN_REFUSED = _step(
    "plan_refused", "the planner found paths and lengths of a batch inconsistent; the first case is in the log", _REPORT
)
HOOK_FAILED = _step(
    "hook_failed",
    "reading the request paths raised an exception; the first one is in the log with its traceback",
    _REPORT,
)
EXCEPTION = _step(
    "exception",
    "deciding or preparing the step, or one of its layers, raised an exception; the log has its traceback",
    _REPORT,
)
STOPPED = _step(
    "stopped",
    "several steps in a row raised an exception, so nothing is packed any more until the server restarts",
    _REPORT,
)

_layer = partial(Reason, section="Layers")
HYBRID_SWA = _layer(
    "hybrid_swa",
    "a sliding-window layer of a KV pool that keeps such layers in slots of their own",
    "Nothing: the layer is where it belongs.",
    by_design=True,
)
HEAD_DIM = _layer(
    "head_dim",
    "head_dim differs between K and V, is no multiple of 16 up to 256, or, with native kernels, not 64, 128 or 256",
    "Nothing; but on a GPU, for a multiple of 16 up to 256, PREFIXPACK_GPU_KERNELS=triton may help.",
)
HEAD_GROUPS = _layer("head_groups", "the number of query heads is not a multiple of the number of KV heads")
QUERY_DTYPE = _layer("query_dtype", "a query dtype other than float32, bfloat16 and float16")
KV_SCALES = _layer(
    "kv_scales",
    "scales of 8-bit KV are not one positive number a layer that the host knows and the stock backend uses as others "
    "do",
    "Use a checkpoint with one scale for each layer, or 16-bit KV.",
)
CROSS_ATTENTION = _layer("cross_attention", "a cross-attention layer")
NON_CAUSAL = _layer("non_causal", "an encoder-only or bidirectional layer")
LAYER_VARIANT = _layer(
    "layer_variant",
    "a layer with an attention variant the packed path does not know (logit capping other than tanh, length-dependent "
    "temperature, position encoding inside attention)",
)
CALL_ARGUMENTS = _layer(
    "call_arguments", "the model passes an argument to attention that the packed path does not know"
)
LATE_LAYER = _layer(
    "late_layer", "an attention layer of a shape that the model's modules did not show before the first step"
)

_server = partial(Reason, section="Servers")
NO_RADIX_CACHE = _server(
    "no_radix_cache",
    "the radix cache is off, so no request shares KV with another one",
    "Leave out --disable-radix-cache; with --disaggregation-mode decode, add "
    "--disaggregation-decode-enable-radix-cache.",
    without=("--disable-radix-cache",),
)
NO_CUDA_KERNEL = _server(
    "no_cuda_kernel",
    "this build has no packed kernel for the device",
    "Install the package on a machine with nvcc, or install Triton and set PREFIXPACK_GPU_KERNELS=triton.",
)
NO_MEMORY = _server(
    "no_memory",
    "the device had no memory left for the buffers of packed steps; a lower --mem-fraction-static leaves more",
    "Lower --mem-fraction-static.",
)
KV_DTYPE = _server(
    "kv_dtype",
    "a KV cache dtype other than float32, bfloat16, float16 and float8_e4m3fn (fp8_e4m3), or a cache with scales for "
    "each token or block (fp4, mxfp8)",
    "Leave out --kv-cache-dtype, or use fp8_e4m3 on a GPU with native kernels.",
    without=("--kv-cache-dtype",),
)
KV_LAYOUT = _server(
    "kv_layout",
    "the KV buffer is not [slots, kv heads, head dim] with a contiguous last dimension, or its pool's class is not "
    "known",
    "Unset SGLANG_USE_HND_KVCACHE, and leave out --enable-page-major-kv-layout.",
    unset=("SGLANG_USE_HND_KVCACHE",),
    without=("--enable-page-major-kv-layout",),
)
VIRTUAL_SLOTS = _server(
    "virtual_slots",
    "unified memory (--enable-unified-memory): the requests' tables name virtual slots",
    "Leave out --enable-unified-memory.",
    without=("--enable-unified-memory",),
)
DETERMINISTIC = _server(
    "deterministic",
    "deterministic inference and on-policy targets promise results that do not depend on the batch, but packs do",
    "Leave out --enable-deterministic-inference and --rl-on-policy-target, if results may depend on the batch.",
    without=("--enable-deterministic-inference", "--rl-on-policy-target"),
)
DECODE_CONTEXT_PARALLEL = _server(
    "decode_context_parallel",
    "decode context parallelism (--dcp-size) spreads a request's KV over ranks, and each has only some of the slots "
    "that its table names",
    "Leave out --dcp-size, and measure.",
    without=("--dcp-size",),
)
TWO_BATCH_OVERLAP = _server(
    "two_batch_overlap",
    "two-batch overlap cuts the batch in two",
    "Leave out --enable-two-batch-overlap, and measure.",
    without=("--enable-two-batch-overlap",),
)
PDMUX = _server(
    "pdmux",
    "prefill-decode multiplexing runs several attention backends at a time",
    "Leave out --enable-pdmux, and measure.",
    without=("--enable-pdmux",),
)
WHOLE_MODEL_KERNEL = _server(
    "whole_model_kernel",
    "one kernel computes all layers of a decode step (--enable-nvidia-megakernel, --enable-amd-monokernel), and reads "
    "the stock backend's metadata",
    "Leave out --enable-nvidia-megakernel and --enable-amd-monokernel, and measure.",
    without=("--enable-nvidia-megakernel", "--enable-amd-monokernel"),
)
ENCODER_DECODER = _server("encoder_decoder", "an encoder-decoder model: its rows start with encoder tokens")
DRAFT_WORKER = _server(
    "draft_worker",
    "the draft model of speculative decoding runs on the stock backend",
    "Nothing: this concerns the draft model only.",
)
PREFILL_ONLY = _server(
    "prefill_only",
    "the server decodes nothing (embeddings, or --disaggregation-mode prefill), and its prefill stays with the stock "
    "backend",
    "Nothing: such steps are faster on the stock backend.",
)

# Reasons of wrap mode alone: the server runs SGLang's own backend.
_wrap_mode = partial(Reason, section="Wrap mode")
MLA = _wrap_mode("mla", "a model with multi-head latent attention (MLA)")
IMAGE_MASKS = _wrap_mode(
    "image_masks",
    "images of the model have attention masks, which packed prefill does not know (pack_extend, pack_mixed)",
    "Remove the settings pack_extend and pack_mixed.",
    unset=("PREFIXPACK_PACK_EXTEND", "PREFIXPACK_PACK_MIXED"),
)
READS_METADATA = _wrap_mode(
    "reads_metadata", "the model's own code reads the stock backend's metadata, which packed steps do not make"
)
UNKNOWN_STOCK = _wrap_mode(
    "unknown_stock",
    "the object behind the stock backend's name is not of SGLang's class for it",
    "Remove the plug-in that replaces SGLang's attention backend.",
)
HOOKS_MISSING = _wrap_mode(
    "hooks_missing", "a hook on SGLang that hands over the request paths could not be applied", _REPORT
)
FAILED = _wrap_mode(
    "failed", "prefixpack raised an error while it wrapped the backend; the log has its traceback", _REPORT
)

# Reasons of the doctor alone: a server without prefixpack says nothing.
_doctor = partial(Reason, section="Doctor")
NOT_WRAPPED = _doctor(
    "not_wrapped",
    "prefixpack does not run: the backend is SGLang's own, and wrap mode does not name it",
    "Set PREFIXPACK_WRAP=1 in the environment of the server's process.",
    variables=(("PREFIXPACK_WRAP", "1"),),
)
NOT_WRAPPABLE = _doctor(
    "not_wrappable",
    "prefixpack does not run: it knows no way to wrap this backend",
    "Start with --attention-backend fa3, flashinfer, triton (GPU) or torch_native (CPU), and PREFIXPACK_WRAP=1.",
)
NO_SUCH_STEPS = _doctor("no_such_steps", "the server has no such steps", "Nothing.")

REASONS = tuple(value for value in list(globals().values()) if isinstance(value, Reason))
