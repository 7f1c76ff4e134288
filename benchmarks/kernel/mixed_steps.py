"""Steps with several query rows a request on a GPU: mixed steps, and verify steps of speculative decoding.

    python -m benchmarks.kernel.mixed_steps --list
    python -m benchmarks.kernel.mixed_steps --cases 90 --out build/mixed_steps.json --resume
    python -m benchmarks.kernel.mixed_steps --cases 90 --ways prefixpack fa3 flashinfer_pod --out build/pod.json
    python -m benchmarks.kernel.mixed_steps --verify 4 --cases 60 --out build/verify_4.json
    python -m sgl_prefix_attn abtest steps build/verify_4.json auto conservative

Cases are drawn by `mixed_cases`: as the papers on POD and PackInfer do, with --wide over more lengths and heads, with
--verify N as verify steps; `abtest steps` judges the rule that routes those. Baselines:

    prefixpack  all rows in one plan
    fa3         all rows in one call, as SGLang runs a mixed or a verify step
    fa3_split   FA3 in two calls, one for prefill rows and one for decode rows (mixed steps)
    flashinfer_batch_attention  over all rows
    flashinfer_pod              POD over batches: prefill and decode rows in one launch (mixed steps)

FlashInfer compiles POD at first use, which takes minutes: it runs only if --ways names it. --list predicts `prefixpack`
with the makespan simulator and needs no GPU. --resume goes on with the file's seed and skips the cases that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernel.fixture import Fixture, KvPool, pool_elements, relative_error, rows
from benchmarks.kernel.gpu_report import OURS
from benchmarks.kernel.mixed_cases import RowsCase, draw_mixed, draw_verify, draw_wide
from benchmarks.kernel.timing import Effort, Timer, copy_bandwidth
from benchmarks.provenance import git_commit
from benchmarks.simulator import figures_of, makespan
from sgl_prefix_attn.core.cuda_step import CudaStep
from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.gpu import gpu_of
from sgl_prefix_attn.core.step_pool import limits_of
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures

EFFORT = Effort(cold_replays=12, warm_replays=4, launches=4)
MOST_SECONDS = 560.0
CHECKED_ROWS = 8
POD, POD_WORKSPACE = "flashinfer_pod", 128 << 20
WAYS = (OURS, "fa3", "flashinfer_batch_attention", "fa3_split", POD)
Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # or prefill and decode rows apart
Run = Callable[[], Output]


class OnGpu:
    """Tensors of a case, and the ways to compute it."""

    def __init__(self, step: RowsCase, pool: KvPool, device: torch.device) -> None:
        self.step, self.fixture, self.device = step, Fixture(step.case, pool, device), device
        bounds = np.concatenate([[0], np.cumsum(step.query_lens)])
        self.bounds = torch.from_numpy(bounds.astype(np.int32)).to(device)
        q_heads, _ = step.case.heads
        shape = (int(bounds[-1]), q_heads, step.case.head_dim)
        self.q = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16()
        self.out = torch.empty_like(self.q)

    def ours(self) -> Run:
        plan, _ = self.step.plan()
        fixture, case = self.fixture, self.step.case
        step = CudaStep(case.shape, torch.bfloat16, self.device, limits_of(plan, case.lengths, case.shape))
        step.load(plan, case.lengths, 0)
        step.prepare(fixture.table, fixture.rows, fixture.lens64)

        def run() -> torch.Tensor:
            step.attend(self.q, fixture.k, fixture.v, self.out, scale=fixture.scale)
            return self.out

        return run

    def fa3(self, requests: slice) -> Run:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        fixture, (begin, end, _) = self.fixture, requests.indices(len(self.step.query_lens))
        bounds = (self.bounds[begin : end + 1] - self.bounds[begin]).contiguous()
        first, last = int(self.bounds[begin]), int(self.bounds[end])
        longest = int(self.step.query_lens[requests].max())
        table, lens = fixture.table[requests].contiguous(), fixture.lens[requests].contiguous()

        def run() -> torch.Tensor:
            flash_attn_with_kvcache(
                q=self.q[first:last], k_cache=fixture.k.unsqueeze(1), v_cache=fixture.v.unsqueeze(1), page_table=table,
                cache_seqlens=lens, cu_seqlens_q=bounds, max_seqlen_q=longest, softmax_scale=fixture.scale,
                causal=True, num_splits=0, out=self.out[first:last],
            )  # fmt: skip
            return self.out

        return run

    def flashinfer(self) -> Run:
        import flashinfer

        fixture, (q_heads, kv_heads) = self.fixture, self.step.case.heads
        wrapper = flashinfer.BatchAttention("NHD", str(self.device))
        wrapper.plan(
            self.bounds.cpu(), fixture.kv_indptr.cpu(), fixture.kv_indices, fixture.lens.cpu(), q_heads, kv_heads,
            fixture.head_dim, fixture.head_dim, 1, causal=True, q_data_type=torch.bfloat16,
            kv_data_type=fixture.kv_dtype,
        )  # fmt: skip
        lse = torch.empty(self.q.shape[:2], device=self.device)
        cache = fixture.k.unsqueeze(1), fixture.v.unsqueeze(1)
        return lambda: wrapper.run(self.q, cache, out=self.out, lse=lse)[0]

    def pod(self) -> Run:
        import flashinfer

        fixture, (q_heads, kv_heads), prefills = self.fixture, self.step.case.heads, self.step.num_prefill
        rows_of, kv, last = self.bounds.cpu(), fixture.kv_indptr.cpu(), torch.ones(len(self.step.query_lens))
        first, cut = int(rows_of[prefills]), int(kv[prefills])
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
            torch.empty(POD_WORKSPACE, dtype=torch.uint8, device=self.device), "NHD"
        )
        wrapper.plan(
            rows_of[: prefills + 1], kv[: prefills + 1], fixture.kv_indices[:cut], last[:prefills].int(),
            rows_of[prefills:] - first, kv[prefills:] - cut, fixture.kv_indices[cut:], last[prefills:].int(),
            num_qo_heads=q_heads, num_kv_heads=kv_heads, head_dim=fixture.head_dim, page_size=1,
            q_data_type=torch.bfloat16, kv_data_type=fixture.kv_dtype, sm_scale=fixture.scale,
        )  # fmt: skip
        cache = fixture.k.unsqueeze(1), fixture.v.unsqueeze(1)
        return lambda: wrapper.run(self.q[:first], cache, self.q[first:], cache, causal_p=True)

    def ways(self) -> dict[str, Callable[[], Run]]:
        everything, prefill = slice(0, len(self.step.query_lens)), slice(0, self.step.num_prefill)
        decode = slice(self.step.num_prefill, len(self.step.query_lens))
        found: dict[str, Callable[[], Run]] = {
            OURS: self.ours,
            "fa3": lambda: self.fa3(everything),
        }
        if self.step.case.head_dim == 128:  # compiled ahead; other head sizes take minutes at first use
            found["flashinfer_batch_attention"] = self.flashinfer
        if self.step.num_prefill:
            found["fa3_split"] = lambda: _both(self.fa3(prefill), self.fa3(decode))
            found[POD] = self.pod
        return found

    def error(self, out: Output) -> float:
        """Largest relative error of some rows, against dense attention in float32."""
        out = out if isinstance(out, torch.Tensor) else torch.cat(out)
        fixture, case = self.fixture, self.step.case
        group = case.heads[0] // case.heads[1]
        worst = 0.0
        for request in np.linspace(0, len(case.seq_lens) - 1, CHECKED_ROWS).astype(int).tolist():
            row = int(self.bounds[request + 1]) - 1
            slots = fixture.table[request, : case.seq_lens[request]].long()
            keys, values = (rows(cache, slots).repeat_interleave(group, dim=1) for cache in (fixture.k, fixture.v))
            weights = torch.softmax(torch.einsum("hd,lhd->hl", self.q[row].float(), keys) * fixture.scale, dim=-1)
            worst = max(worst, relative_error(out[row], torch.einsum("hl,lhd->hd", weights, values)))
        return worst


def _both(first: Run, second: Run) -> Run:
    def run() -> Output:
        first()
        return second()

    return run


def measure(step: RowsCase, pool: KvPool, timer: Timer, ways: Collection[str]) -> dict[str, Any]:
    """Cold times of each of these baselines in microseconds; an error's message for one that failed."""
    on_gpu, row = OnGpu(step, pool, timer.device), described(step)
    found: dict[str, dict[str, Any]] = {}
    for name, make in on_gpu.ways().items():
        if name not in ways:
            continue
        try:
            run = make()
            on_gpu.out.fill_(torch.nan)
            error = on_gpu.error(run())
            if not error < 2e-2:
                raise ValueError(f"relative error {error:.3g}")
            found[name] = {"cold_us": round(timer.quick(run), 3), "error": error}
        except (ImportError, RuntimeError, ValueError) as failure:
            found[name] = {"failed": f"{type(failure).__name__}: {str(failure)[:200]}"}
    return {**row, "baselines": found}


