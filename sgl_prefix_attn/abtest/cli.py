"""Arguments of `python -m sgl_prefix_attn abtest`."""

from __future__ import annotations

import argparse
import sys

from sgl_prefix_attn.calibration.judge import Outcome, Verdict, candidate, judge, outcomes
from sgl_prefix_attn.calibration.report import table_lines
from sgl_prefix_attn.routing.measured import BACKENDS, read_results

_EXAMPLES = """examples:
  %(prog)s steps benchmarks/results/gpu_drawn.json packed 'batch>=64' shipped shipped@20 --stock fa3
      time of each policy over the measured steps, against an oracle and the stock backend
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compares routing policies over measured steps."
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    steps = commands.add_parser("steps", help="policies over measured steps")
    steps.add_argument("results", metavar="RESULTS.json", help="written by python -m benchmarks.kernel.gpu_attention")
    steps.add_argument(
        "policies",
        nargs="+",
        metavar="POLICY",
        help="packed or stock for every step; conservative: the rule without a profile; batch>=N or reuse>=X: packed "
        "from N requests on, or if a KV token is read X times on average; PROFILE[@MARGIN]: a profile's file, or "
        "shipped, and the route_margin in percent (default: the profile's); left-out[@MARGIN]: every family of steps "
        "by a profile fitted on all others",
    )
    steps.add_argument("--families", action="store_true", help="a row for each family of cases as well")
    steps.add_argument("--packed", default="native", metavar="KERNELS", help="native (default), triton or cpu")
    steps.add_argument("--stock", default="fa3", choices=BACKENDS, help="the stock backend (default fa3)")
    steps.set_defaults(act=_steps)


def run(args: argparse.Namespace) -> int:
    try:
        args.act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _steps(args: argparse.Namespace) -> None:
    results = read_results(args.results)
    print(f"{results.machine}, commit {results.commit}: packed {args.packed} or stock {args.stock}, one layer, cold L2")
    header = ("policy", "steps", "packed", "wrong", "regret", "mean", "worst", "worst against stock")
    rows: list[tuple[str, ...]] = [header]
    for text in args.policies:
        steps = outcomes(results.cases, candidate(text, args.packed, args.stock, results), args.packed, args.stock)
        rows.append(_row(text, judge(steps)))
        if args.families:
            rows += [_row(f"  {family}", judge(of)) for family, of in _by_family(steps).items()]
    print("\n".join(table_lines(rows)))
    print(
        "regret: time lost against an oracle, of the total; mean: geometric mean over steps; worst: largest loss of a "
        "step"
    )


def _row(name: str, verdict: Verdict) -> tuple[str, ...]:
    return (
        name,
        str(verdict.steps),
        str(verdict.packed),
        str(verdict.wrong),
        f"{verdict.regret:+.2%}",
        f"{verdict.mean_regret:+.2%}",
        f"{verdict.worst_regret[0]:+.1%} {verdict.worst_regret[1]}",
        f"{verdict.worst_loss[0]:+.1%} {verdict.worst_loss[1]}",
    )


def _by_family(steps: list[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for step in steps:
        found.setdefault(step.case.family, []).append(step)
    return found
