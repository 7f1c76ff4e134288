"""What a server with given launch arguments and environment would run packed, by kind of step and by layer.

Every refusal comes from the code that a server runs: `backend/eligibility.py`, the executors and the layer registry.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sgl_prefix_attn.core.gpu import gpu_of
from sgl_prefix_attn.core.limits import why_not_native
from sgl_prefix_attn.gpus import KnownGpu
from sgl_prefix_attn.routing import mixed, rule, verify
from sgl_prefix_attn.routing.policy import FixedPolicy
from sgl_prefix_attn.settings import WRAPPABLE, Settings, load_settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility
from sgl_prefix_attn.sglang_plugin.compat.doctor_targets import CPU_ENGINE
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import knows_kv_scales, stock_name
from sgl_prefix_attn.sglang_plugin.dispatch.live_policy import gpu_name
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import MODES
from sgl_prefix_attn.sglang_plugin.doctor.advice import HEADS_OF_ALL_RANKS, Change
from sgl_prefix_attn.sglang_plugin.doctor.planned_server import PlannedServer, planned_server
from sgl_prefix_attn.sglang_plugin.doctor.stand_in import standing_in
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import choose_kernels
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.execution.layer_support import attention_layers, layer_shape
from sgl_prefix_attn.sglang_plugin.pinning import registration
from sgl_prefix_attn.sglang_plugin.startup import entry
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason, Refused

_MOST_CHANGES = 8
KINDS = ("decode", "extend", "mixed", "verify")


@dataclass(frozen=True)
class Answer:
    """Whether steps or layers of a kind run packed.

    Attributes:
        reason: why not; None if they do.
        note: what decides if they may.
    """

    reason: Reason | None
    note: str = ""


@dataclass
class Diagnosis:
    """What one server would do.

    Attributes:
        backends: names of the backends for prefill and decode.
        way: "name" (--attention-backend prefixpack), "wrap", or "off".
        steps: by kind: decode, extend, mixed, verify.
        layers: description and answer of each kind of layer.
        model: architectures.
        device: of the server.
        kernels: name of those that run packed steps on a GPU, and why not others; None on a CPU.
        hints: why KV hints and sessions of requests are not read; None if they are.
        heads_of_all_ranks: whether the model spreads its heads over other ranks than the KV pool does.
    """

    backends: tuple[str | None, str | None]
    way: str
    steps: dict[str, Answer]
    layers: list[tuple[str, Answer]]
    model: list[str]
    device: str
    kernels: str | None = None
    hints: str | None = None
    heads_of_all_ranks: bool = False
    changes: list[Change] = field(default_factory=list)
    after: Diagnosis | None = None

    @property
    def packs(self) -> bool:
        """Whether any step would run packed."""
        return any(answer.reason is None for answer in self.steps.values())


def diagnose(arguments: Sequence[str], environ: Mapping[str, str], gpu: KnownGpu | None = None) -> Diagnosis:
    """The diagnosis of a server, with changes that lead to packed decode steps and what they lead to.

    Args:
        arguments: launch arguments of SGLang.
        environ: the environment of the server's process.
        gpu: of the server's machine; this machine's if None.

    Raises:
        SettingsError: settings that cannot be used.
        OSError, ValueError, RuntimeError: what SGLang has against the arguments.
        SystemExit: arguments that SGLang does not know; it has printed which.
    """
    arguments, environ = list(arguments), dict(environ)  # a copy, since `environ` may be os.environ itself
    if gpu is None:
        return _diagnose(arguments, environ)
    environ.pop(CPU_ENGINE, None)  # a variable of this machine
    with _environment(environ), standing_in(gpu):
        return _diagnose(arguments, environ)


def _diagnose(arguments: list[str], environ: dict[str, str]) -> Diagnosis:
    first = last = _diagnose_once(arguments, environ)
    while len(first.changes) < _MOST_CHANGES:
        speculates = last.steps["verify"].reason is not fallback_reasons.NO_SUCH_STEPS
        reason = last.steps["verify" if speculates else "decode"].reason
        if reason is None or reason == fallback_reasons.NO_SUCH_STEPS:
            break
        spread = last.heads_of_all_ranks and reason is fallback_reasons.KV_LAYOUT
        change = Change(HEADS_OF_ALL_RANKS if spread else reason)
        if change in first.changes:  # followed already: what it is about is in a file, or in no argument that is given
            first.changes[first.changes.index(change)] = replace(change, by_hand=True)
            last = first
            break
        first.changes.append(change)
        if not change.can_be_followed:
            break
        arguments, environ = change.followed(arguments, environ)
        last = _diagnose_once(arguments, environ)
    first.after = None if last is first else last
    return first


def _diagnose_once(arguments: Sequence[str], environ: Mapping[str, str]) -> Diagnosis:
    from sglang.srt.server_args import prepare_server_args

    settings = load_settings(environ)
    with _environment(environ):
        entry.register_name(settings)
        server_args = prepare_server_args(list(arguments))
        if hasattr(server_args, "resolve_once"):  # 0.5.20 and later resolve when the server starts
            server_args.resolve_once()
        server = planned_server(server_args)
        if not server.is_cpu and not torch.cuda.is_available():
            raise RuntimeError(f"the server would run on {server.device}, but no GPU is visible here")
        return examine(server, settings)


def examine(server: PlannedServer, settings: Settings) -> Diagnosis:
    """The diagnosis of a server, without changes."""
    prefill, decode = backends = server.backend_names
    of_backend = {name: _refusal(server, name, settings) for name in {prefill, decode}}
    steps: dict[str, Answer] = {}
    for mode in MODES:
        name = prefill if mode in ("extend", "mixed") else decode
        found = of_backend[name]
        steps[mode] = Answer(found) if isinstance(found, Reason) else _step(found, settings, mode, server, decode)
        if name == trtllm_mha.NAME and steps[mode].reason is None:
            steps[mode] = Answer(None, "; ".join(filter(None, [steps[mode].note, trtllm_mha.TESTED])))
    if not eligibility.has_steps(server, "mixed"):
        mixed_chunk = server.argument("enable_mixed_chunk")
        note = "without chunked prefill" if mixed_chunk else "without --enable-mixed-chunk"
        steps["mixed"] = Answer(fallback_reasons.NO_SUCH_STEPS, note)
    if not server.speculates:
        steps["verify"] = Answer(fallback_reasons.NO_SUCH_STEPS, "without speculative decoding")
    else:
        steps["decode"] = Answer(fallback_reasons.NO_SUCH_STEPS, "verify steps take their place")
    if server.has_no_decode_steps:
        for mode in ("decode", "mixed", "verify"):
            steps[mode] = Answer(fallback_reasons.NO_SUCH_STEPS, "the server only prefills")
    way = "name" if entry.NAME in backends else "wrap" if set(backends) & set(settings.wrap) else "off"
    steps = {mode: steps[mode] for mode in KINDS}
    return Diagnosis(
        backends, way, steps, _layers(server, settings, decode), server.architectures, server.device,
        kernels_of(server, settings), registration.why_not_read(settings.retention, server.server_args),
        server.heads_of_all_ranks,
    )  # fmt: skip


def _refusal(server: PlannedServer, name: str | None, settings: Settings) -> Executor | Reason:
    """The executor behind a backend's name, or the reason why no step runs packed on it."""
    if name == entry.NAME:
        if server.use_mla_backend:
            return fallback_reasons.MLA
        return eligibility.executor_at_start(server, settings, stock_name(server, settings.stock_backend))
    if name not in settings.wrap:
        return fallback_reasons.NOT_WRAPPED if name in WRAPPABLE else fallback_reasons.NOT_WRAPPABLE
    refusal = eligibility.wrap_refusal(server, name, _stock(server, name), settings)
    return refusal or eligibility.choose_executor(server, settings, name)


