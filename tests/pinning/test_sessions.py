"""Sessions and hints of requests on SGLang's real caches: what goes first, what stays, and whose tokens they are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.pinning import CachedTree, RetentionScores
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.pinning import eviction_policy
from sgl_prefix_attn.sglang_plugin.pinning.eviction_policy import Retention
from sgl_prefix_attn.sglang_plugin.pinning.hints import OURS, Hints
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.sessions import (
    MAX_SESSIONS,
    MAX_STORED_TEXT,
    TEMPLATE_TAIL,
    Owner,
    Sessions,
)
from sgl_prefix_attn.sglang_plugin.pinning.state import HINTED_LOOKAHEAD, PinningSettings, PinningState
from tests.pinning.small_server import SmallServer, prompt
from tests.support.caches import CACHES

KEEP = [(0, None, 50, None)]  # the whole request, until a flush


@pytest.fixture(autouse=True)
def requests_carry_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of releases without the envelope, whose caches are tested here too."""
    monkeypatch.setattr(versions, "has_kv_hints", lambda: True)


@pytest.fixture(params=CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def server_of(kind: str, slots: int = 400, budget: int = 0, retention: Any = "hints", block: int = 4) -> SmallServer:
    settings = Settings(retention=retention, retention_block=block, hint_budget_percent=budget)
    return SmallServer(kind, slots=slots, settings=PinningSettings.of(settings))


def fill(server: SmallServer, tokens: int, first: int = 500) -> None:
    """Other prompts, so many tokens that each is used once."""
    for number in range(tokens // 40):
        server.serve(prompt(first + number, 40))


def sound(server: SmallServer) -> SmallServer:
    assert server.manager.counters.failures == 0
    server.check_accounting()
    return server


def test_a_server_without_hints_and_sessions_makes_nothing(kind: str) -> None:
    server = server_of(kind)
    fill(server, 800)
    assert server.hooks.state._managers == {}
    assert server.hooks.state.manager_of(server.cache) is None


def test_the_first_session_wakes_retention_and_older_prefixes_go_first(kind: str) -> None:
    server = server_of(kind)
    fill(server, 300)
    server.serve(prompt(1, 40), session="a")
    fill(server, 160, first=900)
    assert server.serve(prompt(1, 40)) == 39
    sound(server)


@pytest.mark.parametrize("retention", ["hints", "reuse"])
def test_the_older_turns_own_part_goes_first_and_the_live_prefix_stays(kind: str, retention: str) -> None:
    server = server_of(kind, retention=retention)
    first, thought = prompt(1, 60), 80
    server.serve(first, session="a", new_tokens=thought)  # its output is not in the next prompt
    old = next(request for request in server.finished if len(request.origin_input_ids) == 60)
    server.serve([*first, *prompt(2, 40)], session="a")
    assert server.manager.counters.superseded_tokens >= thought - 5
    whole = [*first, *old.output_ids]
    assert server.serve(whole) >= 100  # still cached: nothing needed the room
    server = server_of(kind, retention=retention)
    fill(server, 80)
    server.serve(first, session="a", new_tokens=thought)
    old = next(request for request in server.finished if len(request.origin_input_ids) == 60)
    server.serve([*first, *prompt(2, 40)], session="a")
    fill(server, 200, first=900)
    assert server.serve([*first, *prompt(2, 40), *prompt(3, 4)]) >= 100
    assert server.serve(prompt(500, 40)) == 39  # older than the session, but its old turn went first
    assert server.serve([*first, *old.output_ids[:-1]]) < 100
    sound(server)


def test_without_a_session_the_least_recently_used_goes_first_instead(kind: str) -> None:
    server = server_of(kind)
    first = prompt(1, 60)
    fill(server, 80)
    server.serve(first, new_tokens=80)
    server.serve([*first, *prompt(2, 40)])
    fill(server, 240, first=900)
    assert server.serve(prompt(500, 40)) == 0


def test_a_closed_session_goes_first_but_not_what_others_use(kind: str) -> None:
    server = server_of(kind)
    shared = prompt(1, 40)
    server.serve([*shared, *prompt(3, 20)])
    server.serve([*shared, *prompt(2, 60)], session="a")
    fill(server, 40)
    server.hooks.after_close_session(None, server, SimpleNamespace(session_id="a"))
    fill(server, 280, first=900)
    assert server.serve([*shared, *prompt(3, 20), 1]) == 60
    assert server.serve([*shared, *prompt(2, 60), 1]) < 100
    sound(server)


def test_an_ending_request_gives_up_its_own_tokens_only(kind: str) -> None:
    server = server_of(kind)
    shared = prompt(1, 40)
    server.serve([*shared, *prompt(3, 20)])
    server.serve([*shared, *prompt(2, 60)], hints=Hints(now=1, ends=True))
    assert server.manager.counters.superseded_tokens >= 60
    fill(server, 320, first=900)
    assert server.serve([*shared, *prompt(3, 20), 1]) == 60
    assert server.serve([*shared, *prompt(2, 60), 1]) < 100
    sound(server)


@pytest.mark.parametrize("retention", ["hints", "reuse"])
def test_a_kept_prefix_stays_within_the_budget_until_it_is_given_up_or_flushed(kind: str, retention: str) -> None:
    server = server_of(kind, budget=25, retention=retention)
    server.serve(prompt(1, 60), hints=Hints(now=1, spans=KEEP))
    assert server.manager.counters.retained_tokens == 60
    fill(server, 800)
    assert server.serve([*prompt(1, 60), 1]) == 60
    server.serve(prompt(1, 60), hints=Hints(now=2, spans=[(0, None, 0, None)]))
    assert server.manager.counters.retained_tokens == 0
    fill(server, 800)
    if retention == "hints":
        assert server.serve([*prompt(1, 60), 1]) == 0
    server.serve(prompt(1, 60), hints=Hints(now=3, spans=KEEP))
    assert server.flush()
    assert len(server.manager.retention.scores.retained) == 0
    sound(server)


def test_a_kept_prefix_lapses_by_the_clock_of_requests(kind: str) -> None:
    server = server_of(kind, budget=25)
    server.serve(prompt(1, 60), hints=Hints(now=10, spans=[(0, None, 50, 5.0)]))
    server.serve(prompt(2, 4), hints=Hints(now=14))
    assert server.manager.counters.retained_tokens == 60
    server.serve(prompt(2, 4), hints=Hints(now=15))
    assert server.manager.counters.retained_tokens == 0
    fill(server, 800)
    assert server.serve([*prompt(1, 60), 1]) == 0


def test_without_a_budget_a_hint_keeps_nothing_and_is_counted(kind: str) -> None:
    server = server_of(kind)
    server.serve(prompt(1, 60), hints=Hints(now=1, spans=KEEP, ignored=2))
    assert (server.manager.counters.hints_ignored, server.manager.counters.retained_tokens) == (3, 0)
    fill(server, 800)
    assert server.serve([*prompt(1, 60), 1]) == 0


def test_hints_never_stop_a_request(kind: str) -> None:
    """All of the pool is kept, and requests of any length still run."""
    server = server_of(kind, budget=100)
    for number in range(20):
        server.serve(prompt(number, 100), hints=Hints(now=1, spans=[(0, None, 100, None)]))
    assert len(server.manager.retention.scores.retained) * 4 <= 400
    assert server.serve(prompt(99, 300)) == 0
    sound(server)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enable_session_radix_cache", True),
        ("radix_eviction_policy", "lfu"),
        ("tokenizer_worker_num", 2),
        ("enable_hierarchical_cache", True),
        ("enable_lmcache", True),
    ],
)
def test_where_sglang_orders_by_itself_hints_are_off_with_a_reason(option: str, value: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(**{option: value}))
    server = server_of(CACHES[0])
    server.serve(prompt(1, 40), session="a")
    assert server.hooks.state.manager_of(server.cache) is None
    assert "hints" in server.hooks.state.failures.disabled


