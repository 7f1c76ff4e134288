"""Exceptions of ours in the real server: it lives, its tokens are the stock backend's, and metrics tell of each."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerOptions, serve
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, CONTEXT_LENGTH, POOL_TOKENS, state_of, tokens_of
from tests.e2e.injected import FAULTS, PLACES, Faults, of_rank
from tests.support import forked_server
from tests.support.ranks import TWO_RANKS

pytestmark = pytest.mark.e2e

# Each of its requests ends before the next one is sent, so that all are prefilled again.
WORKLOADS = (workloads.diverging, workloads.ragged, workloads.refills)
ENDS_WITH = {"shared_prefill", "group_scheduling"}  # features that end with their first exception


def started(command, environment, output):
    return forked_server.start_without_warm_up([*command[:2], "tests.e2e.injected", *command[3:]], environment, output)


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults.create(tmp_path / "faults")


@pytest.fixture
def both_ranks(tmp_path: Path, faults: Faults) -> tuple[Faults, Faults]:
    return faults, Faults.create(of_rank(tmp_path / "faults", 1))


@pytest.fixture
def server(model: Path, tmp_path: Path, faults: Faults, request: pytest.FixtureRequest) -> Iterator[Server]:
    sizes = ("--context-length", str(CONTEXT_LENGTH), forked_server.POOL, str(POOL_TOKENS))
    environment = {
        FAULTS: str(tmp_path / "faults"), "PREFIXPACK_ROUTE": "batch>=3",
        "PREFIXPACK_GROUP_SCHEDULING": "1", "PREFIXPACK_RETENTION": "reuse", "PREFIXPACK_PIN_BUDGET_PERCENT": "20",
        "PREFIXPACK_METRICS_FLUSH_STEPS": "1",
    }  # fmt: skip
    more = getattr(request, "param", ())
    environment |= TWO_RANKS if more else {}
    options = ServerOptions(
        model=str(model), backend=BACKEND, environment=environment, log_folder=tmp_path, starter=started,
        extra=(*sizes, *forked_server.MAY_TAKE_ALL, "--max-running-requests", "64", "--enable-metrics",
               "--enable-mixed-chunk", *more),
    )  # fmt: skip
    with serve(options) as running:
        yield running


def exported(server: Server, metric: str) -> dict[str, float]:
    """Values of a metric by its last label but those of SGLang."""
    found = re.findall(rf"^sglang[:_]prefixpack_{metric}\{{(.*)\}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    of_sglang = re.compile(r'(engine_type|model_name|\w+_rank|pid)="[^"]*",?')
    return {of_sglang.sub("", labels).strip(","): float(n) for labels, n in found}


def inject(server: Server, faults: Faults, seed: int, count: int, expected, vocabulary) -> None:
    """Makes `count` places raise one after the other, up to three times each, while requests run."""
    draw = random.Random(seed)
    failures: Counter[str] = Counter()
    ended: set[str] = set()
    for place in draw.sample(list(PLACES), count):
        times, workload = draw.randint(1, 3), draw.choice(WORKLOADS)
        requests = workload(vocabulary)
        server.flush_cache()
        replay(server.url, workloads.level_seeds(requests) or requests[:1])
        wanted = expected(requests)
        faults[place] = times
        for _ in range(2):  # the second time, prompts are cached but for their last token
            assert tokens_of(replay(server.url, requests)) == wanted, (place, times)
        server.info()
        raised, faults[place] = times - faults[place], 0
        told = Counter(state_of(server)["counters"]["failures"])
        new, failures = told - failures, told
        if PLACES[place] <= ended:
            assert raised == 0, place
            continue
        assert set(new) <= PLACES[place], (place, new)
        assert sum(new.values()) == raised > 0, (place, new, workload)
        ended |= ENDS_WITH & PLACES[place]
    assert exported(server, "failures_total") == {f'part="{part}"': n for part, n in failures.items()}
    state = state_of(server)
    assert set(state["disabled"]) == ended
    assert exported(server, "disabled") == {
        f'feature="{name}",reason="{why}"': 1.0 for name, why in state["disabled"].items()
    }
    assert state["counters"]["steps_packed"]["decode"] > 0


def test_exceptions_at_five_places_and_then_in_all_steps(server, faults, expected, vocabulary):
    inject(server, faults, 1, 5, expected, vocabulary)
    attend = "execution.cpu_executor:CpuExecutor.attend"
    faults[attend] = 1 << 20
    requests = workloads.diverging(vocabulary)
    wanted = expected(requests)
    for _ in range(2):
        assert tokens_of(replay(server.url, requests)) == wanted
    left = faults[attend]
    packed = state_of(server)["counters"]["steps_packed"]
    assert tokens_of(replay(server.url, requests)) == wanted
    state = state_of(server)
    assert faults[attend] == left, "nothing is packed any more"
    assert state["counters"]["steps_packed"] == packed
    assert (state["refused"], state["disabled"]["packing"]) == ("stopped", "stopped")
    assert exported(server, "disabled")['feature="packing",reason="stopped"'] == 1.0
    assert exported(server, "fallbacks_total")['reason="stopped"'] > 40


@pytest.mark.parametrize("server", [("--tp-size", "2")], indirect=True)
def test_one_rank_alone_runs_steps_stock(server, faults, expected, vocabulary):
    """The other rank runs them packed: their collectives are the same."""
    requests = workloads.diverging(vocabulary)
    wanted = expected(requests)
    for place in (
        "dispatch.step_router:StepRouter.decide", "execution.cpu_executor:Planner.plan",
        "execution.cpu_executor:CpuExecutor.attend", "prefix.batch_tracker:BatchTracker.step",
    ):  # fmt: skip
        server.flush_cache()
        faults[place] = 3
        assert tokens_of(replay(server.url, requests)) == wanted, place
        assert faults[place] == 0, place
    counters = state_of(server)["counters"]  # of rank 0
    assert counters["failures"] == {"step": 6, "layer": 3, "request_paths": 3}
    assert counters["fallbacks"]["exception"] == 9
    assert counters["steps_packed"]["decode"] > 0


@pytest.mark.parametrize("server", [("--tp-size", "2")], indirect=True)
def test_ranks_that_raise_at_the_same_place_admit_alike(both_ranks, server, expected, vocabulary):
    """As ranks do whose exception follows from the queue, the tree or a request."""
    requests = workloads.diverging(vocabulary)
    wanted = expected(requests)
    for place in (
        "pinning.manager:PinningManager.on_queue", "pinning.manager:PinningManager.admitted",
        "scheduling.shared_prefill:SharedPrefill.holds_back", "scheduling.group_scheduler:GroupScheduler.queue_ordered",
    ):  # fmt: skip
        server.flush_cache()
        for rank in both_ranks:
            rank[place] = 2
        assert tokens_of(replay(server.url, requests)) == wanted, place
        assert both_ranks[0][place] == both_ranks[1][place] < 2, place
    assert set(state_of(server)["disabled"]) == ENDS_WITH


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_exceptions_at_twenty_places(seed, server, faults, expected, vocabulary):
    inject(server, faults, seed, 20, expected, vocabulary)
