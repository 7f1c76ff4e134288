"""Arguments of `python -m sgl_prefix_attn route`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.explain.batch import InputError, parse_tree
from sgl_prefix_attn.explain.devices import model_shape
from sgl_prefix_attn.routing.compare import Outcome, Verdict, candidate, judge, outcomes
from sgl_prefix_attn.routing.cost import TERMS, CostModel, Kind
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.fit_profile import fit_profile
from sgl_prefix_attn.routing.measured import read_results, stock_kernel
from sgl_prefix_attn.routing.policy import CostPolicy, Route
from sgl_prefix_attn.routing.profile import Fit, Profile, load_profile, shipped_profile_of

BACKENDS = ("fa3", "flashinfer", "triton")
_EXAMPLES = """examples:
  %(prog)s fit benchmarks/results/gpu_attention.json --out my-gpu.json
      fit a profile to the results of `python -m benchmarks.kernel.gpu_attention`; set PREFIXPACK_ROUTE_PROFILE to it
  %(prog)s compare benchmarks/results/gpu_attention.json packed shipped@0 shipped@20 --stock fa3
      time of each policy over the measured steps, against an oracle and the stock backend
  %(prog)s explain --tree 1,10/4096,416 --heads 32/8 --stock flashinfer
      predicted times of a batch by term, and its route
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Routing of decode steps between packed and stock kernels by predicted cost: fit the cost models, compare "
        "policies over measured steps, and explain the route of a batch."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    fit = commands.add_parser("fit", help="fit a profile to measured steps")
    fit.add_argument("results", metavar="RESULTS.json", help="written by python -m benchmarks.kernel.gpu_attention")
    fit.add_argument("--out", required=True, type=Path, metavar="PROFILE.json", help="file to write")
    fit.set_defaults(act=_fit)

    compare = commands.add_parser("compare", help="compare policies over measured steps")
    compare.add_argument("results", metavar="RESULTS.json", help="written by python -m benchmarks.kernel.gpu_attention")
    compare.add_argument(
        "policies",
        nargs="+",
        metavar="POLICY",
        help="packed or stock for every step; conservative: the rule without a profile; batch>=N or reuse>=X: packed "
        "from N requests on, or if a KV token is read X times on average; PROFILE[@MARGIN]: a profile's file, or "
        "shipped, and the route_margin in percent (default: the profile's); left-out[@MARGIN]: every family of steps "
        "by a profile fitted on all others",
    )
    compare.add_argument("--families", action="store_true", help="a row for each family of cases as well")
    _add_kernels(compare)
    compare.set_defaults(act=_compare)

    explain = commands.add_parser("explain", help="predicted times and route of a batch")
    explain.add_argument("--tree", required=True, metavar="NODES/TOKENS", help="as in `explain --tree`")
    explain.add_argument("--heads", default="32/8", metavar="Q/KV", help="query heads / KV heads (default 32/8)")
    explain.add_argument("--head-dim", type=int, default=128, metavar="N", help="default 128")
    explain.add_argument("--kv-dtype", default="bf16", choices=("bf16", "fp16", "fp8"), help="default bf16")
    explain.add_argument("--profile", metavar="FILE", help="default: the package's, of an NVIDIA H200")
    explain.add_argument("--margin", type=int, metavar="PERCENT", help="default: the profile's own")
    _add_kernels(explain)
    explain.set_defaults(act=_explain, partial_dtype=None)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--packed", default="native", metavar="KERNELS", help="native (default) or triton")
    parser.add_argument("--stock", default="fa3", choices=BACKENDS, help="the stock backend (default fa3)")


