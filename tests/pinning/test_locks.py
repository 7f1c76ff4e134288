"""Locks in real caches, and what releases of SGLang differ in that pins have to know."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.sglang_plugin.pinning import hooks
from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningSettings
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import Namespace, NodeLock
from tests.pinning.generations import CACHES
from tests.pinning.small_server import SmallServer


@pytest.fixture(params=CACHES)
def server(request: pytest.FixtureRequest) -> SmallServer:
    server = SmallServer(request.param, slots=64, settings=PinningSettings(budget_percent=50))
    serve(server, list(range(20)))
    return server


def serve(server: SmallServer, tokens: list[int], extra_key: str | None = None) -> None:
    server.send(tokens, 1, extra_key=extra_key)
    while server.waiting or server.running.reqs:
        assert server.step()


@pytest.mark.parametrize("step", ["find", "path", "lock"])
def test_a_cache_that_raises_leaves_no_pin_behind(
    server: SmallServer, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = server.keeper

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(keeper._tree, step, broken)
        with pytest.raises(RuntimeError, match="broken"):
            keeper.pin(range(20))
    assert (keeper.pins.ledger.pins(), keeper.pins.ledger.pinned_tokens, server.cache.protected_size()) == ([], 0, 0)
    pin = keeper.pin(range(20))
    assert keeper.pins.held_tokens(pin.id) == 20


def test_where_keys_have_no_salt_it_comes_before_the_extra_key(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang up to 0.5.17: a request with the salt "pepper" and the extra key "lora" carries "pepperlora"."""
    tree: Any = server.keeper._tree
    with_salt = tree._radix_key

    def without_salt(token_ids: Any, extra_key: str | None = None) -> Any:
        return with_salt(token_ids, extra_key)

    monkeypatch.setattr(tree, "_radix_key", without_salt)
    monkeypatch.setattr(tree, "_takes_salt", False)
    asked = Namespace("lora", "pepper")
    pin = server.keeper.pin(range(20), asked)
    assert server.keeper.pins.held_tokens(pin.id) == 0
    serve(server, list(range(20)), extra_key="pepperlora")
    assert server.keeper.pins.held_tokens(pin.id) == 20
    assert server.keeper.pins.of(range(20), asked) == [pin]


def test_where_keys_have_a_salt_it_stays_apart(server: SmallServer) -> None:
    if not server.keeper._tree._takes_salt:  # type: ignore[attr-defined]
        pytest.skip("keys of this release have no salt")
    pin = server.keeper.pin(range(20), Namespace("lora", "pepper"))
    serve(server, list(range(20)), extra_key="pepperlora")
    assert server.keeper.pins.held_tokens(pin.id) == 0


def test_an_eviction_whose_locks_fail_half_way_holds_none(server: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.activate(PinningSettings(retention=True, lookahead=0, block=1))
    for name in range(1, 4):
        serve(server, [1000 * name + position for position in range(14)])
    tree, taken = server.keeper._tree, 0
    lock = tree.lock

    def second_fails(handle: Any) -> NodeLock:
        nonlocal taken
        taken += 1
        if taken == 2:
            raise RuntimeError("broken")
        return lock(handle)

    with monkeypatch.context() as patch:
        patch.setattr(tree, "lock", second_fails)
        serve(server, [5000 + position for position in range(14)])
    assert taken >= 2
    assert server.keeper.counters.failures >= 1
    assert server.cache.protected_size() == 0
