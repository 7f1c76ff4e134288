"""Makes the forest of the scheduler's batch: the host work of every step.

While the requests of a decode batch and their radix nodes stay the same, a step costs a few comparisons of lists. It
returns the same object, so the planner reuses its plan. Otherwise only requests that changed are looked up.
This reads only request and tree state, so all tensor-parallel ranks decide alike.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from itertools import compress
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from sgl_prefix_attn._native import BatchIndices, gather
from sgl_prefix_attn.core.forest import Int64Array, PrefixForest, int64_array
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.prefix.tree_mirror import Known, TreeMirror
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import reader_for
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason, Refused

logger = logging.getLogger(__name__)

Mode = Literal["decode", "extend", "mixed", "verify"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# Modes with the same new tokens for each request, whose steps may be routed and run in decode graphs.
DECODE_MODES: Final[tuple[Mode, ...]] = ("decode", "verify")


@dataclass(frozen=True)
class StepPaths:
    """What the requests of one step share.

    Attributes:
        mode: kind of the step. mixed: some requests prefill, the others decode. verify: the target model checks the
            draft tokens of speculative decoding; each request has the same number of them, the last accepted token
            included.
        query_lens: [num_requests] int64 new tokens by batch index; None: one each (decode).
    """

    forest: PrefixForest
    mode: Mode
    num_requests: int
    query_lens: Int64Array | None = None


# While the members of a decode batch stay the same, two things can change.
# A request's node changes when its prefill's result is processed; with overlap that is one step after its first decode
# step was launched. So requests that joined are scanned for _JOIN_STEPS. If another request's node changes, the known
# one stays true and only lacks some sharing: all others are scanned in turn, within _TURN_STEPS.
# A finished request may have lost its KV. The scheduler drops it before the next step. If it does not, that matters at
# once only for requests whose KV slots stand for others: they are scanned every step, all others in turn.
_JOIN_STEPS = 4
_TURN_STEPS = 32


@dataclass
class _DecodeState:
    """The last decode batch of a microbatch, as far as its forest depends on it.

    Attributes:
        drafts: draft tokens of each request in a verify batch; None in a decode batch.
        indices: batch index by request.
        finished: each request's finish reason; None if no request has one.
        handles: each request's `last_node`, from which `nodes` were found.
        nodes: [num_requests] int64 node of each request in the mirror.
        content: of the mirror that has these nodes.
        forest: of the batch.
        joined: requests that joined or moved lately, with the number of steps for which to scan them.
        turn: batch index of the next request to scan in turn.
        age: steps since the forest was made.
        changed: requests in whose scan `moved` has found another node.
        prefilled: requests of the batch that were prefilled since the forest was made: retracted ones that came back.
        step: what `BatchTracker.step` returns for the batch while nothing changes.
        representatives: live requests whose KV slots stand for others.
        joined_handles: `last_node` of each of `joined` when the forest was made.
        joined_steps: steps for which some of `joined` is scanned.
    """

    requests: list[Any]
    drafts: int | None
    indices: BatchIndices
    handles: list[Any]
    finished: list[Any] | None
    nodes: Int64Array
    content: int
    forest: InitVar[PrefixForest]
    joined: dict[Any, int]
    turn: int = 0
    age: int = 0
    changed: list[Any] = field(default_factory=list)
    prefilled: dict[Any, None] = field(default_factory=dict)  # a set in order: ranks look up alike
    step: StepPaths = field(init=False)
    representatives: list[Any] = field(init=False)
    joined_handles: list[Any] = field(init=False)
    joined_steps: int = field(init=False)

    def __post_init__(self, forest: PrefixForest) -> None:
        count = len(self.requests)
        if self.drafts is None:
            self.step = StepPaths(forest, "decode", count)
        else:
            self.step = StepPaths(forest, "verify", count, np.full(count, self.drafts, dtype=np.int64))
        self.representatives = [self.requests[index] for index in set(forest.node_request.tolist())]
        self.joined_handles = list(map(_LAST_NODE, self.joined))
        self.joined_steps = max(self.joined.values(), default=0)

    def moved(self) -> bool:
        """Whether a scanned request has another node or has finished."""
        if self.finished is None and any(map(_FINISHED, self.representatives)):
            return True
        begin, end, self.turn = _turn(self.turn, len(self.requests))
        due = self.requests[begin:end]
        if list(map(_LAST_NODE, due)) != self.handles[begin:end]:
            self.changed = due
            return True
        finished = list(map(_FINISHED, due))
        if any(finished) if self.finished is None else finished != self.finished[begin:end]:
            return True
        self.age += 1
        if self.age <= self.joined_steps and list(map(_LAST_NODE, self.joined)) != self.joined_handles:
            self.changed = list(self.joined)
            return True
        return False


def _turn(begin: int, count: int) -> tuple[int, int, int]:
    """Batch indices [begin, end) to scan now, and the begin of the next turn."""
    begin = begin if begin < count else 0
    end = begin + count // _TURN_STEPS + 1
    return begin, end, end if end < count else 0


_LAST_NODE = operator.attrgetter("last_node")
_FINISHED = operator.attrgetter("finished_reason")


class BatchTracker:
    """Makes the `StepPaths` of schedule batches, or returns the reason why there are none.

    Args:
        microbatches: decode batches that the scheduler runs in turn: several in pipeline parallelism.

    Attributes:
        why_stock: why no step of a kind runs packed, None if some may. Paths for such kinds are not read.
        refuses_drafts: whether no step of a server with speculative decoding runs packed; such batches are not read.
        runs_as_decode: whether a prefill or mixed batch runs as a decode step (`one_token`).
    """

    def __init__(self, microbatches: int = 1) -> None:
        self.why_stock: Callable[[Mode], Reason | None] = _may_be_packed
        self.refuses_drafts = False
        self.runs_as_decode: Callable[[Any], bool] = _stays_prefill
        self._tree: Any = None
        self._mirror: TreeMirror | None = None
        self._no_mirror = fallback_reasons.UNKNOWN_TREE
        self._microbatches = microbatches
        self._states: list[_DecodeState] = []  # of one microbatch each, in the order of their last steps

    @property
    def restarts(self) -> int:
        """Times that the present tree was read from scratch because it contradicted the mirror."""
        return 0 if self._mirror is None else self._mirror.restarts

    def step(self, batch: Any) -> StepPaths | Reason:
        """Paths of the batch that is about to run, or why there are none.

        Args:
            batch: SGLang's ScheduleBatch, when its ForwardBatch is made.
        """
        mode = batch.forward_mode
        decode, drafts = mode.is_decode(), None
        if decode and (steady := self._steady(batch, None)) is not None:
            return steady
        if mode.is_idle():
            return fallback_reasons.IDLE
        if batch.spec_algorithm is not None and not batch.spec_algorithm.is_none():
            if self.refuses_drafts:
                return fallback_reasons.SPECULATIVE
            if mode.is_target_verify():
                decode, drafts = True, batch.spec_info.draft_token_num
                if (steady := self._steady(batch, drafts)) is not None:
                    return steady
            elif mode.name != "EXTEND":
                return fallback_reasons.SPECULATIVE
        if not decode and mode.name not in ("EXTEND", "MIXED"):
            return fallback_reasons.MODE
        if len(batch.seq_lens) != len(batch.reqs):
            return fallback_reasons.BEAM_ROWS
        if batch.encoder_lens is not None:
            return fallback_reasons.ENCODER_DECODER
        if batch.tree_cache is not self._tree:
            self._use_tree(batch.tree_cache)
        if self._mirror is None:
            return self._no_mirror
        return self._decode_step(batch, self._mirror, drafts) if decode else self._extend_step(batch, self._mirror)

    def forget(self) -> None:
        """Forgets all batches and nodes: the next step reads its paths from scratch."""
        self._tree = None

    def _use_tree(self, tree: Any) -> None:
        reader = reader_for(tree)
        self._tree = tree
        self._states.clear()
        if isinstance(reader, Refused):
            self._mirror, self._no_mirror = None, reader.reason
            logger.warning("prefixpack: cannot see which requests share a prefix: %s", reader.detail)
        else:
            self._mirror = TreeMirror(reader)
            logger.info("prefixpack: reads %s through %s", type(tree).__name__, reader.name)

    def _state_of(self, requests: list[Any]) -> _DecodeState | None:
        """What is known of the microbatch of a decode or verify batch.

        The oldest request tells: a microbatch keeps its requests, and new ones join at the end. If all are new, it is
        the one whose last step is the longest ago, or none.
        """
        states = self._states
        if self._microbatches > 1:
            for state in states:
                if state.indices.contains_any(requests[:1]):
                    return state
        return states[0] if len(states) == self._microbatches else None

    def _steady(self, batch: Any, drafts: int | None) -> StepPaths | None:
        """The step of a decode or verify batch that still has the forest of the last one."""
        if batch.tree_cache is not self._tree:
            return None
        requests = batch.reqs
        last = self._state_of(requests)
        if (
            last is None
            or requests != last.requests
            or drafts != last.drafts
            or len(batch.seq_lens) != len(requests)
            or last.prefilled
            or last.moved()
        ):
            return None
        if self._microbatches > 1:
            self._keep(last, last)
        return last.step

    def _keep(self, state: _DecodeState, last: _DecodeState | None) -> None:
        """Keeps a microbatch's state in place of its last one."""
        self._forget(last)
        self._states.append(state)

    def _forget(self, last: _DecodeState | None) -> None:
        self._states = [state for state in self._states if state is not last]

    def _decode_step(self, batch: Any, mirror: TreeMirror, drafts: int | None = None) -> StepPaths | Reason:
        requests = list(batch.reqs)
        last = self._state_of(requests)
        reason = self.why_stock("decode" if drafts is None else "verify")
        if reason is not None:
            self._forget(last)
            return reason
        if batch.seq_lens_cpu is not None:
            prefix_lens = batch.seq_lens_cpu.numpy().astype(np.int64)
        elif drafts is not None and versions.keeps_committed_lens():
            prefix_lens = versions.committed_lens(requests)
        else:
            return fallback_reasons.NO_HOST_LENGTHS
        if drafts is None:
            prefix_lens -= 1  # lengths of a verify batch have none of the step's tokens
        state = None if last is None else _continued(last, requests, drafts, prefix_lens, mirror)
        if state is None:
            state = _from_scratch(last, requests, drafts, prefix_lens, mirror)
        self._keep(state, last)
        return state.step

    def _extend_step(self, batch: Any, mirror: TreeMirror) -> StepPaths | Reason:
        if not isinstance(batch.prefix_lens, list) or not isinstance(batch.extend_lens, list):
            return fallback_reasons.NO_HOST_LENGTHS
        requests = batch.reqs
        # With DP attention SGLang runs a decode batch as extend: decoding_reqs names the requests that decode.
        num_decode = len(batch.decoding_reqs or ())
        as_decode = self.runs_as_decode(batch)
        mode: Mode = "decode" if as_decode else "mixed" if num_decode else "extend"
        # A mixed step changes no node of the requests that decode.
        prefilled = requests[: len(requests) - num_decode]
        for state in self._states:
            state.prefilled.update(dict.fromkeys(compress(prefilled, state.indices.find(prefilled) >= 0)))
        if as_decode and num_decode:  # the next decode batch has the same requests
            return self._decode_step(batch, mirror)
        reason = self.why_stock(mode)
        if reason is not None:
            return reason
        forest, _ = mirror.forest(
            list(map(_LAST_NODE, requests)),
            int64_array(batch.prefix_lens),
            _live(_finished(requests)),
        )
        if as_decode:
            return StepPaths(forest, mode, len(requests))
        return StepPaths(forest, mode, len(requests), int64_array(batch.extend_lens))