class TestAttacks:
    """What tenant A's hints and sessions do to the cached tokens of tenant B, request by request."""

    def run(self, kind: str, seed: int, budget: int, namespaces: bool, hostile: bool) -> list[int]:
        dice, server = random.Random(seed), server_of(kind, slots=500, budget=budget)
        mine: list[int] = []
        server.serve(prompt(99, 8), session="awake")  # retention orders evictions in both runs
        for number in range(120):
            space = "b" if namespaces else None
            if dice.random() < 0.4:
                turn = dice.randint(1, 6)
                tokens = [*prompt(1, 40), *prompt(2, 10 * turn), 9000 + number]
                mine.append(server.serve(tokens, space, session="of b"))
                continue
            tokens = prompt(dice.randint(10, 30), dice.choice([40, 60, 90]))
            spans = [(0, None, dice.choice([0, 1, 100]), dice.choice([None, 0.0, 1e6]))]
            hints = Hints(now=number, spans=spans, ends=dice.random() < 0.5)
            given = {"session": dice.choice(["of b", "x", None]), "hints": hints}
            if dice.random() < 0.3:
                tokens = prompt(1, 40)[: dice.choice([20, 40])] + tokens[:20]  # B's first tokens are known
            server.serve(tokens, "a" if namespaces else None, **(given if hostile else {}))
            closes = dice.random() < 0.2
            if hostile and namespaces and closes:
                server.hooks.after_close_session(None, server, SimpleNamespace(session_id="of b"))
        sound(server)
        return mine

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("namespaces", [True, False])
    def test_without_a_budget_they_take_nothing(self, kind: str, seed: int, namespaces: bool) -> None:
        attacked, quiet = (self.run(kind, seed, 0, namespaces, hostile) for hostile in (True, False))
        assert sum(attacked) >= sum(quiet)

    @pytest.mark.parametrize("seed", range(4))
    def test_with_one_they_take_no_more_than_a_pool_that_is_smaller_by_it(self, kind: str, seed: int) -> None:
        attacked = self.run(kind, seed, 20, True, True)
        assert sum(attacked) >= 0.7 * sum(self.run(kind, seed, 0, True, False))

    def test_a_closed_id_is_that_of_no_other_namespace(self, kind: str) -> None:
        server = server_of(kind)
        server.serve(prompt(1, 40), "b", session="of b")
        server.hooks.after_close_session(None, server, SimpleNamespace(session_id="of b"))
        assert server.manager.counters.superseded_tokens == 0

    def test_who_knows_an_id_but_not_the_prompt_supersedes_nothing(self, kind: str) -> None:
        server = server_of(kind)
        server.serve(prompt(1, 40), session="of b")
        server.serve([*prompt(1, 30), *prompt(2, 40)], session="of b")
        assert server.manager.counters.superseded_tokens == 0

    def test_who_knows_the_full_blocks_of_a_prompt_but_not_its_end_supersedes_nothing(self, kind: str) -> None:
        """Those of a system prompt that all tenants share, for example."""
        server = server_of(kind, block=16)
        known, secret = prompt(1, 32), prompt(2, 15)
        server.serve([*known, *secret], session="of b", new_tokens=40)
        server.serve([*known, *prompt(3, 40)], session="of b")
        assert server.manager.counters.superseded_tokens == 0

    def test_the_tail_of_a_chat_template_may_differ(self, kind: str) -> None:
        server = server_of(kind, block=16)
        first = [*prompt(1, 32), *prompt(2, 15)]
        server.serve(first, session="a", new_tokens=40)
        server.serve([*first[: len(first) - TEMPLATE_TAIL], *prompt(3, 40)], session="a")
        assert server.manager.counters.superseded_tokens >= 40


