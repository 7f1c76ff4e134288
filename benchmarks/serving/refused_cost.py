"""Host time that prefixpack adds to a step of a server that never runs packed, in process, without a GPU.

    OMP_NUM_THREADS=1 python benchmarks/serving/refused_cost.py --out benchmarks/results/refused_cost.json

A GPU's decision is made on the CPU (kernels in host memory). SGLang's and the stock backend's own work is left out:
`ForwardBatch.init_new`, `ModelRunner.forward` and the stock backend are functions that do nothing, wrapped by SGLang's
hook machinery as on a server. A step is the target's batch, with metadata for its graph, and a batch of the draft
model. With and without the plug-in run in turn; the difference of each pair counts. `layer` is one call of a layer
outside graphs.

    named     --attention-backend prefixpack, speculation with pack_verify=false
    wrapped   wrap mode: SGLang keeps the stock backend's own object
    layers    --attention-backend prefixpack on a CPU, a model with unsupported layers only; 32 requests decode
    hidden    the same, of a model whose modules do not show its layers: they are known after the first step
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from benchmarks.provenance import git_commit
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import factory, hook_table
from sgl_prefix_attn.sglang_plugin.backend import eligibility, plugin_state
from tests.sglang_plugin.execution.test_verify_graphs import Verify
from tests.sglang_plugin.fixture import Fixture
from tests.sglang_plugin.gpu_fixture import host_kernels
from tests.support.small_scheduler import SmallScheduler

DRAFTS = 4
REQUESTS, SHARED_PROMPT = 32, 200
STEPS = 200  # of a window: short, so that other processes interrupt few of them


class Stock:
    """A stock backend that does nothing."""

    needs_cpu_seq_lens = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass

    def forward(self, q: Any = None, k: Any = None, v: Any = None, *args: Any, **kwargs: Any) -> Any:
        return q


class FlashAttentionBackend(Stock):
    """Of the name that wrap mode knows."""


def init_new(batch: Any, runner: Any) -> Any:
    return batch.made


def copied(method: Any, owner: Any) -> Callable[..., Any]:
    """A method with code of its own. Python 3.11 specializes code to the types that it meets; both ways meet others."""
    return MethodType(FunctionType(method.__code__.replace(), method.__globals__), owner)


class Server:
    """What a step of a server runs on the host, with our backend and hooks, or without."""

    def __init__(self, fixture: Verify, backend: Any, hooks: tuple[Any, ...]) -> None:
        self.backend = backend
        self.target, self.draft = SimpleNamespace(is_draft_worker=False), SimpleNamespace(is_draft_worker=True)
        step = fixture.batch
        self.view = SimpleNamespace(**vars(step))
        self.view.num_padding = 0
        request = SimpleNamespace(finished=lambda: False)
        # SGLang asks this in each step to know whether it has to wait for lengths.
        self.backends = (backend, FlashAttentionBackend())
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, spec_algorithm=SpeculativeAlgorithm.EAGLE, reqs=[request] * 4,
            req_pool_indices=step.req_pool_indices, seq_lens_cpu=None, seq_lens=step.seq_lens, spec_info=step.spec_info,
            encoder_lens=None, made=SimpleNamespace(),
        )  # fmt: skip
        self.layer, self.q = fixture.layers[0], fixture.qkv(fixture.layers[0])[0]
        forward, self.step, self.call_layer = (
            copied(method, self) for method in (type(self)._forward, type(self)._step, type(self)._call_layer)
        )
        functions: dict[str, Callable[..., Any]] = {"init_new": init_new, "forward": forward}
        for hook in hooks:
            name = hook.target.path.rpartition(".")[2]
            if name == "init_new":  # a class method: hooks get the class as well
                call = _wrap_fn(lambda cls, *args: init_new(*args), hook.function, HookType[hook.kind])
                functions[name] = lambda *args, call=call: call(None, *args)
            elif name == "forward":
                functions[name] = _wrap_fn(forward, hook.function, HookType[hook.kind])
        self.init_new, self.forward = functions["init_new"], functions["forward"]

    def _forward(self, runner: Any, forward_batch: Any) -> None:
        if not runner.is_draft_worker:
            self.backend.init_forward_metadata_out_graph(self.view)

    def _step(self) -> None:
        for part in self.backends:
            if part.needs_cpu_seq_lens:
                raise AssertionError("the step would wait for the device")
        self.forward(self.target, self.init_new(self.batch, self.target))
        self.forward(self.draft, self.init_new(self.batch, self.draft))

    def _call_layer(self) -> None:
        self.backend.forward(self.q, None, None, self.layer, self.view, save_kv_cache=False)


class DecodingServer(Server):
    """As `Server`, without graphs and speculation."""

    def __init__(self, fixture: Fixture, backend: Any, hooks: tuple[Any, ...]) -> None:
        super().__init__(fixture, backend, hooks)  # type: ignore[arg-type]
        scheduler = SmallScheduler("objects", rows=REQUESTS + 1)
        for number in range(REQUESTS):
            request = scheduler.request([*range(SHARED_PROMPT), 1000 + number])
            scheduler.match(request)
            scheduler.prefill_done(request)
            scheduler.running.append(request)
        scheduler.decode()
        self.batch: Any = scheduler.decode_batch()
        self.view = SimpleNamespace(**vars(fixture.batch))
        self.view.batch_size, self.view.req_pool_indices = REQUESTS, self.batch.req_pool_indices
        self.view.seq_lens = self.view.seq_lens_cpu = self.lens = self.batch.seq_lens_cpu
        self.batch.made = self.view
        for _ in range(3):
            self.step()
            self.call_layer()

    def _forward(self, runner: Any, forward_batch: Any) -> None:
        self.backend.init_forward_metadata(self.view)

    def _step(self) -> None:
        self.lens += 1
        self.forward(self.target, self.init_new(self.batch, self.target))


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        call()
    return (time.perf_counter() - start) / STEPS


def added(ours: Callable[[], None], stock: Callable[[], None], rounds: int) -> dict[str, float]:
    """Microseconds: medians of both, and of the differences of pairs that run in turn."""
    pairs = []
    for turn in range(rounds):
        first, second = (ours, stock) if turn % 2 else (stock, ours)
        times = {first: seconds(first), second: seconds(second)}
        pairs.append((1e6 * times[ours], 1e6 * times[stock]))
    return {
        "ours_us": round(statistics.median(mine for mine, _ in pairs), 3),
        "stock_us": round(statistics.median(theirs for _, theirs in pairs), 3),
        "added_us": round(statistics.median(mine - theirs for mine, theirs in pairs), 3),
        "added_by_best_us": round(min(mine for mine, _ in pairs) - min(theirs for _, theirs in pairs), 3),
    }


def build(mode: str) -> tuple[Any, list[Any], Any]:
    """The backend of a refused server, the hooks that it asks for, and the fixture of its batch."""
    fixture = Verify(DRAFTS) if mode in ("named", "wrapped") else Fixture([[]], [9], head_dim=24)
    runner, stock = fixture.runner, FlashAttentionBackend()
    if mode in ("named", "wrapped"):
        runner.device = "cuda"
    if mode == "hidden":
        runner.model = None
    settings = Settings(metrics=False, wrap=mode == "wrapped", route="packed", pack_verify=False)
    plugin_state.reset()
    asked: list[Any] = []
    with (
        mock.patch.object(eligibility, "choose_kernels", return_value=host_kernels()),
        mock.patch.object(factory.hooks, "ensure_applied", lambda hooks: asked.extend(hooks) or []),
        mock.patch.object(factory, "build_stock", return_value=stock),
        mock.patch.object(factory, "stock_name", return_value="fa3"),
    ):
        if mode == "wrapped":
            backend = factory.wrap_backend(runner, "fa3", stock, settings)
            assert backend is stock
        else:
            backend = factory.create_backend(runner, settings)
    return backend, asked, fixture


def measure(mode: str, rounds: int) -> dict[str, Any]:
    backend, hooks, fixture = build(mode)
    kind = Server if mode in ("named", "wrapped") else DecodingServer
    ours, stock = kind(fixture, backend, tuple(hooks)), kind(fixture, FlashAttentionBackend(), ())
    result: dict[str, Any] = {
        "hooks": len([hook for hook in hooks if hook in hooks_of_steps()]),
        "needs_cpu_seq_lens": backend.needs_cpu_seq_lens,
        "step": added(ours.step, stock.step, rounds),
        "layer": added(ours.call_layer, stock.call_layer, rounds),
    }
    state = plugin_state.active()
    result["fallbacks"] = {} if state is None else dict(state.counters.fallbacks)
    return result


def hooks_of_steps() -> tuple[Any, ...]:
    state = plugin_state.active()
    return () if state is None else hook_table.handover_hooks(state.handover_hooks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--out", type=Path, help="JSON file of runs by commit; this one is added")
    parser.add_argument("--commit", default=git_commit(), help="commit to record (default: git's)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()},
        "steps_a_round": STEPS, "rounds": args.rounds,
    }  # fmt: skip
    for mode in ("named", "wrapped", "layers", "hidden"):
        results[mode] = measure(mode, args.rounds)
        print(mode, json.dumps(results[mode]))
    if args.out:
        runs = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        args.out.write_text(json.dumps({**runs, args.commit: results}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
