"""What this scheduler process tells about itself: the JSON state in GET /server_info, and metrics kept fresh.

Version 1 of the state, under the key "prefixpack" of each of `internal_states`:

    {"version": 1, "counters": Counters.as_dict(), "handover": "hooks"|"patch", "stock_backend": name,
     "sglang": version, "metrics_failures": updates of the Prometheus metrics that raised, "route": how decode steps are
     routed or null, "shape": fields of ModelShape, "device": fields of DeviceModel (both null before the first packed
     step), "batch": null or the last packed batch as
     {"mode", "seq_lens", "query_lens", "paths": [[[id, start, end], ...], ...]}}

`route` is {"setting": "auto"|"packed"|"stock", "profile": what it predicts by or null, "last": null or the last
decision as {"route", "packed_us", "stock_us"}, "graph_sizes": batch sizes with a decode graph for either route}.
The ids in `paths` number the nodes of that batch's forest; two requests share a segment if they name the same id.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sgl_prefix_attn.sglang_plugin.backend import runtime
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed

KEY = "prefixpack"
VERSION = 1


def batch_state(handed: Handed) -> dict[str, Any] | None:
    """The last packed batch as JSON-able values."""
    step = handed.step
    if isinstance(step, str):
        return None
    return {
        "mode": step.mode,
        "seq_lens": handed.seq_lens.tolist(),
        "query_lens": [1] * step.num_requests if step.query_lens is None else step.query_lens.tolist(),
        "paths": [[list(segment) for segment in path] for path in step.forest.paths()],
    }


def route_state(current: runtime.Runtime) -> dict[str, Any] | None:
    """How decode steps are routed."""
    if current.routes is None or current.graph_routes is None:
        return None
    return {**current.routes.state(), "graph_sizes": current.graph_routes.sizes}


def process_state(current: runtime.Runtime) -> dict[str, Any]:
    """State of a process that built at least one backend."""
    planner, last = current.planner, current.last_packed
    return {
        "version": VERSION,
        "counters": current.counters.as_dict(),
        "handover": current.handover.kind,
        "stock_backend": current.stock_backend,
        "sglang": current.sglang_version,
        "metrics_failures": current.metrics_failures,
        "route": route_state(current),
        "shape": None if planner is None else asdict(planner.shape),
        "device": None if planner is None else asdict(planner.device),
        "batch": None if last is None else batch_state(last),
    }


def after_get_internal_state(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.get_internal_state`: adds our state to the answer."""
    current = runtime.active()
    if current is None:
        return
    try:
        result.internal_state[KEY] = process_state(current)
        current.flush_metrics()
    except Exception:  # the one guard of this hook: the server's own answer must arrive
        current.counters.hook_failed()


def after_on_idle(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `Scheduler.on_idle`: brings the metrics up to date when there is time."""
    current = runtime.active()
    if current is None:
        return
    try:
        current.flush_metrics()
    except Exception:  # the one guard of this hook
        current.counters.hook_failed()
