"""Decode steps of models whose layers run packed only in part: wrap mode against the same server without the package.

    python -m benchmarks.serving.wrapped_models --out build/wrapped_models.json

Models have the published shapes of one layer, with random weights, 24 layers and fewer experts, so that they fit one
GPU and start soon. The samples of one prompt decode at once. `ratio` is stock step / wrapped step. `predicted` is the
ratio that follows from the stock step, the number of packed layers and the router's times of one layer's attention.

A case is a model and a stock backend, `gpt_oss:fa3`. Cases that are in --out already do not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import git_commit
from benchmarks.serving.measure import Run, run_once, warm_up
from benchmarks.serving.provenance import machine_name, package_versions
from benchmarks.serving.workloads import Sizes, make_requests
from sgl_prefix_attn.demo.client import RequestError
from sgl_prefix_attn.demo.server import ServerError, ServerOptions, serve
from sgl_prefix_attn.demo.workload import Request, Vocabulary

LAYERS = 24
CASES = ("gpt_oss:fa3", "gpt_oss:triton", "llama4:fa3", "qwen3_next:triton")
WRAP = {"PREFIXPACK_WRAP": "1"}
SERVER = ("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "16", "--load-format", "dummy")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's configuration: class of transformers, and what differs from its defaults."""

    architecture: str
    values: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Writes config.json with 24 layers in bf16."""
        import transformers

        values = {"num_hidden_layers": LAYERS, "dtype": "bfloat16", **self.values}
        config = getattr(transformers, self.architecture).config_class(**values)
        saved = {**values, **config.to_dict(), "architectures": [self.architecture]}
        (folder / "config.json").write_text(json.dumps(saved, indent=1, default=str) + "\n")


# GPT-OSS 20B reads some 9 GB of 4-bit experts in such a step; eight experts of 16 bits are as many bytes. Llama 4 Scout
# has dense layers only, since SGLang reads no experts without its vision model.
SHAPES = {
    "gpt_oss": Shape(
        "GptOssForCausalLM",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "swiglu_limit": 7.0,
        },
    ),
    "llama4": Shape(
        "Llama4ForCausalLM",
        {
            "hidden_size": 5120, "intermediate_size": 16384, "intermediate_size_mlp": 16384,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "interleave_moe_layer_step": LAYERS + 1, "attention_chunk_size": 8192,
        },
    ),
    "qwen3_next": Shape(
        "Qwen3NextForCausalLM",
        {
            "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "full_attention_interval": 4, "num_experts": 64,
        },
    ),
}  # fmt: skip


def predicted_ratio(stock_ms: float, layers: int, last: dict[str, Any]) -> float:
    """Stock step over the step in which so many layers take the router's packed time instead of its stock time.

    stock_ms: of a step. last: a decision of the router, times of one layer in us.
    """
    saved_ms = layers * (last["stock_us"] - last["packed_us"]) / 1e3
    return stock_ms / (stock_ms - saved_ms)


def steps_of(case: str, folder: Path, wrapped: bool, requests: Sequence[Request], args: argparse.Namespace) -> Found:
    """Runs a server and measures its decode steps."""
    stock = case.partition(":")[2]
    tokens = len(requests[0].prompt) + requests[0].max_new_tokens
    options = ServerOptions(
        str(folder), stock, "cuda", (*SERVER, "--context-length", str(2 * tokens)), WRAP if wrapped else {},
        args.start_seconds, args.logs,
    )  # fmt: skip
    with serve(options) as server:
        warm_up(server, requests)
        runs = [run_once(server, case, case, requests, timeout_seconds=120.0) for _ in range(args.repeats)]
        return Found(runs, server.packing_state())


@dataclasses.dataclass(frozen=True)
class Found:
    """Runs of one server, and what the package says of itself: None where it is not loaded."""

    runs: list[Run]
    state: dict[str, Any] | None

    def step_ms(self) -> float:
        """Median over the runs of the median time of a token while all samples decode."""
        return statistics.median(statistics.median(run.steady_token_seconds) for run in self.runs) * 1e3


def compare(stock: Found, ours: Found) -> dict[str, Any]:
    """A case of the file of results.

    Raises:
        ValueError: the package is not where it should be, or nothing ran packed.
    """
    if stock.state is not None or ours.state is None:
        raise ValueError("the package served the stock server, or did not serve the wrapped one")
    packed = sum(run.counters["steps_packed"]["decode"] for run in ours.runs)
    if not packed:
        raise ValueError(f"no step ran packed: {ours.state['counters']}")
    layers, last = ours.state["layers"], ours.state["route"]["last"]
    return {
        "stock_step_ms": stock.step_ms(), "step_ms": ours.step_ms(), "ratio": stock.step_ms() / ours.step_ms(),
        "predicted_ratio": predicted_ratio(stock.step_ms(), layers["packed"], last), "layers": layers,
        "route_last": last, "steps_packed": packed, "fallbacks": ours.state["counters"]["fallbacks"],
        "runs_ms": {
            name: [statistics.median(run.steady_token_seconds) * 1e3 for run in found.runs]
            for name, found in (("stock", stock), ("wrapped", ours))
        },
        "distinct_tokens": len({token for run in ours.runs for sample in run.samples for token in sample.tokens}),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.wrapped_models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    result.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="MODEL:BACKEND", help="of these")
    result.add_argument("--prompt-tokens", type=int, default=8192, help="of the prompt (8192)")
    result.add_argument("--samples", type=int, default=16, help="of the prompt (16)")
    result.add_argument("--output-tokens", type=int, default=512, help="of a sample (512)")
    result.add_argument("--repeats", type=int, default=3, help="runs on each server (3)")
    result.add_argument("--seed", type=int, help="of the prompt (default: drawn now)")
    result.add_argument("--start-seconds", type=float, default=300.0, help="until a server must be ready (300)")
    result.add_argument("--logs", type=Path, default=Path("build/serving-logs"), help="folder of the servers' logs")
    result.add_argument("--out", type=Path, required=True, help="JSON file of results")
    return result


def main() -> int:
    args = parser().parse_args()
    seed = time.time_ns() % 2**32 if args.seed is None else args.seed
    sizes = Sizes(
        groups=1, samples=args.samples, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens, seed=seed
    )
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    origin = {"commit": git_commit(), "machine": machine_name(), "versions": package_versions(), "seed": seed}
    failed = False
    for case in args.cases:
        if case in known:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shape = SHAPES[case.partition(":")[0]]
            shape.write(folder)
            vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
            requests = make_requests("rl", sizes, Vocabulary(vocabulary // 8, vocabulary // 2), 2 * args.prompt_tokens)
            try:
                stock, ours = (steps_of(case, folder, wrapped, requests, args) for wrapped in (False, True))
                known[case] = {**origin, **compare(stock, ours)}
            except (RequestError, ServerError, TimeoutError, ValueError) as error:
                failed = True
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                continue
        print(f"{case}: {json.dumps(known[case])}", flush=True)
        args.out.write_text(json.dumps(known, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
