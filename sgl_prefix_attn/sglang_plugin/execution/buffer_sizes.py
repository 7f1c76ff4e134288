"""How large the device buffers of packed steps are: how much GPU memory the plug-in takes.

A plan that is too large for them is no error. `StepBuffers.load` raises `PlanTooLarge`, `plan_too_large` counts it, and
the step runs on the stock backend. Steps in graphs without a fallback get a plan that always fits, see `step_limits`.
So constants that were chosen, not measured, cost packed steps at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.core.step_buffers import StepLimits

# Largest decode batch where no graph says how large batches get. Larger ones run on the stock backend. Chosen.
BATCH_WITHOUT_GRAPHS = 512
# Work items: of each query, and of any step beside these. A query is in one for each pack and each KV split of it.
# Chosen large, because an item is a record of some words.
ITEMS_PER_QUERY = 4
ITEMS_OF_SPLITS = 8192
# Partial results of a decode step: a query has one for each pack that it is in and for each KV split of these. Trees
# are rarely deep. Chosen.
PARTIALS_PER_TOKEN = 6
# Likewise of a verify step, of each of its tokens. Fewer, as there are more tokens: each takes the memory of all its
# partials. Chosen.
PARTIALS_PER_DRAFT = 4
# And of any step: only small batches need many splits. Chosen.
PARTIALS_OF_SPLITS = 4096
# Where prefill runs packed, a shared prefix gives a new token a second partial.
PARTIALS_PER_PREFILL_TOKEN = 2
# In a mixed step that is judged by what sharing saves, one new token of this many has one.
TOKENS_PER_MIXED_PARTIAL = 2
# Partials a new token: a chunk of few heads makes few work tiles, which are split. One of 900 plans of drawn batches
# may not fit (docs/design-notes/simulator.md, "Plans fit the buffers").
PARTIALS_PER_SPLIT_TOKEN = 8
# Rows (query token, head) of a prefill chunk from which on it has work tiles enough, and its KV is hardly split. By
# the same batches: 8,192 tokens of 32 heads were not, and those of 8 and 16 heads were.
UNSPLIT_ROWS = 32 * 8192


@dataclass(frozen=True)
class LargestSteps:
    """How large the steps of a server get.

    Attributes:
        rows: requests that run at a time, with graphs or without.
        context: most tokens of a request.
        growth: tokens by which tails may grow under one plan.
        drafts: tokens of a request in a verify step; 1 in decode steps.
        graph_batch: requests of the largest graph; 0 without graphs.
        graph_tokens: its tokens.
        new_tokens: of the largest prefill or mixed step that may run packed; 0 if none does.
        packs_prefill: whether these run packed whatever they share.
    """

    rows: int
    context: int
    growth: int
    drafts: int = 1
    graph_batch: int = 0
    graph_tokens: int = 0
    new_tokens: int = 0
    packs_prefill: bool = False


def step_limits(steps: LargestSteps, shape: ModelShape, widest: int) -> StepLimits:
    """Capacity of the buffers of one attention shape, for tiles of at most `widest` rows.

    A graph has no fallback, so a plan without KV splits of the largest graph must always fit. It has no partial
    results, as many work tiles a request as its rows fill, and for each at most the whole context as KV slots. Lengths
    of a verify step may be bounds, which exceed the context by the drafts of two steps at most.
    """
    batch = steps.graph_batch or min(steps.rows, BATCH_WITHOUT_GRAPHS)
    tokens = steps.graph_tokens or batch * steps.drafts
    tiles = -(-steps.drafts // max(1, widest // shape.group))
    longest = steps.context + (2 * steps.drafts if steps.drafts > 1 else 0)
    # More requests than the largest graph has run without a graph.
    queries = max(tokens, steps.rows * steps.drafts) + steps.new_tokens
    per_token = PARTIALS_PER_TOKEN if steps.drafts == 1 else PARTIALS_PER_DRAFT
    return StepLimits(
        queries=queries,
        items=ITEMS_PER_QUERY * queries + ITEMS_OF_SPLITS,
        kv_slots=tiles * batch * (longest + steps.growth),
        partials=per_token * tokens + PARTIALS_OF_SPLITS + _partials_of_prefill(steps, shape),
    )


def _partials_of_prefill(steps: LargestSteps, shape: ModelShape) -> int:
    new = steps.new_tokens
    partials = PARTIALS_PER_PREFILL_TOKEN * new if steps.packs_prefill else new // TOKENS_PER_MIXED_PARTIAL
    if new * shape.q_heads >= UNSPLIT_ROWS:
        return partials
    # The fewer heads there are, the less memory a partial takes.
    return max(partials, min(PARTIALS_PER_SPLIT_TOKEN * new, UNSPLIT_ROWS // shape.q_heads))