def _from_scratch(
    last: _DecodeState | None, requests: list[Any], drafts: int | None, prefix_lens: Int64Array, mirror: TreeMirror
) -> _DecodeState:
    """The state of a batch, with all requests looked up."""
    handles = list(map(_LAST_NODE, requests))
    finished = _finished(requests)
    forest, nodes = mirror.forest(handles, prefix_lens, _live(finished))
    if last is None:
        joined = dict.fromkeys(requests, _JOIN_STEPS)
    else:
        lately = _lately(last)
        joined = {
            request: lately.get(request, _JOIN_STEPS)
            for request, before in zip(requests, last.indices.find(requests).tolist(), strict=True)
            if before < 0 or request in lately
        }
    return _DecodeState(
        requests=requests,
        drafts=drafts,
        indices=BatchIndices(requests),
        handles=handles,
        finished=finished,
        nodes=nodes,
        content=mirror.content,
        forest=forest,
        joined=joined,
    )


def _continued(
    last: _DecodeState, requests: list[Any], drafts: int | None, prefix_lens: Int64Array, mirror: TreeMirror
) -> _DecodeState | None:
    """The state of a batch with most requests of the last one: only the others are looked up.

    None if a request has finished, the mirror has forgotten its nodes, or too many requests are new.
    """
    mirror.follow_root()
    if last.finished is not None or last.content != mirror.content:
        return None
    before = last.indices.find(requests)
    indices = BatchIndices(requests)
    joined = {requests[index]: _JOIN_STEPS for index in np.flatnonzero(before < 0).tolist()}
    lately = _lately(last)
    if lately:
        joined.update(compress(lately.items(), indices.find(list(lately)) >= 0))
    begin, end, turn = _turn(last.turn, len(requests))
    changed = [*requests[begin:end], *joined]
    if 2 * len(changed) > len(requests) or any(map(_FINISHED, changed)):
        return None
    handles = gather(last.handles, before)
    changed_indices = indices.find(changed).tolist()
    for index, request in zip(changed_indices, changed, strict=True):
        handles[index] = request.last_node
    forest, nodes = mirror.forest(handles, prefix_lens, None, Known(last.nodes[before], changed_indices))
    state = _DecodeState(
        requests=requests,
        drafts=drafts,
        indices=indices,
        handles=handles,
        finished=None,
        nodes=nodes,
        content=mirror.content,
        forest=forest,
        joined=joined,
        turn=turn,
    )
    return None if any(map(_FINISHED, state.representatives)) else state


def _lately(last: _DecodeState) -> dict[Any, int]:
    """Requests whose node may differ from the last batch: prefilled, joined or moved lately."""
    lately = {request: steps - last.age - 1 for request, steps in last.joined.items() if steps > last.age + 1}
    lately.update(dict.fromkeys((*last.changed, *last.prefilled), _JOIN_STEPS))
    return lately


def _may_be_packed(mode: Mode) -> None:
    """None for all kinds of steps: no backend has said yet what it packs."""


def _stays_prefill(batch: Any) -> bool:
    """False: one-token steps are off."""
    return False


def _finished(requests: list[Any]) -> list[Any] | None:
    """Finish reasons by batch index, None if nobody has one."""
    return list(map(_FINISHED, requests)) if any(map(_FINISHED, requests)) else None


def _live(finished: list[Any] | None) -> npt.NDArray[np.bool_] | None:
    """[num_requests] bool, False for finished requests; None if all are live."""
    return None if finished is None else np.array([reason is None for reason in finished], dtype=np.bool_)
