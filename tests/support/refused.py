"""Decode steps of a server that refuses packing, in a process of their own: what they run and what they hold.

    python -m tests.support.refused CONFIGURATION KIND OUT.json

Kinds: `alone` and `refused` say what the process holds after some steps, without the package and with it in wrap mode
from the start. `compared` makes the model runner without the package. Then it loads the package, lets SGLang build its
attention backend again through the wrapping factory, and compares steps of both:

* calls: the functions that a step calls, in Python and in C.
* instructions: the bytecode that it runs, one by one.
* changed: attributes of SGLang's modules and classes that are another function or class afterwards.
* bytes: of tensors, that loading the package and each build of a backend takes.

A step is `ForwardBatch.init_new` and `ModelRunner.forward`.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from sgl_prefix_attn.demo.tiny_model import tiny_model

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {  # model, arguments
    "mla": ("deepseek", {}),
    "deterministic": ("llama", {"enable_deterministic_inference": True}),
}
STOCK = "torch_native"
OURS = "sgl_prefix_attn"
REQUESTS, PROMPT = 2, 64
OF_A_PREFILL = 64  # steps, so that they stay short
WARM = 70
Step = Callable[[], Any]


def calls(step: Step) -> list[str]:
    """The functions that a step calls, in order: those in Python and those in C."""
    seen: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            seen.append(f"{argument.__module__}.{argument.__qualname__}")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def instructions(step: Step) -> list[tuple[CodeType, int]]:
    """The bytecode that a step runs, in order: code objects, and the places in them."""
    seen: list[tuple[CodeType, int]] = []

    def note(frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            seen.append((frame.f_code, frame.f_lasti))
        frame.f_trace_opcodes = True
        return note

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it when the next line runs
    sys.settrace(note)
    try:
        step()
    finally:
        sys.settrace(None)
    return seen


def attributes() -> dict[tuple[str, str], Any]:
    """Functions, classes and descriptors of SGLang's modules and classes, by owner and name."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    classes = {
        f"{value.__module__}.{value.__qualname__}": value
        for module in modules.values()
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ in modules
    }
    return {
        (owner, name): value
        for owner, holder in {**modules, **classes}.items()
        for name, value in list(vars(holder).items())
        if callable(value) or hasattr(type(value), "__get__")
    }


def changed(before: dict[tuple[str, str], Any]) -> list[str]:
    """Which of these attributes are others by now."""
    now = attributes()
    return sorted(".".join(key) for key, value in before.items() if now.get(key) is not value)


def held_bytes() -> int:
    """Storages of all tensors."""
    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class Steps:
    """Decode steps on a model runner, with SGLang's own benchmark code."""

    def __init__(self, name: str) -> None:
        import sglang.srt.managers.scheduler  # noqa: F401, by which a plug-in knows the process
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        _allow_on_cpu()
        variant, more = CONFIGURATIONS[name]
        args = ServerArgs(
            model_path=str(tiny_model(variant)), device="cpu", attention_backend=STOCK, skip_tokenizer_init=True,
            max_total_tokens=8192, context_length=4096, max_running_requests=16, grammar_backend="none",
            dtype="float32", disable_cuda_graph=True, **more,
        )  # fmt: skip
        if hasattr(args, "resolve_once"):  # 0.5.20 and later
            args.resolve_once()
            from sglang.srt.runtime_context import publish

            publish(args, role="scheduler")
        for part in ("moe", "fp8_gemm", "fp4_gemm"):
            initialize = getattr(one_batch, f"initialize_{part}_config")
            initialize(*[args] * len(inspect.signature(initialize).parameters))
        one_batch.get_tokenizer = lambda *arguments, **named: None  # the tiny models have none
        runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self.runner, self._one_batch, self._left = getattr(runner, "torch_runner", runner), one_batch, 0
        self._kept: list[dict[str, Any]] = []

    def build(self) -> int:
        """Lets SGLang build the backend again. Returns the bytes that this took; the one before is kept."""
        before = held_bytes()
        self._kept.append(dict(vars(self.runner)))
        self.runner.init_attention_backends()
        self.runner.init_cuda_graphs()
        return held_bytes() - before

    def one(self) -> Step:
        """A decode step, ready to run."""
        if self._left == 0:
            self._prefill()
        self._left -= 1
        self._batch.input_ids = self._tokens
        self._batch.prepare_for_decode()
        return lambda: self.runner.forward(self._kind.init_new(self._batch, self.runner, **self._named))

    def _prefill(self) -> None:
        import numpy as np
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        prompts = np.arange(20, 20 + REQUESTS * PROMPT, dtype=np.int32).reshape(REQUESTS, PROMPT)
        requests = self._one_batch.prepare_synthetic_inputs_for_latency_test(REQUESTS, PROMPT, prompts.tolist())
        tokens, _, self._batch = self._one_batch.extend(requests, self.runner)
        self._tokens, self._kind, self._left = tokens.to(torch.int64), ForwardBatch, OF_A_PREFILL
        known = inspect.signature(ForwardBatch.init_new).parameters
        self._named = {name: False for name in ("return_hidden_states_before_norm",) if name in known}


def _allow_on_cpu() -> None:
    """Makes SGLang run configurations on the CPU that it only knows on a GPU, without their kernels."""
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # up to 0.5.19
        from sglang.srt import server_args as choices
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append(STOCK)
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append(STOCK)
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    AttentionBackendRegistry.register(STOCK, lambda attention, forward_batch: AttnForwardMethod.MLA)


def load_package() -> Callable[[Any], None]:
    """Loads it as SGLang does at the start of a scheduler. Returns a check that it has seen and refused a runner."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_prefix_attn.sglang_plugin.backend import plugin_state
    from sgl_prefix_attn.sglang_plugin.startup import entry

    before = ATTENTION_BACKENDS[STOCK]
    entry.register()
    HookRegistry.apply_hooks()

    def check(runner: Any) -> None:
        assert ATTENTION_BACKENDS[STOCK] is not before, "never built in wrap mode"
        assert OURS not in type(runner.attn_backend).__module__
        assert plugin_state.active() is None

    return check


def held(name: str, *, refused: bool) -> dict[str, int]:
    check = load_package() if refused else lambda runner: None
    steps = Steps(name)
    for _ in range(WARM):
        steps.one()()
    check(steps.runner)
    return {"bytes": held_bytes()}


def compared(name: str) -> dict[str, Any]:
    steps = Steps(name)
    steps.build()
    took = {"absent": steps.build()}
    for _ in range(WARM):
        steps.one()()
    calls(steps.one()), instructions(steps.one())  # the first step under a tracer may compile
    before, kept, start = (calls(steps.one()), instructions(steps.one())), attributes(), held_bytes()
    check = load_package()
    took |= {"loading": held_bytes() - start, "refused": steps.build()}
    steps.one()()
    after, others = (calls(steps.one()), instructions(steps.one())), changed(kept)
    check(steps.runner)
    return {
        "same": before == after,
        "seen": [len(each) for each in after],
        "calls_of_ours": sum(call.startswith(OURS) for call in after[0]),
        "changed": others,
        "bytes": took,
    }


def main(name: str, kind: str, out: str) -> None:
    import torch

    gc.freeze()  # a fork begins with a million objects, which every count would look at
    logging.disable(logging.INFO)
    os.environ |= {"SGLANG_PLUGINS": "none", "SGLANG_USE_CPU_ENGINE": "1", "PREFIXPACK_WRAP": "1"}
    with torch.no_grad():
        found = compared(name) if kind == "compared" else held(name, refused=kind == "refused")
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
