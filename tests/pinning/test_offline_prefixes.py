"""When a prefix of an offline job is announced to retention. test_manager.py: how long it is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place, SharedPrefix
from sgl_prefix_attn.sglang_plugin.pinning import eviction_policy
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.scheduling import offline_prefixes
from sgl_prefix_attn.sglang_plugin.scheduling.offline_prefixes import OfflinePrefixes
from tests.pinning.small_server import SmallServer, prompt
from tests.support.caches import CACHES


def request(place: Place | None, tokens: int = 10) -> Any:
    parameters = None if place is None else {CUSTOM_PARAMETER: place.encode()}
    return SimpleNamespace(
        origin_input_ids=list(range(tokens)), sampling_params=SimpleNamespace(custom_params=parameters), extra_key=None
    )


def test_whichever_request_comes_first_announces_and_no_other_does():
    announced: list[Any] = []
    offline = OfflinePrefixes(lambda request, shared, uses: announced.append((shared.begin, shared.end, uses)))
    root, document, other = SharedPrefix(0, 0, 4, 3), SharedPrefix(1, 4, 9, 2), SharedPrefix(2, 4, 8, 1)
    first, second = (request(Place("job", n, 0, 1, (root, document))) for n in range(2))
    offline.arrived([request(None), first])
    assert announced == [(0, 4, 3), (4, 9, 2)]
    offline.arrived([first, second])
    assert len(announced) == 2
    assert len(offline) == 1  # one request with the root is still to come
    offline.arrived([request(Place("job", 2, 0, 1, (root, other)))])
    assert announced[2:] == [(4, 8, 1)]
    assert len(offline) == 0
    offline.arrived([request(Place("another job", 0, 0, 1, (root,)))])
    assert announced[3:] == [(0, 4, 3)]


def test_more_uses_than_count_are_announced_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offline_prefixes, "_MOST_USES", 3)
    announced: list[int] = []
    offline = OfflinePrefixes(lambda request, shared, uses: announced.append(uses))
    shared = SharedPrefix(0, 0, 4, (1 << 31) - 1)
    offline.arrived([request(Place("job", number, 0, 1, (shared,))) for number in range(7)])
    assert announced == [3, 3, 3]
    offline.clear()  # a flush
    offline.arrived([request(Place("job", 7, 0, 1, (shared,)))])
    assert announced == [3, 3, 3, 3]


def test_uses_of_jobs_that_end_early_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offline_prefixes, "_PREFIXES_KEPT", 10)
    announced: list[Any] = []
    offline = OfflinePrefixes(lambda request, shared, uses: announced.append(shared.node))
    shared = [SharedPrefix(node, node, node + 1, 3) for node in range(10)]
    for number in range(100):
        offline.arrived([request(Place(f"job {number}", 0, 0, 1, tuple(shared)))])
        assert len(offline) == 10
    announced.clear()
    offline.arrived([request(Place("job 99", 1, 0, 1, tuple(shared)))])
    assert announced == []
    offline.arrived([request(Place("job 5", 1, 0, 1, tuple(shared)))])
    assert announced == list(range(10))


@pytest.mark.parametrize("value", ["nonsense", ["job", 0, 0, 1, 0, 0, 4, 0], ["job", 0, 0, 1, 0, 0, 10**6, 2]])
def test_a_malformed_place_leaves_retention_its_look_ahead(value: object):
    server = SmallServer(CACHES[0], slots=64, settings=PinningSettings(retention=True, jobs=True, block=1))
    bad, good = server.send(prompt(1), 2), server.send(prompt(2), 2)
    bad.sampling_params.custom_params = {CUSTOM_PARAMETER: value}
    server.admission.after_calc_priority(None, server, server.waiting)
    assert server.manager.retention.scores.lookahead.requests() == [bad.rid, good.rid]
    assert server.manager.counters.failures == 0


def test_a_prompt_is_hashed_once_however_many_spans_of_it_are_shared(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []
    keys_of = eviction_policy.keys_of
    monkeypatch.setattr(
        eviction_policy, "keys_of", lambda tokens, *rest: hashed.append(len(tokens)) or keys_of(tokens, *rest)
    )
    settings = PinningSettings(retention=True, jobs=True, lookahead=0, block=2)
    server = SmallServer(CACHES[0], slots=64, settings=settings)
    sent = server.send(prompt(1), 2)
    spans = tuple(SharedPrefix(node, node, node + 1, node + 1) for node in range(20))
    sent.sampling_params.custom_params = {CUSTOM_PARAMETER: Place("job", 0, 0, 2, spans).encode()}
    server.admission.after_calc_priority(None, server, server.waiting)
    assert hashed == [20]
    scores = server.manager.retention.scores
    # A block counts for the span that ends it.
    assert [scores.of(key) for key in keys_of(prompt(1), 2)] == [2.0 * block for block in range(1, 11)]
