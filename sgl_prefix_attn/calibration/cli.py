"""Arguments of `python -m sgl_prefix_attn calibrate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.judge import Candidate, Outcome, outcomes, profile_choice
from sgl_prefix_attn.calibration.report import lines_of, rows_of
from sgl_prefix_attn.calibration.sources import Source, gather, simulated_times
from sgl_prefix_attn.routing.measured import BACKENDS, MeasuredCase, read_results
from sgl_prefix_attn.routing.profile import Fit, Profile

_EXAMPLES = """examples:
  %(prog)s --from results.json --out my-gpu.json
      fit a profile to results of `python -m benchmarks.kernel.gpu_attention` or gpu_drawn
  %(prog)s --from old.json:fa3,flashinfer_tc new.json:native --out my-gpu.json --check unseen.json
      take the kernels' times from different files; report on a file that was not fitted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fits a routing profile: the costs of packed and stock kernels, and the margins between them. Set "
        "PREFIXPACK_ROUTE_PROFILE to the file that it writes."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", required=True, type=Path, metavar="PROFILE.json", help="file to write")
    files = parser.add_argument_group("from results files")
    files.add_argument(
        "--from", dest="sources", nargs="+", required=True, metavar="FILE[:KERNELS]",
        help="results of the kernel benchmarks; KERNELS: only the times of these, e.g. native,fa3,flashinfer_tc",
    )  # fmt: skip
    files.add_argument("--kv-bits", type=int, choices=(16, 8), default=16, help="KV type of the steps (default 16)")
    files.add_argument("--check", nargs="+", default=[], metavar="FILE", help="report on the steps of these files too")


def run(args: argparse.Namespace) -> int:
    try:
        _from_files(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _from_files(args: argparse.Namespace) -> None:
    kv_bytes = args.kv_bits // 8
    results = gather([Source.parse(text) for text in args.sources], kv_bytes)
    simulated = simulated_times(results)
    profile = fit_profile(results, simulated={"native": simulated} if simulated else None)
    try:
        profile.save(args.out)
    except OSError as error:
        raise ValueError(f"{args.out}: cannot write the profile: {error.strerror}") from error
    print_profile(profile, args.out)
    for path in args.check:
        cases = [case for case in read_results(path).cases if case.shape.kv_bytes == kv_bytes]
        for title, steps in outcomes_by_pair(profile, cases).items():
            print(f"\n{path}: {title}")
            print("\n".join(lines_of(rows_of(steps))))


def print_profile(profile: Profile, path: Path) -> None:
    """Prints the errors and margins of a profile."""
    kv = f"{8 * profile.kv_bytes}-bit KV"
    print(f"{path}: {profile.machine}, {kv}, commit {profile.commit}, measured {profile.measured}")
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


def outcomes_by_pair(profile: Profile, cases: list[MeasuredCase]) -> dict[str, list[Outcome]]:
    """The steps as the profile would run them, by pair of measured packed and stock kernel."""
    found: dict[str, list[Outcome]] = {}
    for packed in profile.packed:
        for backend in BACKENDS:
            usable = [case for case in cases if packed in case.packed and case.stock_us(backend) is not None]
            if usable:
                chosen = Candidate(backend, profile_choice(profile, packed, backend, None))
                found[f"packed {packed} or stock {backend}"] = outcomes(usable, chosen, packed, backend)
    return found
