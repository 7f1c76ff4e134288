"""Computes a prefix that several waiting requests share once.

A prompt's KV enters the radix tree after its prefill step; with overlap scheduling, one step later. SGLang admits the
other samples of the prompt before that, and each of them computes the whole prompt again. This gatekeeper passes over
such a request while another one computes its prefix. The request keeps its place in the queue, and requests behind it
may be admitted. It finds the prefix in the tree a round or two later.

What is lost by waiting is a prefill step. So a few recomputed tokens beside each prefill are allowed (`WORTH_WAITING`).
A request waits only for a prefill that is under way, and never while nothing runs. It waits for few prefills: if the
pool is so small that their KV is evicted at once, it computes its own. Decisions depend on the queue, the
tree and the requests' tokens, so all ranks take the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Gatekeeper
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

# Shorter common prefixes are not looked for. SGLang's in-batch prefix caching has the same threshold.
LEAST_COMMON: Final = 32
# Tokens that may be computed twice beside one prefill before requests wait for it. Waiting costs a prefill step, which
# the waiting requests of all prompts share. See docs/design-notes/host.md; no GPU has measured it.
WORTH_WAITING: Final = 64
# Tokens of requests that are passed over in one round of admission, each with so many more for itself. SGLang matches
# each of them with its tree.
MOST_PASSED_OVER: Final = 1 << 18
PASSED_OVER: Final = 1 << 10
# Prefills that a request waits for. Each may give it a longer prefix.
MOST_WAITED_FOR: Final = 8
# Tokens of the keys by which prefills are found.
_KEY_TOKENS: Final = (WORTH_WAITING, LEAST_COMMON)
# Rounds after which a prefill without progress counts as lost. A prefill ends within two.
_ROUNDS: Final = 3

# Server arguments with which admission of a request has other effects, and their values when off.
_ARGUMENTS: Final[dict[str, Any]] = {
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "dllm_algorithm": None,
    "enable_flexkv": False,
    "enable_hierarchical_cache": False,
    "enable_hisparse": False,
    "enable_lmcache": False,
    "enable_lora": False,
    "enable_priority_scheduling": False,
    "enable_unified_cache_external_linker": False,
    "radix_cache_backend": None,
}


def why_none_waits(facts: ServerFacts) -> str | None:
    """Why requests of a server do not wait for each other, in words; None if they may."""
    argument = facts.argument_in_use(_ARGUMENTS)
    if argument is not None:
        return argument
    if facts.has_other_layers:
        return "a model with layers of linear or sparse attention"
    if facts.waits_for_free_slots:  # the slots of those that wait would stay idle until more are free
        return "min_free_slots_delay, which DFlash sets"
    return None


@dataclass(eq=False)
class _Prefill:
    """A prefill under way.

    Attributes:
        node, depth: end of what its request found in the tree, and the tokens up to there.
        outputs: tokens that the request had generated when it was admitted.
        recomputed: tokens of it that other requests compute beside it.
        rounds: rounds of admission until it counts as lost.
    """

    request: Any
    node: Any
    depth: int
    outputs: int
    recomputed: int = 0
    rounds: int = _ROUNDS

    def ended(self) -> bool:
        return len(self.request.output_ids) > self.outputs or self.request.finished()


class SharedPrefill(Gatekeeper):
    """The prefills under way in one scheduler process.

    Args:
        counters: totals of the process.

    Attributes:
        active: whether any request waits; off where no backend of ours lives.
    """

    gate = "shared_prefill"
    unhooked = "requests compute shared prefixes again"

    def __init__(self, counters: Counters) -> None:
        self.active = True
        self._counters = counters
        self._prefills: list[_Prefill] = []
        # The first by node, namespace and the next tokens. A prefill holds its node, so no other has its id.
        self._by_key: dict[tuple[Any, ...], _Prefill] = {}
        # The last that a request waited for, and how many there were.
        self._waited: weakref.WeakKeyDictionary[Any, tuple[_Prefill, int]] = weakref.WeakKeyDictionary()
        self._adder: Any = None  # SGLang makes one for each round of admission
        self._passed_over = 0
        self._beside: tuple[_Prefill, int] | None = None

    def holds_back(self, adder: Any, request: Any) -> str | None:
        """CONTINUE, which passes over a request, or OTHER, which ends the round, for a request that should wait."""
        if not self.active or not self._should_wait(adder, request):
            return None
        return "CONTINUE" if self._passed_over < MOST_PASSED_OVER else "OTHER"

    def _should_wait(self, adder: Any, request: Any) -> bool:
        """Whether a request that has just been matched with the tree is better admitted in a later round."""
        if adder is not self._adder:
            self._begin_round(adder)
        self._beside = None
        if not self._by_key:
            return False
        tokens, depth = request.origin_input_ids, versions.matched_tokens(request)
        last = len(tokens) - 1  # one token of a prompt is always computed
        if last - depth < LEAST_COMMON:
            return False
        prefill = self._most_in_common(request, depth, last - depth)
        if prefill is None:
            return False
        if prefill.request is request:  # SGLang took it back: it waits again
            self._prefills.remove(prefill)
            self._by_key = {key: other for key, other in self._by_key.items() if other is not prefill}
            return False
        other = prefill.request.origin_input_ids
        looked_at = max(WORTH_WAITING, adder.page_size)
        common_end = _common_end(other, tokens, depth, min(last, len(other), depth + looked_at))
        common = common_end - common_end % adder.page_size - depth  # the tree has whole pages
        if common <= 0:
            return False
        if prefill.recomputed + common < WORTH_WAITING:
            self._beside = prefill, common
            return False
        if not _can_use(request, depth + common) or not (adder.can_run_list or versions.anything_runs(adder)):
            return False
        last_and_count: tuple[_Prefill | None, int] = self._waited.get(request, (None, 0))
        waited = last_and_count[1] + (last_and_count[0] is not prefill)
        if waited > MOST_WAITED_FOR:
            return False
        self._waited[request] = prefill, waited
        self._passed_over += PASSED_OVER + len(tokens)
        self._counters.shared_prefill_waits += 1
        return True

    def admitted(self, adder: Any, request: Any) -> None:
        """Notes a prefill that others may wait for."""
        if not self.active:
            return
        self._waited.pop(request, None)
        if self._beside is not None:
            prefill, tokens = self._beside
            prefill.recomputed += tokens
        depth = versions.matched_tokens(request)
        if len(request.origin_input_ids) - depth > LEAST_COMMON and _is_of_tokens(request):
            self._add(_Prefill(request, request.last_node, depth, len(request.output_ids)))

    def _begin_round(self, adder: Any) -> None:
        self._adder, self._passed_over = adder, 0
        running, self._prefills = self._prefills, []
        self._by_key.clear()
        for prefill in running:
            request = prefill.request
            if prefill.ended():
                continue
            if any(admitted is request for admitted in adder.can_run_list):  # its next chunk
                depth = versions.matched_tokens(request)
                prefill.node, prefill.depth = request.last_node, depth - depth % adder.page_size
                prefill.rounds = _ROUNDS
            else:
                prefill.rounds -= 1
            if prefill.rounds > 0:
                self._add(prefill)

    def _add(self, prefill: _Prefill) -> None:
        self._prefills.append(prefill)
        for tokens in _KEY_TOKENS:
            if len(prefill.request.origin_input_ids) - prefill.depth >= tokens:
                self._by_key.setdefault(_key(prefill.request, prefill.node, prefill.depth, tokens), prefill)

    def _most_in_common(self, request: Any, depth: int, most: int) -> _Prefill | None:
        """A prefill with which a request has at least half as many of `most` tokens in common as with any other."""
        for tokens in _KEY_TOKENS:
            if tokens <= most:
                prefill = self._by_key.get(_key(request, request.last_node, depth, tokens))
                if prefill is not None:
                    return prefill
        return None


def _key(request: Any, node: Any, depth: int, tokens: int) -> tuple[Any, ...]:
    salt = getattr(request, "cache_salt", None)  # from SGLang 0.5.18 on
    if type(node) is not int:  # else a number of SGLang's, which the native tree gives each request as a new object
        node = id(node)
    return node, request.extra_key, salt, tuple(request.origin_input_ids[depth : depth + tokens])


def _common_end(first: Sequence[int], second: Sequence[int], begin: int, end: int) -> int:
    """Where the tokens of two prompts, alike up to `begin`, differ; at most `end`."""
    if first[begin:end] == second[begin:end]:
        return end
    return next((at for at in range(begin, end) if first[at] != second[at]), end)


def _can_use(request: Any, tokens: int) -> bool:
    """Whether a request can take this number of tokens of its prompt from the tree."""
    if not _is_of_tokens(request):
        return False
    return not request.return_logprob or request.logprob_start_len < 0 or request.logprob_start_len >= tokens


def _is_of_tokens(request: Any) -> bool:
    """Whether a prompt is what its token ids say. SGLang shares no KV of the others."""
    return all(getattr(request, name, None) is None for name in ("input_embeds", "positional_embed_overrides"))
