"""The GPU kernels in Triton: what csrc/cuda does, for GPUs and builds that have no nvcc. Same plan words, same slots.

Launched by `core.triton_step`, which documents the arguments. Triton decides when this module is imported whether its
kernels are compiled or interpreted (TRITON_INTERPRET=1).
"""
# Triton infers the types of kernel arguments at launch.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from sgl_prefix_attn import _native
from sgl_prefix_attn.core import planner

_HEADER = {field: tl.constexpr(word) for field, word in _native.plan_header.items()}
_NUM_ITEMS, _NUM_QUERIES, _NUM_COMBINES = _HEADER["num_items"], _HEADER["num_queries"], _HEADER["num_combines"]
_ITEMS_AT, _ITEM_SLOTS_AT = _HEADER["items_at"], _HEADER["item_kv_slots_at"]
_QUERY_TOKEN_AT, _QUERY_REQUEST_AT = _HEADER["query_token_at"], _HEADER["query_request_at"]
_QUERY_BACK_AT, _COMBINE_QUERY_AT = _HEADER["query_back_at"], _HEADER["combine_query_at"]
_COMBINE_OFFSET_AT, _COMBINE_PARTIAL_AT = _HEADER["combine_offset_at"], _HEADER["combine_partial_at"]
# WorkItem of csrc/plan/plan.h.
_ITEM_WORDS = tl.constexpr(_native.plan_item_words)
_QUERY_BEGIN, _QUERY_COUNT = tl.constexpr(planner.QUERY_BEGIN), tl.constexpr(planner.QUERY_COUNT)
_REQUEST, _PARTIAL_BEGIN = tl.constexpr(planner.REQUEST), tl.constexpr(planner.PARTIAL_BEGIN)
_KV_BEGIN, _KV_END = tl.constexpr(planner.KV_BEGIN), tl.constexpr(planner.KV_END)
_OPEN_END, _WRITE_THROUGH = tl.constexpr(planner.OPEN_END), tl.constexpr(planner.WRITE_THROUGH)
# Record of an item at the lengths of the step. Adjacent fields shorten the chain of dependent loads.
RECORD_WORDS = 8
_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_QUERIES_FROM, _QUERIES, _KEYS_FROM, _KEYS_TO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LOWEST_POSITION, _PARTIALS_AT, _SLOTS_AT = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_FURTHEST = tl.constexpr(2**31 - 1)
_SMALL_ROWS = tl.constexpr(16)
_COMBINED_AT_ONCE = tl.constexpr(16)


@triton.jit
def _position_of(words, seq_lens, query, valid):
    request = tl.load(words + tl.load(words + _QUERY_REQUEST_AT) + query, mask=valid, other=0)
    back = tl.load(words + tl.load(words + _QUERY_BACK_AT) + query, mask=valid, other=0)
    return tl.load(seq_lens + request, mask=valid, other=1).to(tl.int32) - 1 - back


