"""What no attention kernel can beat in a rollout: reads of each distinct KV token once a step.

    python -m benchmarks.serving.rollout_floor --prompt-tokens 1024 4096 --seed 274260052

Replays the requests of `benchmarks.serving.rollout` step by step: --running at a time, each one token a step, a slot is
refilled at once. Means are of --steps steps from the one on in which as many samples have ended as run at a time.
Bytes are those of --kv-bytes for each token of all layers (131,072: 32 layers, 8 KV heads of 128, 16 bits), and the
bandwidth is what copies reach on an H200. Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.serving.drawn import Rollout, rollout_requests
from sgl_prefix_attn.abtest.judge import table_lines
from sgl_prefix_attn.demo.workload import Request, Vocabulary

BANDWIDTH = 4.28e12
USED_VOCABULARY = Vocabulary(10, 128256)


def steps_of(requests: list[Request], running: int) -> Iterator[tuple[int, int, int]]:
    """Prompts that running requests have, distinct KV tokens, and KV tokens of all; by step of the steady state."""
    waiting, now, ended, begun = iter(requests), list[list[int]](), 0, False
    while True:
        for request in itertools.islice(waiting, running - len(now)):
            group = int(request.name.split("-")[1])
            now.append([group, len(request.prompt), request.max_new_tokens, 0])
        if len(now) < running:
            return
        for sample in now:
            sample[3] += 1
        begun = begun or ended >= running
        if begun:
            prompts, own = {sample[0]: sample[1] for sample in now}, sum(sample[3] for sample in now)
            yield len(prompts), sum(prompts.values()) + own, sum(sample[1] for sample in now) + own
        now = [sample for sample in now if sample[3] < sample[2]]
        ended += running - len(now)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--output-tokens", type=int, default=700)
    parser.add_argument("--groups", type=int, default=96)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument(
        "--longest", type=int, default=20480, help="tokens that a request may have; prompts are cut at half"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, required=True, help="of the rollout")
    parser.add_argument("--kv-bytes", type=int, default=131072, help="of a token, in all layers")
    args = parser.parse_args(argv)
    rows = [("prompt", "live prompts", "distinct KV", "read once", "read by each request")]
    for tokens in args.prompt_tokens:
        rollout = Rollout(args.groups, args.samples, tokens, args.output_tokens, args.longest, args.seed)
        requests = rollout_requests(rollout, USED_VOCABULARY)
        found = list(itertools.islice(steps_of(requests, args.running), args.steps))
        if len(found) < args.steps:
            parser.error(f"all requests ended after {len(found)} steps of the steady state; raise --groups")
        prompts, distinct, all_tokens = np.mean(found, axis=0)
        once, each = (count * args.kv_bytes / BANDWIDTH * 1e3 for count in (distinct, all_tokens))
        rows.append((str(tokens), f"{prompts:.1f}", f"{distinct / 1e3:.0f}K", f"{once:.1f} ms", f"{each:.1f} ms"))
    print("\n".join(table_lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
