"""Locks in real caches, and what releases of SGLang differ in that pins have to know."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, Namespace
from tests.pinning.small_server import SmallServer, prompt
from tests.support.caches import CACHES


@pytest.fixture(params=CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> SmallServer:
    server = SmallServer(kind, slots=64, settings=PinningSettings(budget_percent=50))
    server.serve(list(range(20)))
    return server


@pytest.mark.parametrize("step", ["find", "path", "lock"])
def test_a_cache_that_raises_leaves_no_pin_behind(server, step, monkeypatch):
    manager = server.manager
    with monkeypatch.context() as patch:
        patch.setattr(manager._tree, step, Mock(side_effect=RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            manager.pin(range(20))
    assert (manager.pins.ledger.pins(), manager.pins.ledger.pinned_tokens, server.cache.protected_size()) == ([], 0, 0)
    pin = manager.pin(range(20))
    assert manager.pins.locked_tokens(pin.id) == 20


def test_where_keys_have_no_salt_it_comes_before_the_extra_key(server, monkeypatch):
    """SGLang up to 0.5.17: a request with the salt "pepper" and the extra key "lora" carries "pepperlora"."""
    tree: Any = server.manager._tree
    with_salt = tree._radix_key

    def without_salt(token_ids: Any, extra_key: str | None = None) -> Any:
        return with_salt(token_ids, extra_key)

    monkeypatch.setattr(tree, "_radix_key", without_salt)
    monkeypatch.setattr(tree, "_takes_salt", False)
    asked = Namespace("lora", "pepper")
    pin = server.manager.pin(range(20), asked)
    assert server.manager.pins.locked_tokens(pin.id) == 0
    server.serve(list(range(20)), extra_key="pepperlora")
    assert server.manager.pins.locked_tokens(pin.id) == 20
    assert server.manager.pins.of(range(20), asked) == [pin]


class CountedTree:
    """An adapter that counts the calls for each of its methods."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.tree, name)
        if not callable(value):
            return value

        def counted(*args: Any) -> Any:
            self.calls[name] += len(args[0]) if name == "moved" else 1
            return value(*args)

        return counted


@pytest.mark.parametrize(("branches", "tokens"), [(300, 8), (40, 60)])
def test_work_of_evictions_and_request_ends_does_not_grow_with_the_number_of_branches(server, branches, tokens):
    """An eviction locks no branch and frees 1/256 of the pool. A request's end looks at no sibling."""
    settings = PinningSettings(retention=True, lookahead=0, block=4)
    server = SmallServer(server.kind, slots=branches * tokens, settings=settings)
    for branch in range(branches):
        server.serve([10 * branch + position for position in range(tokens)])
    retention: Any = server.manager.retention
    counted = retention._tree = CountedTree(server.manager._tree)
    new = list(range(1_000_000, 1_000_000 + 12))
    for _ in range(4):
        server.serve(new)
        new = [*new[:6], *(token + 1000 for token in new[6:])]
    steps = 100
    server.send([2_000_000, 1], steps)
    for _ in range(steps + 1):
        server.step()
    calls = counted.calls
    # A leaf in use is checked in each eviction, and 32 leaves that may be gone.
    evictions = calls["evict"]
    assert 0 < evictions <= 30
    assert calls["lock"] == 0
    assert calls["in_use"] + calls["moved"] <= 8 * evictions + 60
    assert calls["alive"] <= 34 * evictions + 60
    assert server.manager.counters.failures == 0
    server.check_accounting()


@pytest.mark.parametrize("step", ["in_use", "evict", "alive"])
def test_an_eviction_that_fails_leaves_the_cache_usable(server, step, monkeypatch):
    server.hooks = PinningHooks(PinningSettings(retention=True, lookahead=0, block=1))
    for name in range(1, 4):
        server.serve(prompt(name, 14))
    with monkeypatch.context() as patch:
        patch.setattr(server.manager._tree, step, Mock(side_effect=RuntimeError("broken")))
        server.serve(prompt(5, 14))
    assert server.manager.counters.failures >= 1
    assert server.cache.protected_size() == 0
    server.serve(prompt(6, 14))
    server.check_accounting()


def test_a_locked_or_inner_or_unknown_node_is_not_evicted(server: SmallServer) -> None:
    tree = server.manager._tree
    leaf = tree.find(range(20), PLAIN)
    inner = tree.find(range(10), PLAIN)
    lock = tree.lock(leaf)
    assert (tree.in_use(leaf), tree.evict(leaf), tree.evict(inner)) == (True, 0, 0)
    tree.release(lock)
    assert (tree.in_use(leaf), tree.evict(inner), tree.evict(leaf)) == (False, 0, 10)
    assert (tree.alive(leaf), tree.in_use(leaf), tree.evict(leaf)) == (False, False, 0)
    assert tree.evict(inner) == 10
    assert server.cache.evictable_size() == 0
    server.check_accounting()


@pytest.mark.skipif("RadixCache" not in CACHES, reason="this SGLang has no RadixCache")
def test_retention_frees_nothing_twice_in_a_cache_that_streaming_sessions_wrap() -> None:
    from sglang.srt.session.streaming_session import StreamingSession

    server = SmallServer("RadixCache", slots=60, settings=PinningSettings(retention=True))
    cache: Any = StreamingSession(server.cache)
    server.cache = server.tree_cache = cache
    for name in range(1, 9):
        server.serve(prompt(name))
        server.check_accounting()
    assert server.manager.counters.failures == 0


@pytest.mark.parametrize(("page", "eagle", "cached"), [(1, False, 18), (1, True, 17), (4, False, 16), (4, True, 16)])
def test_a_pin_that_holds_all_that_can_be_cached_of_it_is_not_matched_again(kind, page, eagle, cached):
    settings = PinningSettings(budget_percent=50)
    server = SmallServer(kind, slots=64, settings=settings, page=page, eagle=eagle)
    pins = server.manager.pins
    counted: Any = CountedTree(pins._tree)
    pins._tree = counted
    pin = pins.pin(range(18))
    server.serve(list(range(10)))
    half = pins.locked_tokens(pin.id)
    assert 8 <= half <= 10
    server.serve([*range(half + page + eagle), 99, 98])
    assert half < pins.locked_tokens(pin.id) < cached
    server.serve([*range(18), 99, 98, 97])
    assert pins.locked_tokens(pin.id) == cached
    before = counted.calls["find"]
    for name in range(3):
        server.serve([*range(18), 99, name])
    assert counted.calls["find"] == before