def described(step: RowsCase) -> dict[str, Any]:
    case = step.case
    plan, device = step.plan()
    lens = case.lengths
    figures = figures_of(step.gpu.name, case.shape)
    rows = 1 if step.num_prefill else int(step.query_lens[0])
    forest = PrefixForest.from_paths(case.paths, prefix_lens=(lens - step.query_lens).tolist())
    return {
        "key": case.key,
        "case": case.name,
        "q_heads": case.heads[0],
        "kv_heads": case.heads[1],
        "head_dim": case.head_dim,
        "kv_dtype": case.kv_dtype,
        "step": asdict(StepFeatures.of(ForestFacts.of(forest), lens, rows)),
        "detail": case.detail,
        "requests": len(step.query_lens),
        "tokens": int(step.query_lens.sum()),
        "limit_us": round(step.limit_us, 2),
        "predicted_us": round(makespan(plan, lens, case.shape, device, figures).seconds * 1e6, 2),
        "items": len(plan.items),
        "kv_tokens_packed": plan.kv_tokens_packed,
        "kv_tokens_unique": plan.kv_tokens_unique,
    }


def machine_of(device: torch.device) -> dict[str, Any]:
    """The facts of other results files."""
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    sm_count = properties.multi_processor_count
    date = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return {"gpu": properties.name, "capability": capability, "sm_count": sm_count, "date": date}


