"""The JSON state of a scheduler process in GET /server_info, and the update of its metrics.

Version 1 of the state, under the key "prefixpack" of each of `internal_states`:

    {"version": 1, "counters": Counters.as_dict(), "stock_backend": name,
     "refused": why no step runs packed or null (a reason as in `fallbacks`),
     "disabled": {feature: why it is off}, "wrapped": names of the stock backends that run wrapped (wrap mode),
     "sglang": version, "route": how decode steps are
     routed or null, "layers": {"packed": attention layers that run packed, "stock": {reason: others}} or null,
     "shape": fields of ModelShape, "device": fields of DeviceModel (both null before the first packed step),
     "batch": null or the last packed batch as {"mode", "seq_lens", "query_lens", "paths": [[[id, start, end], ...],
     ...]}, "tells_batch": whether it is told: not by servers with an API key, since any key reads it, and it tells what
     a request shares with others}

`route` is {"setting": a policy, "policy": what decides (rule or conservative for auto), "rule": when a step runs packed
by it, in words, or null, "kernels": fields of `routing.rule.KernelPair`, or null before the layers are known, "last":
null or the last decision as {"route", "saved_mib": of a layer's KV by sharing, "kv_mib": of all requests, "requests"},
"live": null or the state of a live test as {"status", "arms", "running", "arm", "would", "last"}, "graph_sizes": batch
sizes with a decode graph for either route}.
The ids in `paths` number the nodes of that batch's forest; two requests share a segment if they name the same id.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sgl_prefix_attn.sglang_plugin.backend import live_commands, plugin_state, running_prompts
from sgl_prefix_attn.sglang_plugin.backend.plugin_state import BackendRecord, PluginState
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

KEY = "prefixpack"
SCHEDULING_KEY = "prefixpack_scheduling"
VERSION = 1


def batch_state(handed: Handed) -> dict[str, Any] | None:
    """The last packed batch as JSON-able values."""
    paths = handed.paths
    if isinstance(paths, Reason):
        return None
    lens = handed.seq_lens.numpy() + (paths.query_lens if paths.mode == "verify" else 0)
    return {
        "mode": paths.mode,
        "seq_lens": lens.tolist(),
        "query_lens": [1] * paths.num_requests if paths.query_lens is None else paths.query_lens.tolist(),
        "paths": [[list(segment) for segment in path] for path in paths.forest.paths()],
    }


def process_state(state: PluginState) -> dict[str, Any]:
    """The state of a process with at least one backend, as JSON-able values."""
    record = state.reported()
    last = None if record is None else record.last_packed
    tells_batch = not versions.has_api_keys()
    planners = [] if record is None or last is None else record.executor.planners
    planner = planners[0] if planners else None
    return {
        "version": VERSION,
        "counters": state.counters.as_dict(),
        "stock_backend": state.stock_backend,
        "refused": None if (refusal := state.refusal()) is None else refusal.key,
        "wrapped": state.wrapped(),
        "sglang": state.sglang_version,
        "disabled": state.disabled(),
        "route": None if record is None else route_state(record),
        "layers": None if record is None else record.layers.summary(),
        "shape": None if planner is None else asdict(planner.shape),
        "device": None if planner is None else asdict(planner.device),
        "batch": batch_state(last) if last is not None and tells_batch else None,
        "tells_batch": tells_batch,
    }


def route_state(record: BackendRecord) -> dict[str, Any]:
    """How decode steps of a backend are routed."""
    return {**record.router.state(), "graph_sizes": record.step_planner.graph_variants.sizes}


def after_get_internal_state(result: Any, scheduler: Any = None, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.get_internal_state`: adds our state to the answer."""
    state = plugin_state.active()
    if state is None or state.handover is None:
        return
    with state.counters.failures.guard("server_info", "the answer lacks our state"):
        request = args[0] if args else kwargs.get("recv_req")
        key = state.settings.fingerprint_key
        if key is not None and getattr(request, "rid", None) == running_prompts.COMMAND:
            prompts = state.own(running_prompts.RunningPrompts, key.get_secret_value())
            result.internal_state[running_prompts.ANSWER_KEY] = prompts.state(versions.running_requests(scheduler))
        command = live_commands.command_of(request)
        if command is not None:
            result.internal_state[live_commands.ANSWER_KEY] = live_commands.answer(command, state)
        result.internal_state[KEY] = process_state(state)
        state.flush_metrics()


def tell_without_backend(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.get_internal_state` and `on_idle`, for servers whose settings ask for scheduling.

    Without a backend of ours it adds what is off and what has failed to the answer, and updates the metrics.
    """
    state = plugin_state.active()
    if state is None or state.handover is not None:
        return
    failures = state.counters.failures
    with failures.guard("server_info", "the answer lacks our state"):
        if result is not None:
            result.internal_state[SCHEDULING_KEY] = {"disabled": state.disabled(), "failures": dict(failures.counts)}
        if failures.disabled or failures.counts:
            state.export_metrics(lambda: ServerFacts.of(scheduler.tp_worker.model_runner))
            state.flush_metrics()


def after_on_idle(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.on_idle`: updates the metrics while the server is idle."""
    state = plugin_state.active()
    if state is None or state.handover is None:
        return
    with state.counters.failures.guard("on_idle"):
        for record in state.backends.values():
            record.router.idle()
        state.flush_metrics()
