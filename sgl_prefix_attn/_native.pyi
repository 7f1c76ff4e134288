"""Types of the native module. Arrays that it returns are read-only views that keep their owner alive.

Addresses are of host memory for the CPU executor and of device memory for CUDA. Strides count elements, not bytes.
Errors: ValueError for impossible values; MemoryError, OverflowError and RuntimeError as C++ raises them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

built_with_cuda: bool
# Sizes of the device's structs in 32-bit words (csrc/cuda/kernel_params.h).
plan_header: dict[str, int]  # word of each field of PlanHeader
plan_item_words: int  # of a WorkItem
plan_header_words: int  # of a serialized plan's header, the deferred combines' behind it included
plan_deferred_words: int  # of a deferred combine
item_record_words: int
item_prologue_words: int
tile_counters: int  # of the kernels' work queue counters
combine_room: int  # partial results of one query that the CUDA kernels can combine
combine_fan_in: int  # KV splits of a tile up to which its partials are combined in one level
combine_rows: int  # rows that a CTA combines at once
combine_width: int  # partial results of each that it adds in a step

class CudaDevice:
    name: str
    compute_capability: int  # 10 * major + minor
    num_sms: int
    shared_memory_per_block: int  # bytes
    l2_bytes: int

def cuda_devices() -> list[CudaDevice]: ...
def cta_shared_bytes(capability: int) -> int:
    """Bytes of shared memory that a CTA of the GPU kernels takes, in code for a capability (10 * major + minor)."""

def ctas_per_sm(capability: int) -> int:
    """CTAs of a GPU kernel that share an SM, in code for a compute capability."""

def cta_warps(capability: int) -> int:
    """Warps of a CTA of the warp kernel, in code for a compute capability."""

def head_halves(group: int) -> int:
    """Parts of a KV head's query heads with semaphores of their own: 2 of even groups of more than 8 heads, else 1."""

class SerializedPlan:
    words: _Int32  # [words] header and arrays, as csrc/cuda/kernel_params.h describes them
    combine_lists: int  # lists of partial results: semaphores that each virtual KV head needs
    kv_slots: int  # KV slots of all items, with room for growing tails

def most_plan_words(*, queries: int, items: int, partials: int) -> int:
    """Upper bound of `SerializedPlan.words` of plans with these numbers of queries, work items and partial results."""

def most_combine_lists(*, queries: int, partials: int) -> int:
    """Upper bound of `SerializedPlan.combine_lists` of plans with these numbers of queries and partial results."""

def serialize_plan(
    plan: Plan, seq_lens: _Int64, *, growth: int, group: int, kv_heads: int = 1, warp_ctas: int = 0, cta_warps: int = 8
) -> SerializedPlan:
    """The plan as one block of words for the device, and the room that it needs there.

    Args:
        plan: made for the group.
        seq_lens: [num_requests] KV lengths that the plan was made for.
        growth: tokens by which tails may grow before another plan is loaded.
        group: query heads of a KV head.
        kv_heads: KV heads.
        warp_ctas: CTAs of the launch whose warps take work tiles of their own.
        cta_warps: warps of each, 4 to 8.

    Raises:
        OverflowError: more than 2^31 - 1 KV slots.
        ValueError: lengths of another batch or beyond 2^31 - 1, a negative number, no head, or more than 2^16 heads.
    """

