"""What a server pays for prefixpack where prefixpack refuses it: wrap mode against SGLang alone, in one process.

    python -m benchmarks.serving.refused --out benchmarks/results/refused.json
    python -m benchmarks.serving.refused --device cuda --backend triton --out benchmarks/results/refused_gpu.json

Each configuration gets a process with one model runner, made before the package is loaded. Then wrap mode is switched
on, and SGLang builds its attention backend (and graphs) again through the wrapping factory. Decode steps of both and of
two controls take turns, step by step:

* absent: the backend that SGLang built without the package.
* refused: the backend that it built in wrap mode.
* absent_again: as absent, built once more; its difference is the error of the measurement.
* spun: as absent, with 2 us of spinning; it shows what difference can be seen.

A step is `ForwardBatch.init_new` and `ModelRunner.forward`. On a GPU these launch and do not wait. Its time is the
thread's CPU time, which other processes do not add to. It is measured twice: `whole`, and `around` the model, whose
forward then returns a result from before. On a CPU the model's arithmetic is so long that no microsecond shows in
`whole`. On a GPU two builds of the same backend may differ by microseconds, whatever the number of steps. So each arm
has several builds, and `error` is the standard error of the mean over them.

What depends on no clock is compared as well, before the package was loaded and with the refused backend:

* calls: the functions that a whole step calls, in Python and in C.
* instructions: the bytecode that it runs, one by one.
* changed: attributes of SGLang's modules and classes that are another function or class afterwards.

Memory is what a build takes: tensors (`allocated`), and on a GPU the allocator's memory (`reserved`) and the device's
(`device`, with graphs and code). `loading` is what loading the package takes. The first build of an arm also loads
kernels, so `refused` compares with `absent_again`. Builds that come later find holes in the allocator's segments.
`fresh` has no such order: what two further processes hold after the same steps, one alone, one refused from the start.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.serving.counted import attributes, calls, changed, held_bytes, instructions, memory_bytes, more_bytes
from sgl_prefix_attn.demo.tiny_model import tiny_model

# Model and arguments. MLA's kernels on a GPU have the head sizes of DeepSeek only.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("deepseek", {}),
    "deterministic": ("llama", {"enable_deterministic_inference": True}),
    "no_radix_cache": ("llama", {"disable_radix_cache": True}),
}
# Graphs of prefill take long to capture, and only decode steps are measured.
OF_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "disable_cuda_graph": True},
    "cuda": {"dtype": "bfloat16", "disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 16},
}
KINDS = ("whole", "around")
ARMS = ("absent", "refused", "absent_again", "spun")
SPIN_NS = 2000
WARM = 70  # steps; more than follow one prefill
PROMPT = 64
OURS = "sgl_prefix_attn"


class Steps:
    """Decode steps of a batch on one model runner, with SGLang's own benchmark code.

    Attributes:
        arms: by name: for each build, attributes of the runner with the backends and graphs.
    """

    def __init__(self, runner: Any, one_batch: Any, requests: int) -> None:
        self.runner, self._one_batch, self._requests = runner, one_batch, requests
        self.arms: dict[str, list[dict[str, Any]]] = {}
        self._left = 0

    def build(self, arm: str) -> dict[str, int]:
        """Lets SGLang build backend and graphs for an arm. Returns the bytes of memory that this took."""
        before, known = memory_bytes(), dict(vars(self.runner))
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs()
        now = vars(self.runner)
        made = {name: value for name, value in now.items() if value is not known.get(name)}
        self.arms.setdefault(arm, []).append(made)
        return more_bytes(before)

    def use(self, arm: str, number: int = 0) -> None:
        """Makes the backend and graphs of an arm's build the runner's."""
        vars(self.runner).update(self.arms[arm][number % len(self.arms[arm])])

    def leave_out_model(self) -> None:
        """From now on, the model returns the result of a step from before. Graphs are left out with it."""
        output = self.one()().logits_output
        vars(self.runner.model)["forward"] = lambda *arguments, **named: output
        for build in itertools.chain(*self.arms.values()):
            build["decode_cuda_graph_runner"] = None

    def one(self) -> Callable[[], Any]:
        """A decode step, ready to run."""
        if self._left == 0:
            self._start()
        self._left -= 1
        self._batch.input_ids = self._tokens
        self._batch.prepare_for_decode()

        def step() -> Any:
            return self.runner.forward(self._kind.init_new(self._batch, self.runner, **self._named))

        return step

    def _start(self) -> None:
        """New requests, so that steps stay short."""
        import numpy as np
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        prompts = np.arange(20, 20 + self._requests * PROMPT, dtype=np.int32).reshape(self._requests, PROMPT) % 1000
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(self._requests, PROMPT, prompts.tolist())
        tokens, _, self._batch = self._one_batch.extend(requests, self.runner)
        self._tokens, self._kind, self._left = tokens.to(torch.int64), ForwardBatch, 64
        known = inspect.signature(ForwardBatch.init_new).parameters
        self._named = {name: False for name in ("return_hidden_states_before_norm",) if name in known}


def fresh_bytes(name: str, options: argparse.Namespace, wrap: bool) -> dict[str, int]:
    """Memory of this process after some steps, with or without the package from the start."""
    logging.disable(logging.INFO)
    import torch

    with in_wrap_mode(options.backend) if wrap else contextlib.nullcontext(), torch.no_grad():
        steps = make_steps(name, options)
        for _ in range(WARM):
            steps.one()()
        if wrap:
            check_refused(name, steps.runner.attn_backend)
    return held_bytes()


@contextlib.contextmanager
def in_wrap_mode(backend: str) -> Iterator[None]:
    """Loads the package as SGLang does at the start of a scheduler process. Afterwards: whether the factory is ours."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_prefix_attn.sglang_plugin.startup import entry

    os.environ["PREFIXPACK_WRAP"] = "1"
    before = ATTENTION_BACKENDS[backend]
    entry.register()
    HookRegistry.apply_hooks()
    yield
    if ATTENTION_BACKENDS[backend] is before:
        raise RuntimeError(f"{backend} was never built in wrap mode")


