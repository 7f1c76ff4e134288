# Types of the native module; documented where Python hands them out (core/).
import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

built_with_cuda: bool
# 32-bit words of the device's structs (csrc/cuda/kernel_params.h).
plan_header_words: int
plan_padding_words: int
plan_item_words: int
item_record_words: int
merge_room: int

class CudaDevice:
    name: str
    compute_capability: int
    multiprocessors: int
    shared_memory_per_block: int
    l2_bytes: int

def cuda_devices() -> list[CudaDevice]: ...
def units_of_group(group: int) -> int: ...
def serialize_plan(
    plan: Plan, seq_lens: _Int64, growth: int, group: int, kv_heads: int = 1, warp_blocks: int = 0
) -> tuple[_Int32, int]: ...

# Only where built_with_cuda:
class StepAddresses:
    def __init__(
        self, words: int, items: int, query_position: int, kv_slots: int, tickets: int, arrivals: int
    ) -> None: ...

def cuda_launch_size(head_dim: int, dtype: int, kv_dtype: int) -> tuple[int, int, int, bool]: ...
def cuda_prepare(
    step: StepAddresses,
    req_to_token: int,
    req_to_token_stride: int,
    req_pool_indices: int,
    seq_lens: int,
    blocks: int,
    stream: int,
) -> None: ...
def cuda_attend(step: StepAddresses, *arguments: float | tuple[int, int, int, bool]) -> None: ...

class Forest:
    num_requests: int
    num_nodes: int
    order: _Int32
    node_parent: _Int32
    node_begin: _Int32
    node_end: _Int32
    node_first: _Int32
    node_last: _Int32
    node_request: _Int32
    tail_begin: _Int32
    tail_node: _Int32

class RadixMirror:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def known(self, node_id: int) -> bool: ...
    def put(self, node_id: int, parent_id: int, begin: int, end: int) -> None: ...
    def split_suspects(self, parent_id: int, begin: int, end: int) -> list[int]: ...
    def clear(self) -> None: ...
    def forest(self, last_nodes: _Int64, prefix_lens: _Int64, live: npt.NDArray[np.bool_] | None = None) -> Forest: ...

class ModelShape:
    def __init__(self, q_heads: int, kv_heads: int, head_dim: int, kv_bytes: int, partial_bytes: int) -> None: ...

class DeviceModel:
    def __init__(
        self,
        workers: int,
        bandwidth: float,
        flops: float,
        item_overhead: float,
        reread: float,
        tile_rows: tuple[int, ...],
        narrow_rows: int = 0,
        narrow_per_worker: int = 1,
        narrow_to_fill: int = 1,
        narrow_overhead: float = 0.0,
        narrow_units: int = 1,
        narrow_reread: float = 1.0,
        overlap: float = 1.0,
        wide_rows: int = 0,
        wide_flops: float = 1.0,
        fill_share: float = 1.0,
        merge_step: float = 0.0,
        merge_rows: int = 1,
        merge_width: int = 1,
    ) -> None: ...

class Plan:
    num_requests: int
    num_queries: int
    num_slots: int
    kv_tokens_packed: int
    kv_tokens_per_request: int
    kv_tokens_unique: int
    narrow_prevails: bool
    query_token: _Int32
    query_request: _Int32
    query_back: _Int32
    merge_query: _Int32
    merge_offset: _Int32
    merge_slot: _Int32
    items: _Int32

class Machine:
    slots: int
    few_slots: int
    warps: int
    narrow_rows: int
    narrow_units: int
    bandwidth: float
    begin: float
    warp_begin: float
    block_start: float
    block_end: float
    warp_start: float
    warp_end: float
    block_rate: float
    warp_rate: float
    flops32: float
    flops64: float
    flops128: float
    lone_speedup: float
    warp_flops: float
    sibling: float
    block_merge: float
    warp_merge: float
    block_merge_step: float
    warp_merge_step: float
    def __init__(self) -> None: ...

def simulate_makespan(
    plan: Plan, seq_lens: _Int64, shape: ModelShape, machine: Machine
) -> tuple[float, float, float]: ...

class Planner:
    def __init__(self, shape: ModelShape, device: DeviceModel, max_growth: int) -> None: ...
    def plan(self, forest: Forest, seq_lens: _Int64, query_lens: _Int64 | None = None) -> Plan: ...
    plans_made: int
    plans_reused: int
    plan_seconds: float
    kv_tokens: tuple[int, int, int]

def grown_by(seq_lens: _Int64, before: _Int64, growth: int) -> bool: ...
def packing_costs(
    forest: Forest,
    seq_lens: _Int64,
    query_lens: _Int64 | None,
    shape: ModelShape,
    device: DeviceModel,
    exhaustive: bool,
) -> tuple[float, float, float]: ...

class PrefixTree:
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
def cpu_isas() -> list[str]: ...
def run_plan_cpu(plan: Plan, *addresses_strides_and_options: float | str) -> None: ...