class AttentionParams:
    """One attention layer's tensors and options. One object serves all layers of a step: set what differs.

    Addresses are 0 and strides 0 until they are set; scale and v_scale are 1, window_left is -1, logit_cap is 0.
    """

    def __init__(self, *, q_heads: int, kv_heads: int, head_dim: int, dtype: int, kv_dtype: int) -> None: ...
    @property
    def q_heads(self) -> int:
        """Query heads, a multiple of kv_heads."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int:
        """Elements of a head of q, k, v and o."""

    @property
    def dtype(self) -> int:
        """Type of q and o: 0 float32, 1 bfloat16, 2 float16."""

    @property
    def kv_dtype(self) -> int:
        """Type of k and v: as dtype, or 3 float8_e4m3fn."""
    q: int  # address of queries [num_tokens, q_heads, head_dim]; innermost stride 1
    k: int  # address of keys [kv_slots, kv_heads, head_dim]; innermost stride 1
    v: int  # address of values, same shape as k; innermost stride 1
    o: int  # address of outputs, same shape as q; innermost stride 1
    lse: int  # address of float32 [num_tokens, q_heads], natural logarithm of the softmax denominator; 0 for none
    q_token_stride: int
    q_head_stride: int
    k_slot_stride: int
    k_head_stride: int
    v_slot_stride: int
    v_head_stride: int
    o_token_stride: int
    o_head_stride: int
    lse_token_stride: int
    req_to_token: int  # address of int32 [max_requests, max_context], KV slot of a position (CPU executor only)
    req_to_token_stride: int  # of rows
    req_pool_indices: int  # address of int64 [num_requests], row of req_to_token by batch index (CPU executor only)
    seq_lens: int  # address of int64 [num_requests], KV length with the step's own tokens (CPU executor only)
    visible: int  # address of int64 [num_tokens], bit j: sees the position j before its own; 0 for none (CPU only)
    sinks: int  # address of float32 [q_heads], logits that take part in the denominator; 0 for none
    partial_o: int  # address of float32 [partials, q_heads, head_dim], workspace
    partial_lse: int  # address of float32 [partials, q_heads], workspace
    window_left: int  # positions before its own that a query sees; negative for all
    scale: float  # softmax scale times the factor of stored keys
    v_scale: float  # factor of stored values
    logit_cap: float  # scores become logit_cap * tanh(score / logit_cap); 0 for none

class TensorSizes:
    """Sizes of the tensors behind AttentionParams, for the check of indices.

    Args:
        num_tokens: rows of q and o.
        num_requests: entries of req_pool_indices and seq_lens.
        max_requests: rows of req_to_token.
        max_context: columns of req_to_token.
        kv_slots: slots of the KV cache.
    """

    def __init__(
        self, *, num_tokens: int, num_requests: int, max_requests: int, max_context: int, kv_slots: int
    ) -> None: ...

def cpu_isas() -> list[str]:
    """Instruction sets that `run_plan_cpu` has kernels for on this machine, best first."""

def run_plan_cpu(plan: Plan, params: AttentionParams, sizes: TensorSizes, *, threads: int, isa: str) -> None:
    """Runs one layer on the CPU. The caller vouches for addresses, strides and types.

    Args:
        plan: of the batch.
        params: the layer.
        sizes: of its tensors.
        threads: threads to use, at least 1.
        isa: one of `cpu_isas`; empty for the best.

    Raises:
        ValueError: an index of the plan or the tables that leads outside a tensor.
    """

# Only where built_with_cuda:
class StepAddresses:
    """Device buffers of a step. Structs are in csrc/cuda/kernel_params.h; counters begin as 0.

    Args:
        words: int32 [most_plan_words(...)], the serialized plan.
        items: int32 [max(items, LaunchSize.ctas), item_record_words], records of the work items.
        prologues: int32 [num_prologues, item_prologue_words], what the first copies of an item need.
        query_position: int32 [queries], KV position of each query.
        kv_slots: int32 [SerializedPlan.kv_slots], KV slots of all items.
        tile_counters: int32 [tile_counters], work queue counters.
        semaphores: int32 [SerializedPlan.combine_lists, kv_heads * head_halves(group)], partial results that arrived.
        hidden: int64 [queries], KV positions that each query does not see; of trees of drafts.
        num_prologues: items with a prologue.
    """

    def __init__(
        self, *, words: int, items: int, prologues: int, query_position: int, kv_slots: int, tile_counters: int,
        semaphores: int, hidden: int, num_prologues: int
    ) -> None: ...  # fmt: skip

class LaunchSize:
    ctas: int  # CTAs that take tiles of whole CTAs
    few_ctas: int  # of these, CTAs that run where most of the work is in tiles of one warp
    warp_ctas: int  # CTAs whose warps take tiles of their own
    cta_warps: int  # warps of each
    shared_bytes: int  # shared memory of a CTA that takes tiles of whole CTAs
    overlap: bool  # whether the second kernel may begin beside the first: compute capability 9.0 and later

def cuda_code_capability() -> int:
    """Compute capability that the code for the current device was compiled for; RuntimeError if there is none."""

def cuda_launch_size(*, head_dim: int, dtype: int, kv_dtype: int) -> LaunchSize:
    """Launch size on the current device; types as in AttentionParams. Asks the driver: call it once."""

def cuda_draft_tables(
    *, committed: int, mask: int, mask_size: int, rows: int, requests: int, drafts: int, has_committed_columns: bool,
    seq_lens: int, visible: int, stream: int
) -> None:  # fmt: skip
    """Launches the tables of a verify step on a cudaStream_t; parameters as in csrc/cuda/draft_params.h."""

def cuda_prepare(
    step: StepAddresses, *, req_to_token: int, req_to_token_stride: int, req_pool_indices: int, seq_lens: int,
    visible: int, ctas: int, stream: int
) -> None:  # fmt: skip
    """Launches the preparation of a step on a cudaStream_t; tables as in AttentionParams, `ctas` CTAs."""

def cuda_attend(step: StepAddresses, params: AttentionParams, size: LaunchSize, *, trees: bool, stream: int) -> None:
    """Launches one layer on a cudaStream_t. The parameters are copied: the object may change after the call.

    trees: whether the step was prepared with masks of visible positions.
    """

class Forest:
    """Shared-prefix structure of a batch; nodes in depth-first preorder."""

    num_requests: int
    num_nodes: int
    order: _Int32  # [num_requests] batch indices, depth first
    node_parent: _Int32  # [num_nodes] index of the parent node, -1 for none
    node_begin: _Int32  # [num_nodes] first KV position
    node_end: _Int32  # [num_nodes] one past the last KV position
    node_first: _Int32  # [num_nodes] start of the node's requests in order
    node_last: _Int32  # [num_nodes] end of the node's requests in order
    node_request: _Int32  # [num_nodes] batch index of the request whose KV slots stand for all
    tail_begin: _Int32  # [num_requests] by batch index: first KV position of its own
    tail_node: _Int32  # [num_requests] by batch index: deepest node, -1 for none

class RadixMirror:
    """See sgl_prefix_attn.core.forest.RadixMirror."""
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def known(self, node_id: int) -> bool: ...
    def end_of(self, node_id: int) -> int: ...
    def put(self, *, parent_id: int, begin: int, ids: Sequence[int], ends: Sequence[int], leaf: bool) -> None: ...
    def forest(self, last_nodes: _Int64, prefix_lens: _Int64, live: npt.NDArray[np.bool_] | None = None) -> Forest: ...
    def take_stale(self) -> list[tuple[int, int]]: ...
    def clear(self) -> None: ...

class ModelShape:
    """See sgl_prefix_attn.core.planner.ModelShape."""
    def __init__(self, *, q_heads: int, kv_heads: int, head_dim: int, kv_bytes: int, partial_bytes: int) -> None: ...

class DeviceModel:
    """See sgl_prefix_attn.core.planner.DeviceModel. A new one has the defaults of csrc/plan/cost_model.h."""

    workers: int
    bandwidth: float
    flops: float
    item_overhead: float
    reread: float
    tile_rows: Sequence[int]
    narrow_rows: int
    narrow_per_worker: int
    narrow_to_fill: int
    narrow_overhead: float
    narrow_parts: int
    narrow_reread: float
    overlap: float
    wide_rows: int
    wide_flops: float
    lone_speedup: float
    combine_step: float
    combine_rows: int
    combine_width: int
    combine_latency: float
    combine_fan_in: int
    widest_flops: float
    medium_flops: float
    deferred_combine: float
    deferred_combine_step: float
    def __init__(self) -> None: ...

class Plan:
    """What one attention step executes; immutable. Entries are query tokens in packed order. Arrays are int32.

    Attributes:
        num_requests: requests of the batch.
        num_queries: entries.
        num_partials: partials; each holds every query head of one query.
        kv_tokens_packed: KV positions that the items read, once per item.
        kv_tokens_per_request: KV positions that request-wise attention reads.
        kv_tokens_unique: KV positions of the batch, each once.
        mostly_narrow: whether most of the work is in items that take only a part of a worker.
        query_token: [num_queries] row of q and o.
        query_request: [num_queries] batch index.
        query_back: [num_queries] tokens of the request after this one.
        combine_query: [combines] entries with more than one partial result.
        combine_offset: [combines + 1] start of a combine in combine_partial.
        combine_partial: partials in ascending KV position, the order of summation.
        items: [items, 7] work items in queue order. Columns: first entry, number of entries, batch index of the request
            whose KV slots are read, first KV position, one past the last KV position (-1: up to each query's own),
            first partial (-1: writes the output), rows of the tile.
    """

    num_requests: int
    num_queries: int
    num_partials: int
    kv_tokens_packed: int
    kv_tokens_per_request: int
    kv_tokens_unique: int
    mostly_narrow: bool
    query_token: _Int32
    query_request: _Int32
    query_back: _Int32
    combine_query: _Int32
    combine_offset: _Int32
    combine_partial: _Int32
    items: _Int32

class Planner:
    """See sgl_prefix_attn.core.planner.Planner."""

    def __init__(self, shape: ModelShape, device: DeviceModel, max_growth: int) -> None: ...
    def plan(self, forest: Forest, seq_lens: _Int64, query_lens: _Int64 | None = None) -> Plan: ...
    plans_made: int
    plans_reused: int
    plan_seconds: float
    kv_tokens: tuple[int, int, int]  # packed, per request, unique

class BatchIndices:
    """Batch indices by request object, told apart by identity. Keeps the requests alive."""

    def __init__(self, requests: list[Any]) -> None: ...
    def find(self, requests: list[Any]) -> _Int64:
        """Batch index of each request, -1 for those that are not in the batch."""

    def contains_any(self, requests: list[Any]) -> bool: ...

def gather(values: list[Any], indices: _Int64) -> list[Any]:
    """The values at these indices of the list; None for negative indices."""

def grown_by(seq_lens: _Int64, before: _Int64, growth: int) -> bool:
    """Whether each length is the one before plus `growth` tokens; False if they are not as many."""

class PrefixTree:
    """See sgl_prefix_attn.offline.prefix_tree."""

    def __init__(self, tokens: _Int32, offsets: _Int64) -> None: ...
    num_nodes: int
    order: _Int32
    shared: _Int32
    parent: _Int32
    begin: _Int32
    end: _Int32
    first: _Int32
    last: _Int32
    tail_node: _Int32
    def restricted(self, in_tree: npt.NDArray[np.bool_]) -> PrefixTree: ...
    def enlarged_first_level(self) -> _Int32: ...

def common_prefix_lengths(tokens: _Int32, offsets: _Int64, sequence: _Int64) -> _Int32: ...
