"""Share of prompt tokens that a bounded prefix cache saves: LRU, SGLang's policies, ours, and what is possible.

    python -m benchmarks.cache TRACE.jsonl
    python -m benchmarks.cache TRACE.jsonl --pools 2000,5000 --lookahead 0,64 --only real

TRACE is in Mooncake's format: one request a line, `hash_ids` name the prompt's blocks of 512 tokens. Rows:

  limit K=k         blocks one by one; the optimum that knows the next k requests (0: LRU, all: the whole future)
  ours K=k          our retention under the same rules
  NAME policy       SGLang's real cache NAME with that eviction policy; lru+refresh refreshes waiting prefixes
  NAME ours K=k     SGLang's real cache NAME (lru) with our retention, through real locks and evictions
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.cache import blocks, real, trace
from benchmarks.cache.table import LRU, OPTIMUM, Results

POOLS = "200,500,1000,2000,5000,10000,20000"
LOOKAHEAD = "0,16,64,256,1024"
KINDS = ("limits", "blocks", "sglang", "real")
Replay = Callable[[Callable[[], object]], dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pools", type=_numbers, default=POOLS, help=f"blocks of 512 tokens (default {POOLS})")
    parser.add_argument("--lookahead", type=_numbers, default=LOOKAHEAD, help=f"K (default {LOOKAHEAD})")
    parser.add_argument("--caches", default=",".join(real.CACHES), help="SGLang's caches (default: all)")
    parser.add_argument("--policies", default=",".join((*real.SGLANG_POLICIES, real.REFRESH)), help="SGLang's policies")
    parser.add_argument("--only", default=",".join(KINDS), help=f"kinds of replays: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--requests", type=int, help="replay only the first N requests")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/cache_conversation.json"), help="results; a rerun adds"
    )
    args = parser.parse_args(argv)
    try:
        prompts = trace.read(args.trace, args.requests)
        results = Results(args.out, {"name": args.trace.name, "requests": len(prompts)})
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    work = [cell for cell in _cells(args, prompts) if not results.has(cell[0], cell[1])]
    with tqdm(total=len(work) * len(prompts), unit=" requests", unit_scale=True, disable=None) as bar:
        for row, pool, replay in work:
            bar.set_description(f"{row}, {pool} blocks")
            started = time.process_time()
            cell = replay(bar.update)
            results.put(row, pool, {**cell, "cpu_seconds": round(time.process_time() - started, 2)})
    print(results.table())
    print(f"without a limit: {100 * trace.unbounded(prompts):.2f} %")
    print(f"written: {args.out}")
    return 0


def _cells(args: argparse.Namespace, prompts: list[trace.Prompt]) -> Iterator[tuple[str, int, Replay]]:
    """(row, pool, replay) of everything that is asked for."""
    kinds = args.only.split(",")
    for pool in args.pools:
        if "limits" in kinds:
            yield LRU, pool, lambda tick, p=pool: {"saved": blocks.limit(prompts, p, 0, tick)}
            yield OPTIMUM, pool, lambda tick, p=pool: {"saved": blocks.limit(prompts, p, blocks.NEVER, tick)}
        for k in args.lookahead:
            if "limits" in kinds and k:
                yield f"limit K={k}", pool, lambda tick, p=pool, k=k: {"saved": blocks.limit(prompts, p, k, tick)}
            if "blocks" in kinds:
                yield (
                    f"ours K={k}",
                    pool,
                    lambda tick, p=pool, k=k: {"saved": blocks.ours(prompts, p, k, progress=tick)},
                )
        for cache in args.caches.split(","):
            for policy in args.policies.split(",") if "sglang" in kinds else ():
                yield f"{cache} {policy}", pool, _real(prompts, pool, cache, policy)
            for k in args.lookahead if "real" in kinds else ():
                yield f"{cache} ours K={k}", pool, _real(prompts, pool, cache, "lru", retention=True, lookahead=k)


def _real(prompts: list[trace.Prompt], pool: int, cache: str, policy: str, **options: Any) -> Replay:
    return lambda tick: asdict(real.replay(prompts, pool, cache, policy, progress=tick, **options))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers like 200,500") from None


if __name__ == "__main__":
    sys.exit(main())
