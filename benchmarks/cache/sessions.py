"""Prompt tokens computed with sessions and hints, against SGLang's LRU, on slices of a trace: real trees, no model.

The pool is a part of the working set: the blocks of sessions that still have turns to come. A session's last turn says
that it is the last, as an agent's client does. Outputs and the ends of prompts, shorter than a block, are not cached.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.cache import blocks, real, trace

POLICIES = {
    "hints": {"retention": True, "remember": False},
    "reuse": {"retention": True, "remember": True},
    "reuse without hints": {"retention": True, "remember": True, "told": False},
}


def measure(prompts: Sequence[trace.Prompt], part: float, kind: str) -> dict[str, object]:
    """Blocks computed by each policy as a share of those that LRU computes, in a pool of this part.

    "optimum" knows all requests to come.
    """
    turns = trace.turns_of(prompts)
    needed = trace.working_set(prompts, turns)
    pool = max(round(part * needed), max(len(prompt.blocks) for prompt in prompts) + 1)
    lru = real.replay(prompts, pool, kind, "lru")
    ratios = {}
    for name, policy in POLICIES.items():
        options = {key: value for key, value in policy.items() if key != "told"}
        told = turns if policy.get("told", True) else None
        result = real.replay(prompts, pool, kind, "lru", turns=told, **options)  # type: ignore[arg-type]
        ratios[name] = round((1 - result.saved) / (1 - lru.saved), 4)
    ratios["optimum"] = round((1 - blocks.limit(prompts, pool, blocks.NEVER)) / (1 - lru.saved), 4)
    sessions = len({turn.session for turn in turns})
    return {
        "requests": len(prompts), "sessions": sessions, "working_set": round(needed), "pool": pool,
        "unbounded": round(trace.unbounded(prompts), 4), "lru": asdict(lru), "computed_against_lru": ratios,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=3000, help="of a slice")
    parser.add_argument("--slices", type=int, default=3)
    parser.add_argument("--seed", type=int, help="default: drawn")
    parser.add_argument("--part", type=float, default=1 / 3, help="the pool, as a part of the working set")
    parser.add_argument("--cache", default="UnifiedRadixCache", choices=real.CACHES)
    args = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    dice = random.Random(seed)
    prompts = [
        trace.Prompt(prompt.blocks[: prompt.full], prompt.full) for prompt in trace.read(args.trace) if prompt.full
    ]
    slices = []
    for _ in range(args.slices):
        begin = dice.randrange(max(1, len(prompts) - args.requests))
        slices.append({"begin": begin, **measure(prompts[begin : begin + args.requests], args.part, args.cache)})
        print(json.dumps(slices[-1]), flush=True)
    result = {"trace": args.trace.name, "seed": seed, "part": args.part, "cache": args.cache, "slices": slices}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
