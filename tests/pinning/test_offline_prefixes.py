"""A prefix of an offline job is kept while the job has requests for it, and is the first to go after the last one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place, SharedPrefix
from sgl_prefix_attn.sglang_plugin import pinning_hooks
from sgl_prefix_attn.sglang_plugin.pinning_groups import OfflinePrefixes
from sgl_prefix_attn.sglang_plugin.pinning_hooks import PinningSettings
from tests.pinning.generations import CACHES
from tests.pinning.small_server import SmallServer


@pytest.fixture(autouse=True)
def _no_hooks_afterwards():
    yield
    pinning_hooks.activate(None)


def request(place: Place | None, tokens: int = 10) -> Any:
    parameters = None if place is None else {CUSTOM_PARAMETER: place.encode()}
    return SimpleNamespace(
        origin_input_ids=list(range(tokens)),
        sampling_params=SimpleNamespace(custom_params=parameters),
        extra_key=None,
    )


def test_whichever_request_comes_first_announces_and_no_other_does():
    announced: list[Any] = []
    offline = OfflinePrefixes(lambda tokens, uses, namespace, begin: announced.append((begin, len(tokens), uses)))
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


def ask(server: SmallServer, prompt: list[int], place: Place | None = None) -> int:
    """Runs one request to its end; returns how much of its prompt was cached."""
    sent = server.send(prompt, 2)
    if place is not None:
        sent.sampling_params.custom_params = {CUSTOM_PARAMETER: place.encode()}
    before = server.cached_tokens
    while server.waiting or server.running.reqs:
        server.step()
    return server.cached_tokens - before


def prompt(name: int) -> list[int]:
    return [1000 * name + place for place in range(20)]


@pytest.mark.parametrize("kind", CACHES)
def test_a_jobs_prefix_is_kept_until_its_last_request_and_then_goes_first(kind: str) -> None:
    settings = PinningSettings(budget_percent=0, retention=True, lookahead=0, block=1)
    server = SmallServer(kind, slots=64, settings=settings)
    shared = SharedPrefix(0, 0, 20, 3)
    assert ask(server, [*prompt(1), 1], Place("job", 0, 0, 2, (shared,))) == 0
    for number in (1, 2):
        for name in (2, 3, 4):
            ask(server, prompt(name))
        assert ask(server, [*prompt(1), 1 + number], Place("job", number, 20, 2, (shared,))) == 20
    assert len(server.keeper.offline) == 0
    ask(server, prompt(5))
    ask(server, prompt(6))
    assert ask(server, [*prompt(1), 9]) < 20
    assert server.keeper.counters.failures == 0
