"""Arguments of `python -m sgl_prefix_attn explain`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from sgl_prefix_attn.explain import spread
from sgl_prefix_attn.explain.batch import BatchDescription, InputError, parse_tree, read_batch_file
from sgl_prefix_attn.explain.devices import DEVICE_NAMES, STOCK_BACKENDS, machine, machine_of_server, model_shape
from sgl_prefix_attn.explain.report import Explanation, explain
from sgl_prefix_attn.explain.server import ServerState, read_prompts, read_states
from sgl_prefix_attn.explain.text import render, render_state

_EXAMPLES = """examples:
  %(prog)s --tree 1,10/4096,416 --heads 32/8 --device h200
      10 requests below one 4096-token prompt, 416 tokens of their own each
  %(prog)s --server http://127.0.0.1:30000
      counters and the last packed batch of a running server
  %(prog)s --server http://host-a:30000 --server http://host-b:30000
      how the running requests' shared prefixes are spread over engines
  %(prog)s --batch batch.json --json
      {"paths": [[[node id, start, end], ...] for each request], "seq_lens": [...], "query_lens": [...]}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what the planner makes of a batch: the forest of shared prefixes, the work items, KV tokens read packed, "
        "per request and at the limit, and whether a step runs packed or on the stock backend."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    source = parser.add_argument_group("the batch (one of)").add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tree",
        metavar="NODES/TOKENS",
        help="nodes per level / tokens per level, as in 1,10/4096,416; node j of a level hangs under node j * (size of "
        "the level above) // (size of the level); the last level are the requests with their own tokens",
    )
    source.add_argument("--batch", metavar="FILE", help="JSON file with paths, seq_lens and, if not all 1, query_lens")
    source.add_argument(
        "--server",
        metavar="URL",
        action="append",
        help="a running server, as in http://127.0.0.1:30000; given several times: the sharing that is lost because "
        "requests with equal prefixes run on different servers",
    )

    details = parser.add_argument_group("more about the batch")
    details.add_argument("--query-len", type=int, metavar="N", help="--tree: new tokens of each request (default 1)")
    details.add_argument("--api-key", metavar="KEY", help="--server: its API key; of several servers the admin key")
    details.add_argument("--rank", type=int, metavar="N", help="--server: only this data-parallel rank (default all)")

    device = parser.add_argument_group("model and device (--server reports its own; these replace it)")
    device.add_argument("--heads", metavar="Q/KV", help="query heads / KV heads (default 32/8)")
    device.add_argument("--head-dim", type=int, metavar="N", help="default 128")
    device.add_argument("--kv-dtype", choices=("fp32", "fp16", "bf16", "fp8"), help="default bf16")
    device.add_argument("--device", choices=DEVICE_NAMES, help="default cpu, this machine's threads")
    device.add_argument("--stock", choices=STOCK_BACKENDS, help="the other route (default fa3, or the server's)")

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        _check_options(args)
        if args.server and len(args.server) > 1:
            _run_servers(args)
        elif args.server:
            _run_server(args.server[0], args)
        else:
            shape = model_shape(args)
            explanation = explain(_batch(args), shape, machine(args, shape))
            _print(explanation.to_json() if args.json else render(explanation))
    except InputError as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """An option of another source is an error, not ignored."""
    for option, source in (
        ("query_len", "tree"),
        ("api_key", "server"),
        ("rank", "server"),
    ):
        if getattr(args, option) is not None and getattr(args, source) is None:
            raise InputError(f"--{option.replace('_', '-')} belongs to --{source}")


def _batch(args: argparse.Namespace) -> BatchDescription:
    if args.tree is not None:
        return parse_tree(args.tree, 1 if args.query_len is None else args.query_len)
    return read_batch_file(args.batch)


def _run_servers(args: argparse.Namespace) -> None:
    """The spread of the running requests over several servers; each data-parallel rank is an engine of its own."""
    if args.rank is not None:
        raise InputError("--rank works with one --server")
    engines = {}
    for url in dict.fromkeys(url.rstrip("/") for url in args.server):
        ranks = read_prompts(url, args.api_key)
        for rank, running in enumerate(ranks):
            engines[url if len(ranks) == 1 else f"{url} rank {rank}"] = running
    blocks = {name: running.block for name, running in engines.items()}
    if len(set(blocks.values())) > 1:
        told = ", ".join(f"{name}: {block}" for name, block in blocks.items())
        raise InputError(f"prompts cannot be compared, as the servers hash blocks of different sizes ({told} tokens)")
    if len({running.key for running in engines.values()}) > 1:
        raise InputError("prompts cannot be compared, as the servers have different settings fingerprint_key")
    found = spread.spread(engines)
    _print(spread.as_json(found) if args.json else spread.render(found))


def _run_server(url: str, args: argparse.Namespace) -> None:
    states = dict(enumerate(read_states(url, args.api_key)))
    if args.rank is not None:
        if args.rank not in states:
            raise InputError(f"--rank {args.rank}: {url} reports ranks 0 to {len(states) - 1}")
        states = {args.rank: states[args.rank]}
    explained = {rank: _explain_state(state, f"{url} rank {rank}", args) for rank, state in states.items()}
    if args.json:
        _print(
            {
                "server": url,
                "ranks": [
                    {"rank": rank, **state.model_dump(exclude={"batch"}), "last_packed_batch": _json(explained[rank])}
                    for rank, state in states.items()
                ],
            }
        )
    else:
        for rank, state in states.items():
            explanation = explained[rank]
            untold = "no batch ran packed yet" if state.tells_batch else "not told by a server with an API key"
            batch = untold if explanation is None else render(explanation)
            _print(f"{url} rank {rank} since its start\n{render_state(state)}\n\nlast packed batch: {batch}")


def _explain_state(state: ServerState, title: str, args: argparse.Namespace) -> Explanation | None:
    batch = state.described_batch(title)
    if batch is None:
        return None
    shape = model_shape(args, state.shape)
    kernels = None if state.route is None else state.route.kernels
    return explain(batch, shape, machine_of_server(args, shape, state.device, kernels, state.stock_backend))


def _json(explanation: Explanation | None) -> dict[str, Any] | None:
    return None if explanation is None else explanation.to_json()


def _print(content: str | dict[str, Any]) -> None:
    print(content if isinstance(content, str) else json.dumps(content))
