"""Host time of decode steps and of request ends with retention on and off, over SGLang's real prefix caches.

    python benchmarks/cache/retention_cost.py --label after
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/cache/retention_cost.py --label before

The pool is filled with one prompt of 64 tokens a branch, so it evicts from then on. Then 32 requests with prompts of 64
tokens decode 150 steps and end. Timed are the memory side of a step (eviction, allocation, hooks) and the
hook at a request's end; the model is not run. Runs with retention on and off alternate; each figure is the median of
the rounds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPT, REQUESTS, STEPS = 64, 32, 150
VOCABULARY = 32_000
CACHES = ("RadixCache", "UnifiedRadixCache")


@dataclass
class Request:
    """The fields of a request that pinning reads."""

    rid: int
    origin_input_ids: array[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    extra_key: str | None = None


class Pinning:
    """Pinning's hooks of the checkout that is imported, also of one with the module names of 0.3."""

    def __init__(self) -> None:
        plugin = "sgl_prefix_attn.sglang_plugin"
        try:
            self.module = importlib.import_module(f"{plugin}.pinning.hooks")
        except ModuleNotFoundError:
            self.module = importlib.import_module(f"{plugin}.pinning_hooks")
        try:
            self.settings = importlib.import_module(f"{plugin}.pinning.state")
        except ModuleNotFoundError:
            self.settings = self.module

    def activate(self, retention: bool) -> None:
        if hasattr(self.module, "PinningHooks"):
            self.hooks = self.module.PinningHooks(self.settings.PinningSettings(retention=retention, lookahead=0))
            self.state = self.hooks.state
        else:
            self.hooks, self.state = self.module, self.settings
            self.state.activate(self.state.PinningSettings(retention=True, lookahead=0) if retention else None)

    def failures(self, cache: Any) -> int:
        manager_of = getattr(self.state, "manager_of", None) or self.state.keeper_of
        manager = manager_of(cache)
        return 0 if manager is None else int(manager.counters.failures)


class Run:
    """One filled cache.

    Attributes:
        step_us, end_us: microseconds of each decode step, and of each request's end.
        locks: nodes locked by us during the decode steps.
    """

    def __init__(self, pinning: Pinning, kind: str, branches: int, retention: bool) -> None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        self.pinning = pinning
        self.evict = evict_from_tree_cache
        self.cache = _make_cache(kind, branches * PROMPT)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.tree_cache = self.cache  # as SGLang's scheduler, for the hooks
        self.dice = random.Random(branches)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(server_args=SimpleNamespace()))
        self.prompts = self.locks = 0
        self.step_us: list[float] = []
        self.end_us: list[float] = []
        pinning.activate(retention)
        for number in range(branches):
            self.serve(Request(number, self.prompt()))

    def prompt(self) -> array[int]:
        self.prompts += 1  # no two prompts begin alike
        return array("q", [VOCABULARY + self.prompts, *(self.dice.randrange(VOCABULARY) for _ in range(PROMPT - 1))])

    def make_room(self, tokens: int) -> Any:
        self.pinning.hooks.around_evict(self.evict, self.cache, tokens)
        slots = self.allocator.alloc(tokens)
        assert slots is not None, "the pool is too small"
        return slots

    def serve(self, request: Request) -> None:
        self.finish(request, self.make_room(len(request.origin_input_ids)))

    def finish(self, request: Request, slots: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = request.origin_input_ids + request.output_ids
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        started = time.perf_counter()
        self.pinning.hooks.after_release_kv(None, request, self.cache)
        self.end_us.append(1e6 * (time.perf_counter() - started))

    def decode(self) -> None:
        import torch

        running = [Request(-1 - number, self.prompt()) for number in range(REQUESTS)]
        owned = [[self.make_room(PROMPT)] for _ in running]
        self.end_us.clear()
        inc_lock_ref = self.cache.inc_lock_ref

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.locks += 1
            return inc_lock_ref(*args, **kwargs)

        self.cache.inc_lock_ref = counted
        for step in range(STEPS):
            started = time.perf_counter()
            slots = self.make_room(REQUESTS)
            self.pinning.hooks.after_run_batch(None, self)
            self.step_us.append(1e6 * (time.perf_counter() - started))
            for number, request in enumerate(running):
                owned[number].append(slots[number : number + 1])
                request.output_ids.append(1000 * number + step)
        for request, slots in zip(running, owned, strict=True):
            self.finish(request, torch.cat(slots).to(torch.int64))
        assert self.allocator.available_size() + self.cache.evictable_size() == self.allocator.size, "slots leaked"
        assert self.pinning.failures(self.cache) == 0, "a hook failed: see the log"


def _make_cache(kind: str, slots: int) -> Any:
    import torch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, need_sort=False),
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )
    return (RadixCache if kind == "RadixCache" else UnifiedRadixCache)(params)


def measure(kind: str, branches: int, rounds: int, done: Callable[[str], None]) -> dict[str, Any]:
    """Medians over the rounds, in microseconds, by whether retention is on."""
    pinning = Pinning()
    found: dict[bool, list[tuple[float, float, float, int]]] = {False: [], True: []}
    for number in range(rounds):
        for retention in (False, True) if number % 2 == 0 else (True, False):
            run = Run(pinning, kind, branches, retention)
            run.decode()
            steps = run.step_us
            found[retention].append((statistics.fmean(steps), max(steps), statistics.fmean(run.end_us), run.locks))
            done(f"{kind}, {branches} branches, round {number + 1}, retention {'on' if retention else 'off'}")
    row: dict[str, Any] = {"cache": kind, "branches": branches}
    for retention, name in ((False, "off"), (True, "on")):
        medians = [statistics.median(values) for values in zip(*found[retention], strict=True)]
        row[name] = {
            "step_us": round(medians[0], 1),
            "longest_step_us": round(medians[1], 1),
            "request_end_us": round(medians[2], 1),
            "locks_per_run": int(medians[3]),
        }
    return row


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{'':8}{'cache':18}{'branches':>9}{'step off':>12}{'step on':>12}{'on / off':>9}{'longest on':>12}"
        f"{'request end':>12}{'locks':>9}   (microseconds)"
    ]
    for label in ("before", "after"):
        for row in results.get(label, {}).get("rows", []):
            off, on = row["off"], row["on"]
            lines.append(
                f"{label:8}{row['cache']:18}{row['branches']:>9}{off['step_us']:>12}{on['step_us']:>12}"
                f"{on['step_us'] / off['step_us']:>9.2f}{on['longest_step_us']:>12}{on['request_end_us']:>12}"
                f"{on['locks_per_run']:>9}"
            )
    return "\n".join(lines)


def _commit() -> str | None:
    """HEAD of the checkout whose package is measured."""
    import sgl_prefix_attn

    folder = Path(sgl_prefix_attn.__file__).parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", choices=("before", "after"), default="after", help="key of the results in the file")
    parser.add_argument("--branches", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/retention_cost.json"))
    args = parser.parse_args(argv)
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "torch")}
    rows: list[dict[str, Any]] = []
    results[args.label] = {
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **versions},
        "rounds": args.rounds,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for branches in args.branches:
        for kind in args.caches:
            rows.append(measure(kind, branches, args.rounds, lambda text: print(text, file=sys.stderr, flush=True)))
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