@pytest.mark.parametrize(("retention", "counted"), [("hints", HINTED_LOOKAHEAD), ("reuse", 300)])
def test_a_client_makes_the_scheduler_read_no_more_of_the_queue_than_sglang_does(retention: str, counted: int) -> None:
    server = server_of(CACHES[0], retention=retention)
    server.serve(prompt(1, 40), session="a")
    server.hooks.queue_ordered(server, [server.request(prompt(number, 8), None, 1) for number in range(300)])
    assert len(server.manager.retention.scores.lookahead) == counted


def test_what_is_stored_of_a_client_is_bounded() -> None:
    sessions, long = Sessions(4), "s" * 100_000
    requests = [
        SimpleNamespace(extra_key=long, cache_salt=None, rid=f"{long}{number}", session_id=session)
        for number, session in enumerate(["a", None, long])
    ]
    owners = [Owner.of_request(request) for request in requests]
    assert len(set(owners)) == 3
    assert all(len(text) <= MAX_STORED_TEXT for owner in owners for text in owner if text is not None)
    assert sessions.close(Owner(None, long)) is None
    for number in range(MAX_SESSIONS + 10):
        sessions.close(Owner(None, str(number)))
        sessions.finished(Owner(None, f"other {number}"), number, [1], [1, 2, 3, 4, 5])
    assert (len(sessions), len(sessions._closed)) == (MAX_SESSIONS, MAX_SESSIONS)
    assert max(len(owner.session or "") for owner in sessions._closed) < 10


