"""Time and memory of the prefix tree of a large batch, on one core.

python -m benchmarks.offline.tree_time [--prompts 100000] [--tokens 2000] [--out FILE]

Three batches: groups of 16 that share 90 % (shuffled), all prompts share all but one token (the longest comparisons
there can be), and three levels (instruction, document, question).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sgl_prefix_attn.offline.prefix_tree import PrefixTree
from sgl_prefix_attn.offline.prompts import Prompts

VOCABULARY = 32_000


def groups_of_16(rows: np.ndarray, random: np.random.Generator) -> None:
    """90 % of a prompt is shared by 16 prompts; order shuffled."""
    shared = rows.shape[1] * 9 // 10
    number = random.permutation(len(rows)) // 16
    for row, group in zip(rows, number, strict=True):
        row[:shared] = np.random.default_rng(int(group)).integers(0, VOCABULARY, shared)


def one_token_differs(rows: np.ndarray, random: np.random.Generator) -> None:
    """Every prompt is the same but for its last token."""
    rows[:] = random.integers(0, VOCABULARY, rows.shape[1])
    rows[:, -1] = np.arange(len(rows))


def three_levels(rows: np.ndarray, random: np.random.Generator) -> None:
    """One instruction (5 %), 1,000 documents (85 %), questions; order shuffled."""
    instruction, document = rows.shape[1] // 20, rows.shape[1] * 9 // 10
    rows[:, :instruction] = random.integers(0, VOCABULARY, instruction)
    number = random.integers(0, 1000, len(rows))
    for row, group in zip(rows, number, strict=True):
        row[instruction:document] = np.random.default_rng(int(group)).integers(0, VOCABULARY, document - instruction)


CASES: dict[str, Callable[[np.ndarray, np.random.Generator], None]] = {
    "groups of 16, 90 % shared": groups_of_16,
    "one token differs": one_token_differs,
    "three levels": three_levels,
}


def measure(count: int, tokens: int, fill: Callable[[np.ndarray, np.random.Generator], None]) -> dict[str, float]:
    random = np.random.default_rng(0)
    rows = random.integers(0, VOCABULARY, (count, tokens), dtype=np.int32)
    fill(rows, random)
    prompts = Prompts(rows.reshape(-1), np.arange(count + 1, dtype=np.int64) * tokens)
    before = time.process_time()
    tree = PrefixTree(prompts)
    built = time.process_time()
    groups = tree.enlarged_first_level()
    return {
        "build_seconds": round(built - before, 3),
        "first_level_seconds": round(time.process_time() - built, 3),
        "nodes": tree.num_nodes,
        "groups": len(np.unique(groups)),
        "saving": round(tree.saving, 4),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    args = parser.parse_args()
    results = {name: measure(args.prompts, args.tokens, fill) for name, fill in CASES.items()}
    print(f"{args.prompts:,} prompts of {args.tokens:,} tokens, CPU seconds on one core; peak memory with the prompts")
    for name, result in results.items():
        print(f"{name:28s}", "  ".join(f"{key} {value:,}" for key, value in result.items()))
    if args.out:
        record = {"prompts": args.prompts, "tokens": args.tokens, "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