def summary(results: list[dict[str, Any]]) -> list[str]:
    """Geometric means by family: of the limit and 12 us over ours, and of each baseline's time over ours."""
    lines = []
    for family in ("all", *dict.fromkeys(row["case"].split("/")[0] for row in results)):
        ratios: dict[str, list[float]] = {}
        for row in results:
            ours = row["baselines"][OURS].get("cold_us")
            if ours is None or family not in ("all", row["case"].split("/")[0]):
                continue
            ratios.setdefault("(limit + 12 us)", []).append((row["limit_us"] + 12) / ours)
            for name, times in row["baselines"].items():
                if name != OURS and "cold_us" in times:
                    ratios.setdefault(name, []).append(times["cold_us"] / ours)
        means = (f"{name} / ours {np.exp(np.mean(np.log(found))):.3f} ({len(found)})" for name, found in ratios.items())
        lines.append(f"{family:16} {'  '.join(means)}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="default: drawn from the system and recorded")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--verify", type=int, metavar="N", help="verify steps of N drafts instead of mixed steps")
    parser.add_argument("--wide", action="store_true", help="mixed steps of longer chunks, in part shared, more heads")
    parser.add_argument("--head-dim", type=int, help="only verify steps of this head size")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="start no case after this time")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:-1], metavar="NAME",
                        help=f"of {', '.join(WAYS)}; default: all but the last")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file of results")
    parser.add_argument("--resume", action="store_true", help="go on with --out, if it is there")
    parser.add_argument("--commit", default=git_commit(), metavar="SHA", help="commit to record (default: git's)")
    parser.add_argument("--list", action="store_true", help="print cases and predictions; needs no GPU")
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    if args.resume and args.out is not None and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        same = before["verify"] == args.verify and before.get("wide", False) == args.wide
        if not same or args.seed not in (None, before["seed"]):
            parser.error(f"{args.out} holds seed {before['seed']}, --verify {before['verify']}, or other --wide")
        args.seed, results = before["seed"], before["rows"]
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    if args.verify:
        steps = draw_verify(args.seed, args.cases, args.verify)
    else:
        steps = (draw_wide if args.wide else draw_mixed)(args.seed, args.cases)
    steps = [step for step in steps if args.head_dim in (None, step.case.head_dim)]
    if args.list:
        for step in steps:
            print(json.dumps(described(step)))
        return 0
    if not torch.cuda.is_available():
        print("mixed_steps: no CUDA device; this benchmark measures on one (try --list)", file=sys.stderr)
        return 2
    begin, device, known = time.monotonic(), torch.device("cuda", 0), {row["key"] for row in results}
    gpu, bandwidth = gpu_of(device), copy_bandwidth(device)
    steps = [replace(step, gpu=gpu, bandwidth=bandwidth) for step in steps]
    timer = Timer(device, effort=EFFORT)
    pool = KvPool(pool_elements(step.case for step in steps), device)
    header = {
        "machine": machine_of(device) | {"copy_bandwidth": bandwidth}, "commit": args.commit,
        "seed": args.seed, "verify": args.verify, "wide": args.wide,
    }  # fmt: skip
    with torch.inference_mode():
        for step in steps:
            if time.monotonic() - begin > args.seconds:
                break
            if step.case.key in known:
                continue
            results.append(measure(step, pool, timer, args.ways))
            print(json.dumps(results[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps({**header, "rows": results}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(summary(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