def check_refused(name: str, backend: Any) -> None:
    from sgl_prefix_attn.sglang_plugin.backend import plugin_state

    if OURS in type(backend).__module__ or plugin_state.active() is not None:
        raise RuntimeError(f"{name} is not refused: {type(backend).__name__}")


def compared(before: list[Any], after: list[Any]) -> dict[str, Any]:
    return {"absent": len(before), "refused": len(after), "same": before == after}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One configuration, in this process."""
    logging.disable(logging.INFO)
    steps = make_steps(name, options)
    import torch

    with torch.no_grad():
        taken: dict[str, list[dict[str, int]]] = {arm: [] for arm in ("absent", "absent_again", "refused")}
        for arm in ("absent", "absent_again") * options.builds:
            taken[arm].append(steps.build(arm))
        steps.arms["spun"] = steps.arms["absent"]
        steps.use("absent")
        for _ in range(WARM):
            steps.one()()
        observed(steps)  # the first step under a tracer may compile
        before, kept, start = observed(steps), attributes(), memory_bytes()
        with in_wrap_mode(options.backend):
            loading = more_bytes(start)
            taken["refused"] = [steps.build("refused") for _ in range(options.builds)]
        steps.one()()
        after, others = observed(steps), changed(kept)
        whole = timed(steps, options.steps)
        steps.leave_out_model()
        around = timed(steps, 8 * options.steps)
    for build in steps.arms["refused"]:
        backend = build["attn_backend"]
        check_refused(name, backend)
    memory = {arm: {kind: statistics.median(one[kind] for one in of) for kind in of[0]} for arm, of in taken.items()}
    return {
        "backend": type(backend).__name__,
        "bytes": {**memory, "loading": loading},
        "calls": compared(before[0], after[0]),
        "calls_of_ours": sum(call.startswith(OURS) for call in after[0]),
        "instructions": compared(before[1], after[1]),
        "changed": others,
        "whole": differences(whole, options.builds),
        "around": differences(around, options.builds),
    }


def observed(steps: Steps) -> tuple[list[str], list[Any]]:
    return calls(steps.one()), instructions(steps.one())


def differences(times: dict[str, list[float]], builds: int) -> dict[str, dict[str, float]]:
    """By arm: median time in us; the difference from `absent` of the same turns, over all builds, and its error."""
    found = {}
    for arm, values in times.items():
        of_turns = [a - b for a, b in zip(values, times["absent"], strict=True)]
        of_builds = [statistics.median(of_turns[number::builds]) for number in range(builds)]
        found[arm] = {
            "median": statistics.median(values),
            "difference": statistics.mean(of_builds),
            "error": statistics.stdev(of_builds) / builds**0.5,
        }
    return found


def timed(steps: Steps, count: int) -> dict[str, list[float]]:
    """CPU time of `count` steps of each arm in us. The arms take turns in all orders."""
    import torch

    orders = list(itertools.permutations(ARMS))
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(count):
        for arm in orders[number % len(orders)]:
            steps.use(arm, number)
            step = steps.one()
            spin = SPIN_NS if arm == "spun" else 0
            wait()  # a full queue of launches would count as time of the host
            start = time.thread_time_ns()
            step()
            end = time.thread_time_ns()
            while spin and time.thread_time_ns() < end + spin:
                pass
            times[arm].append(((time.thread_time_ns() if spin else end) - start) / 1e3)
    return times


def make_steps(name: str, options: argparse.Namespace) -> Steps:
    """A model runner without the package."""
    variant, more = CONFIGURATIONS[name]
    if options.device == "cuda" and variant == "deepseek":
        variant = "deepseek_gpu"
    import sglang.srt.managers.scheduler  # noqa: F401, by which a plug-in knows the process
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    if options.backend == "torch_native":
        allow_on_cpu(options.backend)
    args = ServerArgs(
        model_path=str(options.model or tiny_model(variant)),
        device=options.device,
        attention_backend=options.backend,
        skip_tokenizer_init=True,
        max_total_tokens=8192,
        context_length=4096,
        max_running_requests=16,
        grammar_backend="none",
        **OF_DEVICE[options.device],
        **more,
    )
    if hasattr(args, "resolve_once"):  # 0.5.20 and later
        args.resolve_once()
        from sglang.srt.runtime_context import publish

        publish(args, role="scheduler")
    for part in ("moe", "fp8_gemm", "fp4_gemm"):
        initialize = getattr(one_batch, f"initialize_{part}_config")
        initialize(*[args] * len(inspect.signature(initialize).parameters))
    one_batch.get_tokenizer = lambda *arguments, **named: None  # the tiny models have none
    model_runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return Steps(getattr(model_runner, "torch_runner", model_runner), one_batch, options.requests)


def allow_on_cpu(backend: str) -> None:
    """Makes SGLang run configurations on the CPU that it only knows on a GPU, without their kernels."""
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # up to 0.5.19
        from sglang.srt import server_args as choices
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append(backend)
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append(backend)
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    AttentionBackendRegistry.register(backend, lambda attention, forward_batch: AttnForwardMethod.MLA)


def send(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    gc.freeze()  # a fork begins with a million objects, which every count would look at
    pipe.send(function(*arguments))


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own, or None if that failed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=send, args=(theirs, function, *arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


def print_start(name: str, found: dict[str, Any]) -> None:
    """One start of a configuration, as lines."""
    print(f"{name}: {found['backend']}, changed {found['changed'] or 'nothing'} in SGLang; in a step:")
    for what in ("calls", "instructions"):
        same = "the same" if found[what]["same"] else f"other than the {found[what]['absent']:,}"
        print(f"  {found[what]['refused']:,} {what}, {same} without the package")
    for name, taken in found["bytes"].items():
        print(f"  {name:13} " + "  ".join(f"{kind} {value:,} bytes" for kind, value in taken.items()))
    for arm in ARMS:
        cells = [f"  {arm:13}"]
        for kind in KINDS:
            values = found[kind][arm]
            cells.append(f"{kind} {values['median']:8.1f} us {values['difference']:+7.2f} +- {values['error']:.2f}")
        print("  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default="torch_native", help="the stock backend")
    parser.add_argument("--model", help="instead of the tiny models; needs one configuration in --only")
    parser.add_argument("--requests", type=int, default=2, help="of a batch")
    parser.add_argument("--steps", type=int, default=240, help="whole steps of each arm after one start")
    parser.add_argument("--builds", type=int, default=7, help="of each arm; the 24 orders of turns want a prime")
    parser.add_argument("--starts", type=int, default=3, help="fresh processes; addresses differ between them")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if not 2 <= options.builds <= options.steps:
        parser.error("--builds must be at least 2 and at most --steps")
    os.environ["SGLANG_PLUGINS"] = "none"
    if options.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from benchmarks.serving.host_cost import machine

    results: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine()}
    results |= {name: getattr(options, name) for name in ("device", "requests", "steps", "builds")}
    results["fresh"] = {}
    failed = 0
    for name in options.only:
        fresh = {arm: in_a_process(fresh_bytes, name, options, arm == "refused") for arm in ("alone", "refused")}
        results["fresh"][name] = fresh
        print(f"{name}, fresh processes: " + "; ".join(f"{arm} {taken}" for arm, taken in fresh.items()), flush=True)
        starts = [in_a_process(measure, name, options) for _ in range(options.starts)]
        failed += [*starts, *fresh.values()].count(None)
        results[name] = [found for found in starts if found is not None]
        for found in results[name]:
            print_start(name, found)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        print(f"{failed} processes failed, see their tracebacks above")
    if options.out:
        print(f"written: {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
