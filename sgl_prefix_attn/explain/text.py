"""An explanation as text for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sgl_prefix_attn.explain.report import Explanation
from sgl_prefix_attn.explain.server import Decision, LiveTest, RouteState, ServerState

_NO_NODE = -1
_MANY_PREFILLS = 0.1  # prefill steps for each decode step, from which the options for refills are named
REFILL_OPTIONS = "--enable-mixed-chunk, --min-free-slots-delay, --prefill-decode-interval"
_ROOTS_SHOWN = 8  # a quarter of that below each, and so on, but at least one


def render(explanation: Explanation) -> str:
    """The whole report."""
    parts = [
        _header(explanation),
        ["", _forest_summary(explanation), *_forest_lines(explanation)],
        ["", *_item_lines(explanation)],
        ["", *_read_lines(explanation)],
        ["", *_route_lines(explanation)],
    ]
    return "\n".join(line for part in parts for line in part)


def render_state(state: ServerState) -> str:
    """Counters of one scheduler process since its start."""
    counters = state.counters
    made, reused = counters.plans_made, counters.plans_reused
    read, per_request, unique = counters.kv_tokens_read, counters.kv_tokens_per_request, counters.kv_tokens_unique
    steps = sum(counters.steps_packed.values())
    rows = [
        ("sglang", f"{state.sglang}, stock backend {state.stock_backend}"),
        ("steps packed", _counts(counters.steps_packed)),
        ("one token", _counts(counters.one_token_steps)),
        ("fallbacks", _counts(counters.fallbacks)),
        ("plans", f"{made:,} made, {reused:,} reused ({_percent(reused, made + reused)})"),
        ("host time", _host_time(counters.plan_seconds, counters.host_seconds, steps)),
        ("KV tokens", f"{read:,} read, {per_request:,} per request, {unique:,} at the limit"),
        ("KV reads", f"{_percent(read, per_request)} of per-request, limit {_percent(unique, per_request)}"),
    ]
    if counters.prefill_steps > _MANY_PREFILLS * counters.decode_steps > 0:
        rows.append(
            (
                "prefill",
                f"{counters.prefill_steps:,} steps beside {counters.decode_steps:,} decode steps; if requests refill a "
                f"rollout: {REFILL_OPTIONS}, see docs/refills.md",
            )
        )
    if state.route is not None:
        rows += _route_rows(state.route)
    return "\n".join(_aligned(rows))


def _route_rows(route: RouteState) -> list[tuple[str, str]]:
    policy = route.policy if route.policy == route.setting else f"{route.setting}, decided by {route.policy}"
    rows = [("route", policy)]
    if route.rule is not None:
        rows.append(("rule", f"packed if {route.rule}"))
    rows.append(("last decision", _decision(route.last)))
    return rows if route.live is None else rows + _live_rows(route.live)


def _live_rows(live: LiveTest) -> list[tuple[str, str]]:
    rows = [("live test", live.status + ("" if live.arm is None else f", arm {'AB'[live.arm]} decides"))]
    for index, (name, running) in enumerate(zip(live.arms, live.running, strict=True)):
        policy = name if name == running else f"{name}, decided by {running}"
        would, last = _counts(live.would[index]), _decision(live.last[index])
        rows.append((f"  arm {'AB'[index]}", f"{policy}; steps it would choose: {would}; last {last}"))
    return rows


def _decision(decision: Decision | None) -> str:
    if decision is None:
        return "none"
    saving = f"sharing saves {decision.saved_mib:,.1f} of {decision.kv_mib:,.1f} MiB of KV a layer"
    return f"{decision.route}, {decision.requests:,} requests, {saving}"


def _header(explanation: Explanation) -> list[str]:
    batch, shape, device = explanation.batch, explanation.shape, explanation.device
    kv_lengths, queries = _span(batch.seq_lens.tolist(), "token"), _span(batch.query_lens.tolist(), "new token")
    rows = [
        ("batch", f"{_plural(batch.num_requests, 'request')}; each {queries}; KV {kv_lengths}"),
        (
            "model",
            f"{shape.q_heads}/{shape.kv_heads} heads, head_dim {shape.head_dim}, {8 * shape.kv_bytes}-bit KV, "
            f"{8 * shape.partial_bytes}-bit partial results",
        ),
        (
            "device",
            f"{_plural(device.workers, 'worker')}, {device.bandwidth / 1e9:,.0f} GB/s, "
            f"tiles of {_words(device.tile_rows)} rows",
        ),
    ]
    return [batch.title, *_aligned(rows)]


def _forest_summary(explanation: Explanation) -> str:
    forest = explanation.forest
    parents = forest.node_parent.tolist()
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == _NO_NODE else depths[parent] + 1)
    if not parents:
        return "Forest: nothing is shared"
    roots = parents.count(_NO_NODE)
    return (
        f"Forest: {_plural(len(parents), 'shared node')}, {_plural(roots, 'root')}, {_plural(max(depths), 'level')}; "
        f"{explanation.shared_share:.0%} of the requests' KV positions are shared"
    )


def _forest_lines(explanation: Explanation) -> Iterator[str]:
    """Nodes indented below their parent. Siblings whose subtrees look alike are one entry with a count."""
    forest = explanation.forest
    children: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(forest.node_parent.tolist()):
        children[parent].append(node)
    tails: dict[int, list[int]] = defaultdict(list)
    own_tokens = explanation.batch.seq_lens - forest.tail_begin
    for node, tokens in zip(forest.tail_node.tolist(), own_tokens.tolist(), strict=True):
        tails[node].append(tokens)
    readers = (forest.node_last - forest.node_first).tolist()
    begins, ends = forest.node_begin.tolist(), forest.node_end.tolist()
    looks: dict[str, int] = {}
    look_of = [0] * forest.num_nodes
    for node in reversed(range(forest.num_nodes)):  # children before parents
        look = (begins[node], ends[node], sorted(tails[node]), [look_of[child] for child in children[node]])
        look_of[node] = looks.setdefault(str(look), len(looks))

    def lines(node: int, depth: int) -> Iterator[str]:
        indent = "  " * (depth + 1)
        alike: dict[int, list[int]] = defaultdict(list)
        for child in children[node]:
            alike[look_of[child]].append(child)
        shown = max(1, _ROOTS_SHOWN >> (2 * depth))
        for child, *others in list(alike.values())[:shown]:
            times = f"{1 + len(others):,} times " if others else ""
            yield (
                f"{indent}{times}{begins[child]:,} to {ends[child]:,}: "
                f"{_plural(ends[child] - begins[child], 'token')} read by {readers[child]:,} requests"
            )
            yield from lines(child, depth + 1)
        hidden = [child for group in list(alike.values())[shown:] for child in group]
        if hidden:
            below = sum(readers[child] for child in hidden)
            yield f"{indent}... {_plural(len(hidden), 'more node')} here, read by {below:,} requests"
        if tails[node]:
            yield f"{indent}{_plural(len(tails[node]), 'private tail')} of {_span(tails[node], 'token')}"

    yield from lines(_NO_NODE, 0)


def _item_lines(explanation: Explanation) -> list[str]:
    items = _plural(len(explanation.plan.items), "work item")
    rows: list[Sequence[str]] = [("ranges", "tile rows", "items", "KV tokens", "rows filled")]
    rows += [
        (
            item_class.kind,
            str(item_class.tile_rows),
            f"{item_class.items:,}",
            f"{item_class.kv_tokens:,}",
            f"{item_class.rows_filled:.0%}",
        )
        for item_class in explanation.item_classes
    ]
    return [
        f"Plan: {items}, made in {_duration(explanation.plan_seconds)}",
        *_table(rows),
    ]


def _read_lines(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    per_request = plan.kv_tokens_per_request
    rows: list[Sequence[str]] = [("KV reads of a layer", "tokens", "MB", "of per-request", "fewer")]
    for name, tokens in (
        ("per request", per_request),
        ("packed", plan.kv_tokens_packed),
        ("limit", plan.kv_tokens_unique),
    ):
        megabytes = tokens * explanation.token_bytes / 1e6
        rows.append(
            (name, f"{tokens:,}", f"{megabytes:,.1f}", _percent(tokens, per_request), f"{per_request / tokens:.2f}x")
        )
    rows.append(("partial results", "", f"{explanation.partial_bytes / 1e6:,.1f}", "", ""))
    return _table(rows)


def _route_lines(explanation: Explanation) -> list[str]:
    """The floor and the route of the step; without a route why there is none."""
    lines, floor, step = [], explanation.floor_seconds, explanation.route
    if floor is not None:
        speed = f"{explanation.machine.bandwidth / 1e12:.2f} TB/s"
        lines.append(f"Floor of a layer: {_duration(floor)}, the limit at the data sheet's {speed}")
    if isinstance(step, str):
        return [*lines, f"Route: none, {step}"]
    saving = f"sharing saves {step.saved_mib:,.1f} of {step.kv_mib:,.1f} MiB of KV a layer"
    if step.rule is None:
        return [*lines, f"Route: {step.route}, as every step of these kernels; {saving}"]
    return [
        *lines,
        f"Route over stock {step.stock}: {step.route}; {saving}",
        f"  packed if {step.rule}",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with the first column left and the others right aligned, indented by two."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([f"  {name.ljust(widths[0])}", *aligned]).rstrip())
    return lines


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name.ljust(width)}  {text}" for name, text in rows]


def _host_time(plan_seconds: float, host_seconds: float, steps: int) -> str:
    per_step = f", {_duration(host_seconds / steps)} a step" if steps else ""
    return f"{_duration(host_seconds)}, of which planning {_duration(plan_seconds)}{per_step}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count) or "none"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} us"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _span(values: Sequence[int], noun: str) -> str:
    low, high = min(values), max(values)
    if low == high:
        return _plural(low, noun)
    return f"{low:,} to {_plural(high, noun)}, mean {sum(values) / len(values):,.0f}"


def _words(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
