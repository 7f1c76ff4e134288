"""Arguments of `python -m sgl_prefix_attn abtest`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sgl_prefix_attn.abtest import live, servers
from sgl_prefix_attn.abtest.client import Client
from sgl_prefix_attn.abtest.judge import Outcome, Verdict, judge, outcomes, table_lines
from sgl_prefix_attn.core.files import check_writable, write_whole
from sgl_prefix_attn.routing import policy_names
from sgl_prefix_attn.routing.live_plan import LivePlan
from sgl_prefix_attn.routing.measured import BACKENDS, read_results

_EXAMPLES = """examples:
  %(prog)s steps benchmarks/results/gpu_drawn.json auto 'batch>=64' 'saved>=8' --stock fa3
      time of each policy over the measured steps, against an oracle and the stock backend
  %(prog)s live http://127.0.0.1:30000 'batch>=64' auto --out ab.json
      both policies in turn on a running server, under the traffic that it has
  %(prog)s servers http://host-a:30000 http://host-b:30000 --requests rollouts.jsonl --out ab.json
      the same requests to two servers, for example with PREFIXPACK_ROUTE=auto and =stock
"""


_HEADER = ("policy", "steps", "packed", "mean regret", "regret", "behind", "worst against stock", "gain", "oracle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compares routing policies: over measured steps, or live on a server."
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_steps(commands)
    _add_live(commands)
    _add_servers(commands)


def run(args: argparse.Namespace) -> int:
    try:
        args.act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _add_steps(commands: Any) -> None:
    parser = commands.add_parser("steps", help="policies over measured steps")
    parser.add_argument(
        "words", nargs="+", metavar="STEPS.json | POLICY",
        help="files of python -m benchmarks.kernel.gpu_drawn; policies as the setting route takes them (default auto, "
        "which is the rule of the files' GPU, packed and stock)",
    )  # fmt: skip
    parser.add_argument("--families", action="store_true", help="a row for each family as well")
    parser.add_argument("--packed", default="native", choices=("native", "triton"), help="kernels (default native)")
    parser.add_argument("--stock", nargs="+", default=["fa3"], choices=BACKENDS, help="backends (default fa3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=_steps)


def _add_live(commands: Any) -> None:
    parser = commands.add_parser("live", help="two policies in turn on a running server with PREFIXPACK_LIVE_TESTS=1")
    parser.add_argument("url", metavar="URL", help="of the server, for example http://127.0.0.1:30000")
    parser.add_argument(
        "arms", nargs=2, metavar="POLICY", help="as the setting route takes them; twice the same: an A/A test"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's admin key")
    parser.add_argument("--block", type=int, default=16, metavar="STEPS", help="decode steps of a block (default 16)")
    parser.add_argument("--warmup", type=int, default=4, metavar="STEPS", help="of a block, not counted (default 4)")
    parser.add_argument("--pairs", type=int, default=400, metavar="N", help="pairs of blocks (default 400)")
    parser.add_argument(
        "--lease",
        type=int,
        default=2000,
        metavar="STEPS",
        help="the server ends the test so long after the client was last heard",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the arms (default 0)")
    _add_limits(parser)
    parser.set_defaults(act=_live)


def _add_servers(commands: Any) -> None:
    parser = commands.add_parser("servers", help="two servers, by the same requests")
    parser.add_argument("urls", nargs=2, metavar="URL", help="address list: of arm A, of arm B")
    parser.add_argument(
        "--requests", type=Path, required=True, metavar="FILE.jsonl",
        help='a line for each: {"input_ids": [...], "max_new_tokens": N, "n": samples}',
    )  # fmt: skip
    parser.add_argument("--api-key", metavar="KEY", help="of both servers (default: the variable OPENAI_API_KEY)")
    parser.add_argument("--block", type=int, default=32, metavar="N", help="requests sent at once (default 32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the servers (default 0)")
    _add_limits(parser)
    parser.set_defaults(act=_servers)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1800.0, help="stop after this time (default 1800)")
    parser.add_argument(
        "--effect", type=float, default=1.0, metavar="PERCENT", help="difference to plan for (default 1)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the verdict and all times")


def _servers(args: argparse.Namespace) -> None:
    effect = _effect(args)
    if not 1 <= args.block <= 4096:
        raise ValueError(f"--block {args.block}: expected 1 to 4096 requests")
    requests = servers.read_requests(args.requests)
    verdict = servers.compare_servers(
        (args.urls[0], args.urls[1]), requests, args.block, seed=args.seed, effect=effect, seconds=args.seconds,
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
    )  # fmt: skip
    print("\n".join(verdict.lines()))
    if args.out is not None:
        write_whole(args.out, (json.dumps({"verdict": verdict.as_json()}) + "\n").encode())


def _effect(args: argparse.Namespace) -> float:
    """As a fraction. Checks --seconds and --out as well, before anything runs."""
    if not args.seconds > 0:  # NaN as well
        raise ValueError(f"--seconds {args.seconds:g}: expected more than 0")
    if not 0.01 <= args.effect <= 100:
        raise ValueError(f"--effect {args.effect}: expected 0.01 to 100 percent")
    if args.out is not None:
        check_writable(args.out)
    return float(args.effect) / 100


def _live(args: argparse.Namespace) -> None:
    effect = _effect(args)
    try:
        plan = LivePlan(
            arms=(args.arms[0], args.arms[1]), block_steps=args.block, warmup_steps=args.warmup, pairs=args.pairs,
            seed=args.seed, lease_steps=args.lease,
        )  # fmt: skip
    except ValidationError as error:
        raise ValueError(_problems(error)) from error
    copies = live.run(Client(args.url, args.api_key), plan, args.seconds)
    live.report(copies, effect, args.out)


# Options of fields with another name.
_OPTIONS = {"block_steps": "block", "lease_steps": "lease", "warmup_steps": "warmup"}


def _problems(error: ValidationError) -> str:
    """The problems of a plan, by the options of the command line."""
    found = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        option = f"--{_OPTIONS.get(name, name)} {problem['input']}: " if name and name != "arms" else ""
        found.append(option + problem["msg"])
    return "; ".join(found)


def _steps(args: argparse.Namespace) -> None:
    policies = [policy_names.parse(word) for word in args.words if not word.endswith(".json")]
    policies = policies or [policy_names.parse(name) for name in ("auto", "packed", "stock")]
    files = [read_results(word) for word in args.words if word.endswith(".json")]
    found: list[tuple[str, str, Verdict]] = []
    for stock in args.stock:
        for policy in policies:
            steps = [step for results in files for step in outcomes(results, policy, args.packed, stock)]
            found.append((stock, str(policy), judge(steps)))
            if args.families:
                found += [(stock, f"  {family}", judge(of)) for family, of in _by_family(steps).items()]
    if args.json:
        rows = [{"stock": stock, "name": name.strip(), **asdict(verdict)} for stock, name, verdict in found]
        print(json.dumps({"results": [results.source for results in files], "rows": rows}, indent=1))
        return
    for results in files:
        print(f"{results.source}: {results.machine}, commit {results.commit}")
    for backend in args.stock:
        print(f"packed {args.packed} or stock {backend}, one layer, cold L2")
        print("\n".join(table_lines([_HEADER, *(_row(name, of) for stock, name, of in found if stock == backend)])))
    print(
        "mean regret: time lost against an oracle, mean of the steps; regret: of the total time; behind: steps behind "
        "stock by more than 3 % and 1 us; gain, oracle: over stock, geometric mean"
    )


def _row(name: str, verdict: Verdict) -> tuple[str, ...]:
    return (
        name,
        str(verdict.steps),
        str(verdict.packed),
        f"{verdict.mean_regret:.2%}",
        f"{verdict.regret:.2%}",
        str(verdict.behind),
        f"{verdict.worst[0]:+.1%} {verdict.worst[1]}",
        f"{verdict.gain:.3f}",
        f"{verdict.oracle:.3f}",
    )


def _by_family(steps: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for step in steps:
        found.setdefault(step.case.family, []).append(step)
    return found