def _stock(server: PlannedServer, name: str) -> Any:
    """An object that stands for a stock backend; of SGLang's class where the checks ask it something."""
    if name != trtllm_mha.NAME:
        return type(eligibility.STOCK_CLASSES[name], (), {})()
    from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend

    stock = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    stock.page_size, stock.data_type = server.page_size, server.kv_cache_dtype
    return stock


def _step(executor: Executor, settings: Settings, mode: Any, server: PlannedServer, decode: str | None) -> Answer:
    reason = eligibility.why_stock(executor, settings, mode)
    if mode == "mixed" and reason is None and executor.judges_mixed:
        return Answer(None, f"if {mixed.RULE}")
    fixed = settings.policy.fixed is not None or (settings.route == "auto" and executor.kernels == "cpu")
    routed = reason is None and not fixed and (mode == "decode" or (mode == "verify" and executor.kernels != "cpu"))
    return Answer(reason, _route(executor, server, settings, decode, mode) if routed else "")


def _route(executor: Executor, server: PlannedServer, settings: Settings, decode: str | None, mode: str) -> str:
    """What decides about each decode or verify step on a GPU."""
    if settings.route != "auto":
        return f"if {settings.route}"
    name = stock_name(server, settings.stock_backend) if decode == entry.NAME else str(decode)
    gpu, capability = gpu_name()
    kv = server.kv_cache_dtype
    shape = next((layer_shape(layer, kv) for layer in attention_layers(server.model) if kv is not None), None)
    if shape is None:
        return ""
    kernels = rule.KernelPair(gpu, capability, executor.kernels, name)
    policy = verify.policy(gpu, executor.kernels, name, shape) if mode == "verify" else rule.auto(kernels, shape)
    return "" if isinstance(policy, FixedPolicy) else f"if {policy}"


