"""Pins and retention over real caches, seen from the small server: what is kept, what gives way, what counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sgl_prefix_attn.offline.queue_order import Place, SharedPrefix
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.pinning import commands, eviction_policy
from sgl_prefix_attn.sglang_plugin.pinning.commands import (
    ListCommand,
    PinCommand,
    ReleaseCommand,
    ReleaseOneCommand,
)
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import PLAIN, Namespace
from tests.pinning.small_server import SmallServer, prompt
from tests.support.caches import CACHES


@pytest.fixture(params=CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pinning(percent: int = 100) -> PinningSettings:
    return PinningSettings(budget_percent=percent)


def retention(lookahead: int = 100) -> PinningSettings:
    return PinningSettings(retention=True, jobs=True, lookahead=lookahead, block=1)


@pytest.fixture
def server(kind: str) -> SmallServer:
    return SmallServer(kind, slots=64, settings=pinning())


def test_a_pinned_prefix_outlives_what_evicts_everything_else(server: SmallServer) -> None:
    server.serve(prompt(1))
    pin = server.manager.pin(prompt(1))
    assert server.manager.pins.locked_tokens(pin.id) == 20
    for other in range(2, 10):
        server.serve(prompt(other))
    assert server.serve([*prompt(1), 5]) == 20
    assert server.serve([*prompt(2), 5]) == 0
    server.manager.release(pin.id)
    for other in range(2, 10):
        server.serve(prompt(other))
    assert server.serve([*prompt(1), 5]) == 0


def test_a_pin_holds_only_its_own_namespace(server: SmallServer) -> None:
    pin = server.manager.pin(prompt(1), Namespace("lora"))
    server.serve(prompt(1))
    assert server.manager.pins.locked_tokens(pin.id) == 0
    server.serve([*prompt(1), 5], extra_key="lora")
    assert server.manager.pins.locked_tokens(pin.id) == 20
    assert server.manager.pins.of(prompt(1), PLAIN) == []


def hold_everything_by_a_running_request(server: SmallServer) -> None:
    server.send(prompt(1, 20), 20)
    assert server.step()


def test_what_running_requests_hold_themselves_does_not_give_way(server: SmallServer) -> None:
    hold_everything_by_a_running_request(server)
    pin = server.manager.pin(prompt(1, 20))
    protected = server.cache.protected_size()
    assert not server.manager.make_room(60)
    assert server.manager.pins.ledger.pins() == [pin]
    assert server.manager.pins.locked_tokens(pin.id) == 20
    assert (server.manager.counters.pins_shed, server.cache.protected_size()) == (0, protected)
    server.abort(server.running.reqs[0])
    assert server.step()
    assert server.serve([*prompt(1), 5]) == 20


def test_pins_that_free_nothing_stay_while_others_give_way(server: SmallServer) -> None:
    server.serve(prompt(2, 20))
    useful = server.manager.pin(prompt(2, 20))
    hold_everything_by_a_running_request(server)
    useless = server.manager.pin(prompt(1, 20))
    assert server.manager.make_room(server.allocator.available_size() + server.cache.evictable_size() + 5)
    assert server.manager.pins.ledger.get(useless.id) == useless
    assert server.manager.pins.locked_tokens(useful.id) == len(server.manager.pins.ledger.get(useful.id).tokens) == 15


def test_a_request_that_does_not_fit_takes_no_room_from_the_pin_that_it_uses(kind: str) -> None:
    server = SmallServer(kind, slots=100, settings=pinning())
    for name in (1, 2):
        server.serve(prompt(name, 40))
    used, other = (server.manager.pin(prompt(name, 40)) for name in (1, 2))
    server.send([*prompt(1, 40), *prompt(7, 10)], 20)
    assert server.step()
    assert server.manager.pins.locked_tokens(used.id) == 40
    # Of 20 tokens that are free and 10 + 20 that it can take, with its one more and SGLang's slack.
    assert 25 <= server.manager.pins.locked_tokens(other.id) < 30
    assert server.cached_tokens == 40


def test_a_pins_tokens_are_not_hashed_again_each_time_room_is_missing(kind, monkeypatch):
    server = SmallServer(kind, slots=64, settings=PinningSettings(budget_percent=100, retention=True, block=1))
    hold_everything_by_a_running_request(server)
    pin = server.manager.pin(prompt(1, 20))
    hashed: list[int] = []
    keys_of = eviction_policy.keys_of

    def noted(tokens: tuple[int, ...], block: int, namespace: str | None) -> list[int]:
        hashed.append(len(tokens))
        return keys_of(tokens, block, namespace)

    monkeypatch.setattr(eviction_policy, "keys_of", noted)
    for _ in range(3):
        assert not server.manager.make_room(60)
    server.manager.pins.ledger.shed(pin.id, 15)
    for _ in range(3):
        assert not server.manager.make_room(60)
    assert hashed == [20, 15]


@pytest.mark.parametrize("mode", ["prefill", "null"])
def test_on_a_prefill_server_pins_stay_while_kv_is_being_sent(kind, mode, monkeypatch):
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(disaggregation_mode=mode))
    server = SmallServer(kind, slots=200, settings=pinning(50))
    server.serve(prompt(1, 80))
    pin = server.manager.pin(prompt(1, 80))
    sent = server.send(prompt(2, 70), 1)
    assert server._prefill()
    server.running.reqs.remove(sent)  # the scheduler has it in its queue of transfers
    waits = server.send(prompt(3, 60), 1)
    assert server._prefill() == (mode == "null")
    assert (server.manager.counters.pins_shed > 0) == (mode == "null")
    server.running.batch_is_full = False  # as a prefill server does before each round
    server._release(sent, insert=True)
    if mode == "prefill":
        assert server._prefill()
    assert waits in server.running.reqs
    assert (server.manager.pins.locked_tokens(pin.id) == 80) == (mode == "prefill")


def test_a_request_whose_transfer_failed_holds_no_pins(kind, monkeypatch):
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(disaggregation_mode="prefill"))
    server = SmallServer(kind, slots=200, settings=pinning(50))
    server.serve(prompt(1, 80))
    server.manager.pin(prompt(1, 80))
    lost = server.send(prompt(2, 70), 1)
    assert server._prefill()
    server.running.reqs.remove(lost)
    lost.finished_reason = FINISH_ABORT("the transfer failed")
    server.send(prompt(3, 60), 1)
    assert server._prefill()


def test_an_idle_microbatch_waits_for_the_others_before_pins_give_way(kind: str) -> None:
    server = SmallServer(kind, slots=200, settings=pinning(50))
    server.serve(prompt(1, 80))
    pin = server.manager.pin(prompt(1, 80))
    busy, idle = server.running, SimpleNamespace(reqs=[], batch_is_full=False)
    server.running_mbs, server.mbs = [busy, idle], [busy, None]
    server.send(prompt(2, 70), 2)
    assert server.step()
    server.running = idle
    waits = server.send(prompt(3, 60), 1)
    for _ in range(2):
        assert not server._prefill()
        assert not idle.batch_is_full
    assert server.manager.counters.pins_shed == 0
    server.running = busy
    while busy.reqs:
        assert server._decode()
    server.running = idle
    assert server._prefill()
    assert waits in idle.reqs
    assert server.manager.pins.locked_tokens(pin.id) == 80


def test_pins_give_way_to_a_microbatch_where_no_other_one_runs(kind: str) -> None:
    server = SmallServer(kind, slots=200, settings=pinning(50))
    server.serve(prompt(1, 80))
    server.manager.pin(prompt(1, 80))
    server.running_mbs = [SimpleNamespace(reqs=[], batch_is_full=False), server.running]
    server.mbs = [None, None]
    server.send(prompt(3, 150), 1)
    assert server._prefill()
    assert server.manager.counters.pins_shed == 1


def test_without_pins_and_retention_the_cache_is_sglangs(kind: str) -> None:
    with_hooks, without = (SmallServer(kind, slots=64, settings=s) for s in (pinning(), None))
    for server in (without, with_hooks):
        for name in (1, 2, 3, 1, 4, 5, 1, 2):
            server.serve(prompt(name))
    assert (with_hooks.cached_tokens, with_hooks.prompt_tokens) == (without.cached_tokens, without.prompt_tokens)


@pytest.mark.parametrize("retains", [True, False])
def test_retention_keeps_what_the_queue_will_use_and_sglangs_own_order_would_have_lost_it(kind, retains):
    server = SmallServer(kind, slots=64, rows=1, settings=retention() if retains else pinning())
    server.serve(prompt(1))
    for name in (2, 3, 4, 5, 6, 7):
        server.send(prompt(name), 1)
    server.send([*prompt(1), 5], 1)
    server.run()
    assert server.cached_tokens == (20 if retains else 0)
    assert (server.manager.counters.evictions_avoided >= 20) == retains
    assert server.manager.counters.failures == 0


def test_only_what_was_computed_and_evicted_counts_as_recomputed(kind: str) -> None:
    server = SmallServer(kind, slots=200, settings=retention())
    for _ in range(4):
        server.send(prompt(1, 30), 3)  # all are admitted before the first has computed anything
    server.run()
    assert (server.cached_tokens, server.manager.counters.recomputed_tokens) == (0, 0)
    for name in range(2, 12):
        server.serve(prompt(name, 60))
    assert server.serve(prompt(1, 30)) == 0
    assert server.manager.counters.recomputed_tokens == 30
    assert server.manager.counters.failures == 0


def test_a_group_is_kept_until_its_last_member_and_then_goes_first(kind: str) -> None:
    server = SmallServer(kind, slots=64, settings=retention(lookahead=0))
    shared = SharedPrefix(0, 0, 20, 3)
    places = [Place("job", number, 20 if number else 0, 1, (shared,)) for number in range(3)]
    assert server.serve([*prompt(1), 1], place=places[0]) == 0
    for number in (1, 2):
        for name in (2, 3, 4):
            server.serve(prompt(name))
        assert server.serve([*prompt(1), 1 + number], place=places[number]) == 20
    assert len(server.manager.retention.offline) == 0
    server.serve(prompt(5))
    server.serve(prompt(6))
    assert server.serve([*prompt(1), 9]) < 20
    assert server.manager.counters.failures == 0


def test_a_reset_that_nobody_told_about_is_noticed(server: SmallServer) -> None:
    if server.kind == "tree locks":
        pytest.skip("a native core's root keeps its number; its reset is told by flush_cache")
    server.serve(prompt(1))
    server.manager.pin(prompt(1))
    server.cache.reset()
    server.pool.clear()
    server.allocator.clear()
    server.manager.pin(prompt(2))
    assert [pin.tokens[0] for pin in server.manager.pins.ledger.pins()] == [2000]


def test_two_caches_of_one_process_keep_their_own_pins(kind: str) -> None:
    first, second = (SmallServer(kind, slots=64, settings=pinning()) for _ in range(2))
    pin = first.manager.pin(prompt(1))
    assert second.manager.pins.ledger.pins() == []
    assert first.manager.pins.ledger.pins() == [pin]


def test_a_disaggregated_decode_server_has_neither_pins_nor_retention(kind, monkeypatch, caplog):
    monkeypatch.setattr(versions, "server_args", lambda: SimpleNamespace(disaggregation_mode="decode"))
    settings = PinningSettings(budget_percent=100, retention=True)
    server = SmallServer(kind, slots=64, settings=settings)
    server.serve(prompt(1))
    assert server.hooks.state.manager_of(server.cache) is None
    assert caplog.text.count("no pins and no retention: this is a decode server") == 1


class TestCommands:
    def test_a_shortened_pin_is_released_with_the_prefix_that_was_pinned(self, server: SmallServer) -> None:
        server.serve(prompt(1, 50))
        pin = PinCommand(token_ids=prompt(1, 50), label="x", ttl_steps=9)
        made = commands.answer(commands.encode(pin), server.manager)
        server.manager.pins.ledger.advance(2)
        assert commands.answer(commands.encode(ListCommand()), server.manager)["pins"] == [
            {**made["pin"], "steps_left": made["pin"]["steps_left"] - 2}
        ]
        assert made["pin"]["steps_left"] == 9
        assert (made["pinned_tokens"], made["pin"]["label"], made["pin"]["cached_tokens"]) == (50, "x", 50)
        assert server.manager.make_room(server.allocator.available_size() + server.cache.evictable_size() + 10)
        command = commands.encode(ReleaseCommand(token_ids=prompt(1, 50)))
        assert commands.answer(command, server.manager)["released"] == [made["pin"]["id"]]
        assert server.cache.protected_size() == 0

    @pytest.mark.parametrize(
        ("request_id", "error"),
        [
            (commands.encode(PinCommand(token_ids=[7] * 40)), "budget"),
            (commands.encode(ReleaseOneCommand(id=5)), "unknown"),
            (commands.encode(ReleaseCommand(token_ids=[5])), "unknown"),
        ],
    )
    def test_refusals(self, request_id: str, error: str) -> None:
        manager = SmallServer(CACHES[0], slots=64, settings=pinning(50)).manager
        assert commands.answer(request_id, manager)["error"]["kind"] == error

    @pytest.mark.parametrize("of_their_own", [True, False], ids=["up to 0.5.20", "0.5.23"])
    @pytest.mark.parametrize(("rank", "said"), [(3, {"data_parallel_rank": 3}), (None, {})])
    def test_an_answer_says_which_copy_gave_it(self, rank, said, of_their_own, monkeypatch):
        server = SmallServer(CACHES[0], slots=64, settings=pinning(50))
        scheduler = SimpleNamespace(tree_cache=server.cache)
        ranks = SimpleNamespace(dp_rank=rank)
        if of_their_own:
            scheduler.ps = ranks
        else:
            monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: ranks)
        request = SimpleNamespace(rid=commands.encode(ListCommand()))
        output = server.hooks.around_get_internal_state(lambda *args: None, scheduler, request)
        nothing = {"pins": [], "pinned_tokens": 0, "budget_tokens": 32}
        assert output.internal_state[commands.ANSWER_KEY] == {**nothing, **said}

    def test_a_cache_that_cannot_be_pinned_says_so(self) -> None:
        answer = commands.answer(commands.encode(ListCommand()), None)
        assert answer["error"]["kind"] == "unavailable"