@triton.jit
def prepare_step(
    words,
    records,
    query_position,
    kv_slots,
    req_to_token,
    req_to_token_stride,
    req_pool_indices,
    seq_lens,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Once per step: positions of the queries, records and KV slots of the items."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, BLOCK)
    num_queries = tl.load(words + _NUM_QUERIES)
    for begin in range(program * BLOCK, num_queries, programs * BLOCK):
        query = begin + lanes
        valid = query < num_queries
        tl.store(query_position + query, _position_of(words, seq_lens, query, valid), mask=valid)

    for item in range(program, tl.load(words + _NUM_ITEMS), programs):
        item_words = words + tl.load(words + _ITEMS_AT) + item * _ITEM_WORDS
        first = tl.load(item_words + _QUERY_BEGIN)
        past = first + tl.load(item_words + _QUERY_COUNT)
        lowest = past * 0 + _FURTHEST
        for begin in range(first, past, BLOCK):
            valid = begin + lanes < past
            position = _position_of(words, seq_lens, begin + lanes, valid)
            lowest = tl.minimum(lowest, tl.min(tl.where(valid, position, _FURTHEST), axis=0))
        kv_begin = tl.load(item_words + _KV_BEGIN)
        kv_end = tl.load(item_words + _KV_END)
        # A step that was planned by bounds of its lengths may end before some of its splits do, or begin.
        reached = _position_of(words, seq_lens, past - 1, past > first) + 1
        kv_end = tl.maximum(tl.where(kv_end == _OPEN_END, reached, tl.minimum(kv_end, reached)), kv_begin)
        slots_at = tl.load(words + tl.load(words + _ITEM_SLOTS_AT) + item)
        record = records + item * _RECORD_WORDS
        tl.store(record + _QUERIES_FROM, first)
        tl.store(record + _QUERIES, past - first)
        tl.store(record + _KEYS_FROM, kv_begin)
        tl.store(record + _KEYS_TO, kv_end)
        tl.store(record + _LOWEST_POSITION, lowest)
        tl.store(record + _PARTIALS_AT, tl.load(item_words + _PARTIAL_BEGIN))
        tl.store(record + _SLOTS_AT, slots_at)

        row = tl.load(req_pool_indices + tl.load(item_words + _REQUEST)).to(tl.int64)
        source = req_to_token + row * req_to_token_stride
        target = kv_slots + slots_at - kv_begin
        for begin in range(kv_begin, kv_end, BLOCK):
            position = begin + lanes
            valid = position < kv_end
            tl.store(target + position, tl.load(source + position, mask=valid), mask=valid)


@triton.jit
def _safe_max(maximum):
    # Subtracting 0 instead of -inf gives rows without a visible key 2^-inf = 0 instead of NaN.
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _reciprocal(total):
    # Rows without a visible key have an output of zeros, which any factor leaves at zero.
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _as_product(stored, PRODUCT: tl.constexpr):  # noqa: N803
    # The bits of an e4m3 number, shifted into fp16, mean 2^-8 times its value, for subnormals too. NaN needs a case of
    # its own. The caller multiplies the scales by 2^8.
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        magnitude = bits & 0x7F
        magnitude = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)
        return (magnitude | ((bits & 0x80) << 8)).to(tl.uint16).to(tl.float16, bitcast=True).to(PRODUCT)
    else:
        return stored.to(PRODUCT)