FAULTS = [
    (eviction_policy, "hints_of"), (Sessions, "superseded"), (Sessions, "admitted"), (Sessions, "finished"),
    (Sessions, "close"), (CachedTree, "supersede"), (Retention, "_keep"), (Retention, "_unknown"),
    (RetentionScores, "expire"), (PinningManager, "listen"), (PinningState, "hinted"), (Owner, "of_request"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "name"), FAULTS, ids=[name for _, name in FAULTS])
def test_an_exception_of_any_part_is_counted_and_the_server_goes_on(kind: str, where: Any, name: str, monkeypatch: Any):
    server = server_of(kind)
    server.serve(prompt(1, 40))
    monkeypatch.setattr(where, name, Mock(side_effect=RuntimeError("by the test")))
    for turn in range(12):
        spans = [(0, None, 50, None)]
        server.serve(
            [*prompt(1, 40), *prompt(2, 10 * turn)], session="a", hints=Hints(now=turn, spans=spans, ends=True)
        )
        server.serve(prompt(10 + turn, 200))
        server.hooks.after_close_session(None, server, SimpleNamespace(session_id="a"))
    failures = server.hooks.state.failures.counts + server.admission._failures.counts
    assert sum(failures.values()) > 0
    server.check_accounting()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("retention", "budget"), [("hints", 0), ("hints", 30), ("reuse", 30)])
def test_evictions_free_what_sglang_would_and_nothing_locked(kind: str, retention: Any, budget: int, seed: int) -> None:
    dice = random.Random(seed)
    server = server_of(kind, dice.choice([150, 300, 600]), budget, retention, dice.choice([1, 4, 16]))
    evict, known = server._evict, [prompt(1, 20)]

    def checked(tokens: int) -> None:
        allocator, cache = server.allocator, server.cache
        free, evictable, locked = allocator.available_size(), cache.evictable_size(), cache.protected_size()
        evict(tokens)
        assert allocator.available_size() >= min(tokens, free + evictable)
        assert allocator.available_size() - free == evictable - cache.evictable_size()
        assert cache.protected_size() == locked

    server._evict = checked  # type: ignore[method-assign]
    for number in range(150):
        tokens = [*(begin := dice.choice(known))[: dice.randint(1, len(begin))], *prompt(dice.randint(2, 20), 25)]
        new = dice.choice([1, 2, 10, 30])
        if server.fits(tokens, new):
            request = server.send(tokens, new, dice.choice([None, None, "a"]))
            request.session_id = dice.choice([None, "x", "y", str(number % 30), "", "q" * 300])
            spans = [(0, dice.choice([None, 1, 30, 1 << 30]), dice.choice([0, 1, 100]), dice.choice([None, 0.0, 9.0]))]
            payload = Hints(now=number, spans=spans * dice.randint(0, 8), ends=dice.random() < 0.3).model_dump()
            request.kv_hints = SimpleNamespace(actions=[SimpleNamespace(action_type=OURS, payload=payload)])
            known = [*known[-40:], tokens]
        present = server.waiting + server.running.reqs
        if present and dice.random() < 0.1:
            server.abort(dice.choice(present))
        for _ in range(dice.randint(0, 3)):
            server.step()
            server.check_accounting()
        if dice.random() < 0.02:
            server.flush()
    server.run()
    server._evict(server.slots)
    assert server.allocator.available_size() == server.slots
    sound(server)
