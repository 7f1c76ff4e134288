"""An SGLang plug-in for tests: each scheduler process writes down what our code decided in it, in order.

A file `RANK_EVENTS/<pid>.jsonl` for each process: what is its own (rank, hash seed, addresses), then a line an event.
The process of rank 1 also pauses at random, so that the ranks are never at the same place at the same time. Both stop
when the request LONG has LONG_TOKENS tokens, until it has been aborted: see `held`.

`python -m tests.pinning.rank_recorder RANK SCHEDULES` writes down what is decided in so many random schedules, without
a server; as rank 1 with a clock of another day that runs faster.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from sgl_prefix_attn.core.planner import Planner
from sgl_prefix_attn.pinning import PinLedger
from sgl_prefix_attn.sglang_plugin.pinning.eviction_policy import Retention
from sgl_prefix_attn.sglang_plugin.pinning.manager import PinningManager
from sgl_prefix_attn.sglang_plugin.pinning.pin_locks import PinLocks
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import GroupScheduler
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.startup.entry import in_scheduler_process
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

FOLDER = "RANK_EVENTS"
LONG, LONG_TOKENS = "long", 100
HELD_SECONDS = 120
ENTRY_POINT = "[sglang.srt.plugins]\nrank_recorder = tests.pinning.rank_recorder:register\n"
_FOREST = ("order", "node_parent", "node_begin", "node_end", "node_first", "node_last", "node_request", "tail_begin")
_PLAN = ("items", "query_token", "query_request", "query_back", "combine_query", "combine_offset", "combine_partial")

_file: TextIO | None = None
_pauses: random.Random | None = None


def install(folder: Path) -> None:
    """Makes this module a plug-in of every SGLang that has the folder in its PYTHONPATH."""
    distribution = folder / "rank_recorder-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-recorder\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text(ENTRY_POINT)


def register() -> None:
    """Called by SGLang in each of its processes."""
    if in_scheduler_process():
        record()


def record() -> None:
    """From now on, what is decided in this process is written down."""
    _after(PinLedger, "add", lambda ledger, pin, *a, **k: note("pinned", pin.id, len(pin.tokens), pin.expires))
    _after(PinLedger, "release", lambda ledger, pin, *a: note("released", pin.id))
    _after(PinLedger, "advance", _advanced)
    _after(PinLedger, "shed", lambda ledger, left, pin_id, *a, **k: note("shed", pin_id, left and len(left.tokens)))
    _after(PinLedger, "clear", lambda ledger, pins: note("cleared", [pin.id for pin in pins]))
    _after(PinLocks, "_acquire", lambda pins, _, pin: note("locked", pin.id, pins.locked_tokens(pin.id)))
    _after(
        Retention, "announce_shared", lambda retention, _, request, shared, *a: note("announced", request.rid, *shared)
    )
    _after(Retention, "queue", lambda retention, _, waiting: note("ahead", retention.scores.lookahead.requests()))
    _after(PinningManager, "step", _stepped)
    _after(Retention, "_evict", lambda _, freed, n, wanted: note("evicted", wanted, freed, n.id, n.begin, n.end))
    _after(GroupScheduler, "queue_ordered", _arranged)
    _after(GroupScheduler, "holds_back", _asked_to_wait)
    _after(SharedPrefill, "holds_back", _passed_over)
    _after(BatchTracker, "step", _paths_read)
    _after(Planner, "plan", lambda planner, plan, *a, **k: note("plan", planner.plans_made, _digest(plan, _PLAN)))
    _after(Counters, "as_dict", _counted)


def events(folder: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """What is each rank's own, and what it wrote down, a line an event; rank 0 first."""
    texts = [path.read_text().splitlines() for path in folder.glob("*.jsonl")]
    ranks = sorted(((json.loads(lines[0]), lines[1:]) for lines in texts), key=lambda rank: rank[0]["rank"])
    return [own for own, _ in ranks], [lines for _, lines in ranks]