def kernels_of(server: PlannedServer, settings: Settings) -> str | None:
    """The kernels of packed steps on a server's GPU, and why not others; None on a CPU."""
    if server.is_cpu:
        return None
    device = torch.device(server.device)
    chosen = choose_kernels(settings.gpu_kernels, device)
    if isinstance(chosen, Refused):
        return f"none: {chosen.detail}"
    because = why_not_native(device) if settings.gpu_kernels == "auto" else None
    why = ", as set" if settings.gpu_kernels != "auto" else "" if because is None else f", because {because}"
    gpu = gpu_of(device)
    return chosen.name + why + ("" if gpu.is_fitted else f". The planner's figures: {gpu.origin()}")


def _layers(server: PlannedServer, settings: Settings, decode: str | None) -> list[tuple[str, Answer]]:
    """The kinds of layers in a packed step, as the layer registry judges them, whether or not there are such steps."""
    name = stock_name(server, settings.stock_backend) if decode == entry.NAME else str(decode)
    made = eligibility.device_executor(server, settings, name)
    why_all_stock = made if isinstance(made, Reason) else None
    executor = CpuExecutor(server, settings) if isinstance(made, Reason) else made
    registry = LayerRegistry(server, executor, Counters(), why_all_stock, knows_kv_scales(name))
    by_id = {layer.layer_id: layer for layer in attention_layers(server.model)}
    described = []
    for kind in server.layer_kinds:
        if kind.layers:
            layer = by_id[kind.layers[0]]
            heads = f"{layer.tp_q_head_num}/{layer.tp_k_head_num} heads, head_dim {kind.head_dim}"
            described.append((f"{len(kind.layers)} x {kind.name}, {heads}", Answer(registry.unsupported_reason(layer))))
    return described


@contextlib.contextmanager
def _environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Makes `environ` the environment; SGLang reads it, and writes some of its decisions there."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environ)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpu_facts() -> dict[str, Any] | None:
    """The GPU of this machine; None without one."""
    if not torch.cuda.is_available():
        return None
    return {"name": torch.cuda.get_device_name(), "capability": list(torch.cuda.get_device_capability())}