def run(args: argparse.Namespace) -> int:
    try:
        args.act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _fit(args: argparse.Namespace) -> None:
    profile = fit_profile(read_results(args.results))
    try:
        profile.save(args.out)
    except OSError as error:
        raise ValueError(f"{args.out}: cannot write the profile: {error.strerror}") from error
    kv = f"{8 * profile.kv_bytes}-bit KV"
    print(f"{args.out}: {profile.machine}, {kv}, commit {profile.commit}, measured {profile.measured}")
    print("error: root mean square of log(predicted / measured), of the fit and of each family left out of it")
    for kind, fits in (("packed", profile.packed), ("stock", profile.stock)):
        for kernel, fitted in fits.items():
            print(_fit_line(f"{kind} {kernel}", fitted))
    print("margins: percent by which packed must be predicted to be faster, from families left out of the fit")
    for packed, margins in profile.margins.items():
        print(f"  packed {packed:15} {'  '.join(f'{stock} {margin}' for stock, margin in margins.items())}")


def _fit_line(name: str, fitted: Fit) -> str:
    families = "  ".join(f"{family} {error:.2f}" for family, error in fitted.error_left_out.items())
    return f"  {name:22} {fitted.cases:4} cases  {fitted.error:.3f}   left out: {families}"


def _compare(args: argparse.Namespace) -> None:
    results = read_results(args.results)
    print(f"{results.machine}, commit {results.commit}: packed {args.packed} or stock {args.stock}, one layer, cold L2")
    header = ("policy", "steps", "packed", "wrong", "regret", "mean", "worst", "worst against stock")
    rows: list[tuple[str, ...]] = [header]
    for text in args.policies:
        steps = outcomes(results.cases, candidate(text, args.packed, args.stock, results), args.packed, args.stock)
        rows.append(_row(text, judge(steps)))
        if args.families:
            rows += [_row(f"  {family}", judge(of)) for family, of in _by_family(steps).items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
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


def _explain(args: argparse.Namespace) -> None:
    if args.margin is not None and not 0 <= args.margin <= 1000:
        raise InputError(f"--margin {args.margin}: expected a percentage from 0 to 1000, as route_margin")
    shape = model_shape(args)
    kernel = stock_kernel(args.stock, shape)
    if args.profile is not None:
        profile = load_profile(args.profile)
    else:
        profile = shipped_profile_of(args.packed, kernel, shape.kv_bytes)
    batch = parse_tree(args.tree)
    step = StepFeatures.of(ForestFacts.of(PrefixForest.from_paths(batch.paths)), batch.seq_lens)
    packed, stock = _cost(profile, "packed", args.packed), _cost(profile, "stock", kernel)
    margin = profile.margin(args.packed, kernel) if args.margin is None else args.margin
    decision = CostPolicy(packed, stock, shape, margin / 100).decide(step)
    kv = f"{8 * profile.kv_bytes}-bit KV"
    print(f"profile: {profile.machine}, {kv}, commit {profile.commit}, measured {profile.measured}")
    print(f"step:    {step}")
    packed_us = _print_parts(args.packed, packed, step, shape)
    stock_us = _print_parts(kernel, stock, step, shape)
    close = decision.route is Route.STOCK and packed_us < stock_us
    why = f" (packed is not faster by {margin} %; a batch that runs packed stays packed)" if close else ""
    print(f"route:   {decision.route.value}{why}")


def _cost(profile: Profile, kind: Kind, kernel: str) -> CostModel:
    cost = profile.cost(kind, kernel)
    if cost is None:
        known = profile.packed if kind == "packed" else profile.stock
        raise ValueError(f"the profile has no cost of {kind} kernel {kernel!r}; it has {', '.join(known)}")
    return cost


def _print_parts(kernel: str, cost: CostModel, step: StepFeatures, shape: ModelShape) -> float:
    """Prints the predicted time of a step and its parts; returns the time in microseconds of one layer."""
    total = cost.microseconds(step, shape)
    print(f"{cost.kind} ({kernel}): {total:.1f} us a layer")
    for name, microseconds in sorted(cost.parts(step, shape).items(), key=lambda part: -part[1]):
        if microseconds >= 0.05:
            print(f"  {microseconds:9.1f}  {name}: {TERMS[cost.kind][name][0]}")
    return total
