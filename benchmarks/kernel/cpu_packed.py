"""Packed against request-wise decode attention on the CPU, for the 20 trees of PAT's Figure 9.

    python benchmarks/kernel/cpu_packed.py --out benchmarks/results/cpu_packed.json

Three baselines compute the same step, the first two timed in turn: `packed` runs the planner's plan; `request-wise`
runs the plan of the same requests without their sharing on the same executor; `sdpa` is torch's
scaled_dot_product_attention request by request over gathered KV, as SGLang's torch_native backend does it, timed on
some requests of the batch and scaled up to all. Planning is not in these times (see plan_time.py: a plan serves all
layers and many steps). Every result is checked before timing.

Where the planner finds that packing does not pay, both plans are the same, and so is the work: the ratio of such a row
is what the machine's noise makes of 1.0, and the summary says how far that goes. Besides the time on the clock, whose
ratio is taken round by round (median and quartiles), the processor time of all threads is recorded (least of all
rounds): what others take away on a busy machine is not in it.

float32 is what this project's CPU server computes in; bfloat16 has half the bytes to read and the same arithmetic, so
that less can be won. Trees whose KV would exceed --max-kv-gib have all lengths halved until it does not; `token_scale`
of a row says so. --tp computes one rank's share of the heads: forest, batch, lengths and GQA group stay as published,
but request-wise attention finds a prefix of fewer heads in the caches more easily.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import sgl_prefix_attn
from benchmarks.provenance import cpu_name, git_commit
from sgl_prefix_attn import _native
from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Plan, Planner
from sgl_prefix_attn.workloads.committed import PAT_HEADS, PAT_TREES, tree_paths
from tests.support.reference import reference_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest output
HEAD_DIM = 128
SCALE = 1 / math.sqrt(HEAD_DIM)
GIB = 1 << 30
SHARED_ENOUGH, SPEEDUP_WANTED = 5.0, 2.0  # sharing limit from which packing is expected to pay twofold

Path_ = list[tuple[int, int, int]]


class Storage:
    """Noise for the KV caches of all cases, made once."""

    def __init__(self, kv_gib: float, dtype: torch.dtype) -> None:
        elements = int(kv_gib * GIB / 2 / dtype.itemsize)
        noise = torch.randn(min(elements, 3_999_971), generator=torch.Generator().manual_seed(1)).to(dtype)
        self.k, self.v = torch.empty(elements, dtype=dtype), torch.empty(elements, dtype=dtype)
        for buffer, start in ((self.k, 0), (self.v, len(noise) // 2)):
            rolled = noise.roll(start)
            for begin in range(0, elements, len(noise)):
                part = buffer[begin : begin + len(noise)]
                part.copy_(rolled[: len(part)])

    def caches(self, slots: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = slots * heads * HEAD_DIM
        return self.k[:count].view(slots, heads, HEAD_DIM), self.v[:count].view(slots, heads, HEAD_DIM)


class Case:
    """A decode step of one tree with one head setting: its tensors, and the baselines to compute it."""

    def __init__(self, tree: str, heads: tuple[int, int], storage: Storage, args: argparse.Namespace) -> None:
        self.threads: int = args.threads
        self.q_heads, self.kv_heads = heads[0] // args.tp, heads[1] // args.tp
        self.token_scale = 1.0
        while True:
            paths, lens = tree_paths(scaled(tree, self.token_scale))
            slots = sum(node[2] - node[1] for node in {node for path in paths for node in path})
            slots += sum(length - (path[-1][2] if path else 0) for path, length in zip(paths, lens, strict=True))
            if slots * self.kv_heads * HEAD_DIM <= len(storage.k):
                break
            self.token_scale /= 2
        generator = torch.Generator().manual_seed(0)
        self.seq_lens = torch.tensor(lens)
        self.req_pool_indices = torch.arange(len(paths))
        self.req_to_token = rows_of(paths, lens, torch.randperm(slots, generator=generator).to(torch.int32))
        self.k_cache, self.v_cache = storage.caches(slots, self.kv_heads)
        self.q = torch.randn(len(paths), self.q_heads, HEAD_DIM, generator=generator).to(storage.k.dtype)
        self.out = torch.empty_like(self.q)
        self.workspace = PartialWorkspace()
        self.packed = self._plan(paths)
        self.request_wise = self._plan([[] for _ in paths])
        if np.array_equal(self.packed.items, self.request_wise.items):
            self.request_wise = self.packed
        self.sampled = torch.linspace(0, len(paths) - 1, min(args.sdpa_requests, len(paths))).long().tolist()
        self.baselines: dict[str, Callable[[], torch.Tensor]] = {
            "packed": lambda: self._run_plan(self.packed),
            "request_wise": lambda: self._run_plan(self.request_wise),
            "sdpa": self._run_sdpa,
        }

    def _plan(self, paths: list[Path_]) -> Plan:
        shape = ModelShape(self.q_heads, self.kv_heads, HEAD_DIM, kv_bytes=self.k_cache.dtype.itemsize)
        forest = PrefixForest.from_paths(paths, prefix_lens=(self.seq_lens - 1).tolist())
        return Planner(shape, DeviceModel.cpu(self.threads)).plan(forest, self.seq_lens.numpy())

    def _run_plan(self, plan: Plan) -> torch.Tensor:
        return packed_attention(
            self.q, self.k_cache, self.v_cache, plan, req_to_token=self.req_to_token, seq_lens=self.seq_lens,
            req_pool_indices=self.req_pool_indices, scale=SCALE, out=self.out, workspace=self.workspace,
            threads=self.threads,
        )  # fmt: skip

    def _run_sdpa(self) -> torch.Tensor:
        for request in self.sampled:
            length = int(self.seq_lens[request])
            slots = self.req_to_token[request, :length]
            keys, values = self.k_cache[slots].movedim(0, 1), self.v_cache[slots].movedim(0, 1)
            query = self.q[request, None, :, None]
            self.out[request] = torch.nn.functional.scaled_dot_product_attention(
                query, keys[None], values[None], scale=SCALE, enable_gqa=self.q_heads != self.kv_heads
            )[0, :, 0]
        return self.out

    def check(self) -> float:
        """Largest error, in units of the largest output: of some requests against fp64, of all against each other."""
        sample = torch.linspace(0, len(self.q) - 1, min(4, len(self.q))).long()
        expected, _ = reference_attention(
            self.q[sample], self.k_cache, self.v_cache, req_to_token=self.req_to_token, query_lens=[1] * len(sample),
            req_pool_indices=self.req_pool_indices[sample], seq_lens=self.seq_lens[sample], scale=SCALE,
        )  # fmt: skip
        unit, worst, packed = expected.abs().max(), 0.0, None
        for name, run in self.baselines.items():
            self.out.fill_(torch.nan)
            result = run().double()
            packed = result if packed is None else packed
            done = self.sampled if name == "sdpa" else slice(None)
            error = ((result[done] - packed[done]).abs().max() / unit).item()
            if name != "sdpa":
                error = max(error, ((result[sample] - expected).abs().max() / unit).item())
            if not error <= TOLERANCE[self.q.dtype]:
                raise SystemExit(f"{name} is off by {error:.2g} of the largest output; not timing wrong results")
            worst = max(worst, error)
        return worst

    def measure(self, seconds: float, min_rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
        """By way: milliseconds of every run, and the least processor time of a run, all threads together.

        sdpa comes after the others: torch's threads look out for more work for a while, on cores that others need.
        """
        times: dict[str, list[float]] = {name: [] for name in self.baselines}
        processor = dict.fromkeys(self.baselines, math.inf)

        def take(name: str) -> float:
            start, spent = time.perf_counter(), time.process_time()
            self.baselines[name]()
            processor[name] = min(processor[name], (time.process_time() - spent) * 1e3)
            times[name].append((time.perf_counter() - start) * 1e3)
            return sum(times[name])

        while min(take("packed"), take("request_wise")) < seconds * 1e3 or len(times["packed"]) < min_rounds:
            pass
        while take("sdpa") < seconds * 1e3:
            pass
        return times, processor


def scaled(tree: str, factor: float) -> str:
    counts, lengths = tree.split("/")
    return counts + "/" + ",".join(str(max(1, round(int(length) * factor))) for length in lengths.split(","))


def rows_of(paths: list[Path_], lens: list[int], slots: torch.Tensor) -> torch.Tensor:
    """req_to_token rows, slots handed out in the order of `slots`."""
    table = torch.zeros(len(paths), max(lens), dtype=torch.int32)
    slots_of_node: dict[int, torch.Tensor] = {}
    taken = 0
    for request, (path, length) in enumerate(zip(paths, lens, strict=True)):
        shared = 0
        for node, begin, end in path:
            if node not in slots_of_node:
                slots_of_node[node] = slots[taken : taken + end - begin]
                taken += end - begin
            table[request, begin:end] = slots_of_node[node]
            shared = end
        table[request, shared:length] = slots[taken : taken + length - shared]
        taken += length - shared
    return table


def measure_case(
    number: int, tree: str, dtype: str, heads: tuple[int, int], storage: Storage, args: argparse.Namespace
) -> dict[str, Any]:
    case = Case(tree, heads, storage, args)
    error = case.check()
    times, processor = case.measure(args.seconds, args.min_rounds)
    median = {name: statistics.median(runs) for name, runs in times.items()}
    paired = [slow / fast for slow, fast in zip(times["request_wise"], times["packed"], strict=True)]
    low, middle, high = statistics.quantiles(paired, n=4)
    sdpa_ms = median["sdpa"] * len(case.q) / len(case.sampled)
    plan = case.packed
    kv_bytes = 2 * case.kv_heads * HEAD_DIM * case.k_cache.dtype.itemsize
    flops = 4 * plan.kv_tokens_per_request * case.q_heads * HEAD_DIM  # every query head against all it sees
    return {
        "number": number, "tree": tree, "dtype": dtype, "q_heads": heads[0], "kv_heads": heads[1],
        "token_scale": case.token_scale, "requests": len(case.q), "items": len(plan.items),
        "partial_slots": plan.num_partials,
        "kv_tokens_packed": plan.kv_tokens_packed, "kv_tokens_per_request": plan.kv_tokens_per_request,
        "kv_tokens_unique": plan.kv_tokens_unique, "limit": plan.kv_tokens_per_request / plan.kv_tokens_unique,
        "packed_ms": median["packed"], "request_wise_ms": median["request_wise"], "sdpa_ms": sdpa_ms,
        "same_plan": case.request_wise is case.packed,
        "speedup": middle, "speedup_quartiles": [low, high],
        "processor_speedup": processor["request_wise"] / processor["packed"],
        "packed_processor_ms": processor["packed"], "request_wise_processor_ms": processor["request_wise"],
        "speedup_over_sdpa": sdpa_ms / median["packed"],
        "packed_gflops": flops / median["packed"] / 1e6,
        "packed_gb_s": plan.kv_tokens_packed * kv_bytes / median["packed"] / 1e6,
        "request_wise_gb_s": plan.kv_tokens_per_request * kv_bytes / median["request_wise"] / 1e6,
        "rounds": len(times["packed"]), "sdpa_rounds": len(times["sdpa"]), "error": error,
    }  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("packed ms", "req-wise", "sdpa", "speedup", "processor", "vs sdpa", "GFLOP/s", "GB/s")
    print(f"{'#':>3} {'dtype':>8} {'heads':>6} {'limit':>6} " + " ".join(f"{name:>9}" for name in columns) + "  tree")
    for row in rows:
        print(
            f"{row['number']:>3} {row['dtype']:>8} {row['q_heads']:>3}/{row['kv_heads']:<2} {row['limit']:>5.1f}x "
            f"{row['packed_ms']:>9.2f} {row['request_wise_ms']:>9.2f} {row['sdpa_ms']:>9.1f} {row['speedup']:>8.2f}x "
            f"{row['processor_speedup']:>8.2f}x {row['speedup_over_sdpa']:>8.1f}x {row['packed_gflops']:>9.1f} "
            f"{row['packed_gb_s']:>9.1f}  {row['tree']}{'  (same plan)' if row['same_plan'] else ''}"
        )


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the targets are about, by dtype; each as (by the clock, in processor time)."""

    def smallest(chosen: list[dict[str, Any]]) -> list[float] | None:
        if not chosen:
            return None
        return [min(row["speedup"] for row in chosen), min(row["processor_speedup"] for row in chosen)]

    summary: dict[str, Any] = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        same = [ratio for row in mine if row["same_plan"] for ratio in (row["speedup"], row["processor_speedup"])]
        enough = [row for row in mine if row["limit"] > SHARED_ENOUGH and row["q_heads"] == row["kv_heads"]]
        summary[dtype] = {
            "smallest_at_32_32_above_limit_5": smallest(enough),
            "below_2_at_32_32_above_limit_5": [
                [row["number"], row["speedup"], row["processor_speedup"]]
                for row in enough
                if min(row["speedup"], row["processor_speedup"]) < SPEEDUP_WANTED
            ],
            "smallest_where_plans_differ": smallest([row for row in mine if not row["same_plan"]]),
            "noise_where_plans_are_the_same": [min(same), max(same)] if same else None,
        }
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtypes",
        choices=DTYPES,
        nargs="+",
        default=["float32", "bfloat16"],
        help="of q, KV and output (default float32 bfloat16)",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: as torch")
    parser.add_argument(
        "--tp",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        help="tensor-parallel ranks; one rank's heads are computed (default 1)",
    )
    parser.add_argument("--max-kv-gib", type=float, default=5.0, help="largest KV cache (default 5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each way of each case (default 0.5)")
    parser.add_argument("--min-rounds", type=int, default=5, help="rounds of each case, two at least (default 5)")
    parser.add_argument("--sdpa-requests", type=int, default=4, help="requests that sdpa is timed on (default 4)")
    parser.add_argument("--trees", default="", help="numbers of the trees, e.g. 1,3,20 (default: all)")
    parser.add_argument("--heads", default="", help="head settings, e.g. 32/32,64/8 (default: all)")
    parser.add_argument("--out", type=Path, help="write the rows and the machine as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numbers = [int(number) for number in args.trees.split(",") if number] or range(1, len(PAT_TREES) + 1)
    wanted = [heads for heads in PAT_HEADS if not args.heads or f"{heads[0]}/{heads[1]}" in args.heads.split(",")]
    cases = [(heads, number) for heads in wanted for number in numbers]
    rows = []
    with tqdm(total=len(args.dtypes) * len(cases), unit="case", file=sys.stderr) as progress:
        for dtype in args.dtypes:
            storage = Storage(args.max_kv_gib, DTYPES[dtype])
            for heads, number in cases:
                rows.append(measure_case(number, PAT_TREES[number - 1], dtype, heads, storage, args))
                progress.update()
            del storage
    print_table(rows)
    summary = summarize(rows)
    print(json.dumps(summary, indent=1))
    if args.out:
        machine = {
            "cpu": cpu_name(), "isa": _native.cpu_isas()[0], "threads": args.threads, "torch": torch.__version__,
            "python": platform.python_version(), "package": sgl_prefix_attn.__version__,
            "load": round(os.getloadavg()[0], 1), "commit": git_commit(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        }  # fmt: skip
        arguments = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"machine": machine, "arguments": arguments, "summary": summary, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