@triton.jit
def _attend_rows(
    record,
    kv_slots,
    query_token,
    query_position,
    first_row,
    num_rows,
    kv_head,
    q,
    q_token_stride,
    q_head_stride,
    k,
    k_slot_stride,
    k_head_stride,
    v,
    v_slot_stride,
    v_head_stride,
    o,
    o_token_stride,
    o_head_stride,
    lse,
    lse_token_stride,
    sinks,
    partial_o,
    partial_lse,
    kv_heads,
    group,
    scale,
    v_scale,
    logit_cap,
    window_left,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    PRODUCT: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """ROWS rows (query, head of the group) of an item, from `first_row` on, against its KV range.

    Products are taken in type PRODUCT, sums in fp32.
    """
    kv_begin, kv_end = tl.load(record + _KEYS_FROM), tl.load(record + _KEYS_TO)
    partial_begin = tl.load(record + _PARTIALS_AT)
    item_slots = kv_slots + tl.load(record + _SLOTS_AT)

    row = first_row + tl.arange(0, ROWS)
    valid = row < num_rows
    query = tl.load(record + _QUERIES_FROM) + row // group
    head = kv_head * group + row % group
    token = tl.load(query_token + query, mask=valid, other=0).to(tl.int64)
    position = tl.load(query_position + query, mask=valid, other=0)
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < HEAD_DIM
    queries = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    ).to(PRODUCT)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    past_key = tl.minimum(position + 1, kv_end)
    first_key = kv_begin
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, tl.load(record + _LOWEST_POSITION) - window_left)
    wide_head = kv_head.to(tl.int64)  # pools of separate heads have strides of gigabytes
    key_head = k + wide_head * k_head_stride + dim[None, :]
    value_head = v + wide_head * v_head_stride + dim[None, :]
    to_base_2 = scale * _LOG2E
    for begin in range(first_key, kv_end, KEYS):
        key = begin + tl.arange(0, KEYS)
        present = key < kv_end
        slot = tl.load(item_slots + (key - kv_begin), mask=present, other=0).to(tl.int64)
        loaded = present[:, None]
        if HEAD_DIM < PADDED_DIM:
            loaded = loaded & in_head[None, :]
        keys = tl.load(key_head + slot[:, None] * k_slot_stride, mask=loaded, other=0)
        scores = tl.dot(queries, tl.trans(_as_product(keys, PRODUCT)), input_precision=PRECISION)
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1)
            twice = tl.exp2(scores * (2.0 * to_base_2 / logit_cap))
            scores = logit_cap * _LOG2E * (1.0 - 2.0 / (twice + 1.0))
        else:
            scores = scores * to_base_2
        visible = key[None, :] < past_key[:, None]
        if HAS_WINDOW:
            visible = visible & (key[None, :] >= (position - window_left)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        base = _safe_max(new_maximum)
        rescale = tl.exp2(maximum - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        values = tl.load(value_head + slot[:, None] * v_slot_stride, mask=loaded, other=0)
        values = _as_product(values, PRODUCT)
        output = tl.dot(weights.to(PRODUCT), values, output * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum

    if partial_begin == _WRITE_THROUGH:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0.0) * _LOG2E
            with_sink = tl.maximum(maximum, sink)
            base = _safe_max(with_sink)
            rescale = tl.exp2(maximum - base)
            total = total * rescale + tl.exp2(sink - base)
            output = output * rescale[:, None]
            maximum = with_sink
        result = output * (_reciprocal(total) * v_scale)[:, None]
        target = o + token[:, None] * o_token_stride + head[:, None] * o_head_stride + dim[None, :]
        tl.store(target, result.to(o.dtype.element_ty), mask=valid[:, None] & in_head[None, :])
        if lse is not None:
            # log2(0) is -inf.
            tl.store(lse + token * lse_token_stride + head, (_safe_max(maximum) + tl.log2(total)) * _LN2, mask=valid)
    else:
        result = output * (_reciprocal(total) * v_scale)[:, None]
        partial = (partial_begin + row // group).to(tl.int64) * (kv_heads * group) + head
        tl.store(partial_o + partial[:, None] * HEAD_DIM + dim[None, :], result, mask=valid[:, None] & in_head[None, :])
        tl.store(partial_lse + partial, (_safe_max(maximum) + tl.log2(total)) * _LN2, mask=valid)


# Specializing these arguments makes no kernel faster and would compile one for each value.
@triton.jit(do_not_specialize=["lse_token_stride", "kv_heads", "group", "scale", "v_scale", "logit_cap", "window_left"])
def attend_packed(
    words,
    records,
    query_position,
    kv_slots,
    tile_counter,
    q,
    q_token_stride,
    q_head_stride,
    k,
    k_slot_stride,
    k_head_stride,
    v,
    v_slot_stride,
    v_head_stride,
    o,
    o_token_stride,
    o_head_stride,
    lse,
    lse_token_stride,
    sinks,
    partial_o,
    partial_lse,
    kv_heads,
    group,
    scale,
    v_scale,
    logit_cap,
    window_left,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    WIDE_ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    PRODUCT: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Persistent scheduler: programs take work tiles (item, KV head) until none is left.

    The assignment of tiles to programs changes no bit of the result.
    """
    num_tiles = tl.load(words + _NUM_ITEMS) * kv_heads
    query_token = words + tl.load(words + _QUERY_TOKEN_AT)
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    while tile < num_tiles:
        record = records + tile // kv_heads * _RECORD_WORDS
        kv_head = tile % kv_heads
        num_rows = tl.load(record + _QUERIES) * group
        if num_rows <= _SMALL_ROWS:
            _attend_rows(
                record, kv_slots, query_token, query_position, 0, num_rows, kv_head,
                q, q_token_stride, q_head_stride, k, k_slot_stride, k_head_stride, v, v_slot_stride, v_head_stride,
                o, o_token_stride, o_head_stride, lse, lse_token_stride, sinks, partial_o, partial_lse,
                kv_heads, group, scale, v_scale, logit_cap, window_left,
                HEAD_DIM, PADDED_DIM, _SMALL_ROWS, KEYS, HAS_CAP, HAS_WINDOW, PRODUCT, PRECISION,
            )  # fmt: skip
        else:
            # Items of plans for wider row tiles take several passes.
            for first_row in range(0, num_rows, WIDE_ROWS):
                _attend_rows(
                    record, kv_slots, query_token, query_position, first_row, num_rows, kv_head,
                    q, q_token_stride, q_head_stride, k, k_slot_stride, k_head_stride, v, v_slot_stride, v_head_stride,
                    o, o_token_stride, o_head_stride, lse, lse_token_stride, sinks, partial_o, partial_lse,
                    kv_heads, group, scale, v_scale, logit_cap, window_left,
                    HEAD_DIM, PADDED_DIM, WIDE_ROWS, KEYS, HAS_CAP, HAS_WINDOW, PRODUCT, PRECISION,
                )  # fmt: skip
        # Every tile adds one to the counter. The last one resets it for the next launch, as graph replays need.
        taken = tl.atomic_add(tile_counter, 1, sem="relaxed")
        if taken == num_tiles - 1:
            tl.store(tile_counter, 0)
        tile = programs + taken


@triton.jit(do_not_specialize=["lse_token_stride", "q_heads"])
def combine_partials(
    words,
    partial_o,
    partial_lse,
    o,
    o_token_stride,
    o_head_stride,
    lse,
    lse_token_stride,
    sinks,
    q_heads,
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
):
    """Combines the partials of queries that have several, in ascending KV order, HEADS heads at a time."""
    head_blocks = tl.cdiv(q_heads, HEADS)
    dim = tl.arange(0, PADDED_DIM)
    offsets = words + tl.load(words + _COMBINE_OFFSET_AT)
    slots = words + tl.load(words + _COMBINE_PARTIAL_AT)
    for block in range(tl.program_id(0), tl.load(words + _NUM_COMBINES) * head_blocks, tl.num_programs(0)):
        combine = block // head_blocks
        head = block % head_blocks * HEADS + tl.arange(0, HEADS)
        valid = head < q_heads
        stored = valid[:, None] & (dim < HEAD_DIM)[None, :]
        query = tl.load(words + tl.load(words + _COMBINE_QUERY_AT) + combine)
        token = tl.load(words + tl.load(words + _QUERY_TOKEN_AT) + query).to(tl.int64)
        first, past = tl.load(offsets + combine), tl.load(offsets + combine + 1)
        maximum = tl.full([HEADS], float("-inf"), tl.float32)
        for begin in range(first, past, _COMBINED_AT_ONCE):
            i = begin + tl.arange(0, _COMBINED_AT_ONCE)
            slot = tl.load(slots + i, mask=i < past, other=0).to(tl.int64)
            theirs = tl.load(
                partial_lse + slot[:, None] * q_heads + head[None, :],
                mask=(i < past)[:, None] & valid[None, :],
                other=float("-inf"),
            )
            maximum = tl.maximum(maximum, tl.max(theirs, axis=0))
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0.0)
            maximum = tl.maximum(maximum, sink)
        base = _safe_max(maximum)
        total = tl.zeros([HEADS], tl.float32)
        output = tl.zeros([HEADS, PADDED_DIM], tl.float32)
        # Unrolling overlaps the loads of several partials and keeps the order of the sum.
        for i in tl.range(first, past, loop_unroll_factor=4):
            partial = tl.load(slots + i).to(tl.int64) * q_heads + head
            theirs = tl.load(partial_lse + partial, mask=valid, other=float("-inf"))
            weight = tl.exp2((theirs - base) * _LOG2E)
            total += weight
            output += weight[:, None] * tl.load(
                partial_o + partial[:, None] * HEAD_DIM + dim[None, :], mask=stored, other=0.0
            )
        if sinks is not None:
            total += tl.exp2((sink - base) * _LOG2E)
        result = output * _reciprocal(total)[:, None]
        target = o + token * o_token_stride + head[:, None] * o_head_stride + dim[None, :]
        tl.store(target, result.to(o.dtype.element_ty), mask=stored)
        if lse is not None:
            tl.store(lse + token * lse_token_stride + head, base + tl.log2(total) * _LN2, mask=valid)