def assert_alike(own: list[dict[str, Any]], ranks: list[list[str]]) -> Counter[str]:
    """Fails unless two ranks wrote down the same, though nothing else is the same; returns how much of each kind."""
    assert [rank["rank"] for rank in own] == [0, 1]
    for name in ("hash of a string", "address", "clock"):
        assert own[0][name] != own[1][name], f"the ranks have the same {name}: they could not have disagreed over it"
    for number, (first, second) in enumerate(itertools.zip_longest(*ranks)):
        assert first == second, f"event {number}: rank 0 {first}, rank 1 {second}"
    return Counter(json.loads(line)[0] for line in ranks[0])


def note(kind: str, *what: Any) -> None:
    """Writes an event down."""
    global _file, _pauses
    if _file is None:
        rank = _rank()
        _file = (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("w")
        _pauses = random.Random(os.getpid()) if rank == 1 else None
        own = {"rank": rank, "hash of a string": hash("prefix"), "address": id(_file), "clock": time.monotonic()}
        print(json.dumps(own), file=_file)
    print(json.dumps([kind, *what]), file=_file, flush=True)
    if _pauses is not None and _pauses.random() < 0.02:
        time.sleep(_pauses.random() * 0.01)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """A block that begins when rank 0 has stopped for LONG, and after which the ranks go on."""
    reached = folder / "reached"
    deadline = time.monotonic() + HELD_SECONDS
    while not reached.exists():
        assert time.monotonic() < deadline, f"request {LONG!r} has not got {LONG_TOKENS} tokens"
        time.sleep(0.01)
    yield
    (folder / "go on").touch()


def _stop_for_long(batch: Any) -> None:
    if not any(request.rid == LONG and len(request.output_ids) >= LONG_TOKENS for request in batch.reqs):
        return
    folder = Path(os.environ[FOLDER])
    if _rank() == 0:
        (folder / "reached").touch()
    deadline = time.monotonic() + HELD_SECONDS
    while not (folder / "go on").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def _after(owner: type, name: str, then: Callable[..., None]) -> None:
    """`then(self, result, *arguments)` after each call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self, result, *args, **kwargs)
        return result

    setattr(owner, name, method)


def _advanced(ledger: PinLedger, ended: Any, *args: Any) -> None:
    if ended:
        note("expired", [pin.id for pin in ended], ledger.step)


def _stepped(manager: PinningManager, result: None) -> None:
    cache = manager.pins._cache
    pool = (manager._allocator.available_size(), cache.evictable_size(), cache.protected_size())
    note("step", manager.pins.ledger.step, *pool, manager.counters.as_dict())


def _arranged(scheduler: GroupScheduler, result: None, policy: Any, queue: list[Any]) -> None:
    if any(scheduler.places.place_of(request) is not None for request in queue):
        note("order", [request.rid for request in queue])


def _asked_to_wait(scheduler: GroupScheduler, waits: str | None, adder: Any, request: Any) -> None:
    if scheduler.places.place_of(request) is not None:
        note("waits" if waits else "may go", request.rid, dict(scheduler.held_back))


def _passed_over(prefills: SharedPrefill, waits: str | None, adder: Any, request: Any) -> None:
    if waits:
        note("passed over", request.rid, len(request.origin_input_ids))


def _paths_read(tracker: BatchTracker, step: Any, batch: Any) -> None:
    _stop_for_long(batch)
    known = isinstance(step, StepPaths)
    note("paths", [step.mode, step.num_requests, _digest(step.forest, _FOREST)] if known else step.key)


def _counted(counters: Counters, values: dict[str, Any]) -> None:
    note("totals", {name: value for name, value in values.items() if not name.endswith("_seconds")})


def _digest(of: Any, names: tuple[str, ...]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for name in names:
        values = getattr(of, name)
        state.update(f"{name}{values.shape}{values.dtype}".encode() + values.tobytes())
    return state.hexdigest()


def _rank() -> int:
    import torch

    return int(torch.distributed.get_rank() if torch.distributed.is_initialized() else sys.argv[1])


def _of_another_day(clock: Callable[[], float]) -> Callable[[], float]:
    start = clock()
    return lambda: 1e5 + start + 10 * (clock() - start)


def _main(rank: int, schedules: int) -> None:
    if rank == 1:
        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, _of_another_day(getattr(time, name)))
    from tests.pinning.random_schedule import run

    record()
    run(0, schedules)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
