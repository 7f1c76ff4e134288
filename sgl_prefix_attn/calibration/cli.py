"""Arguments of `python -m sgl_prefix_attn calibrate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sgl_prefix_attn.calibration import command
from sgl_prefix_attn.calibration.bench import DeviceLostError
from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.judge import outcomes_by_pair
from sgl_prefix_attn.calibration.report import lines_of, rows_of
from sgl_prefix_attn.calibration.sources import Source, gather
from sgl_prefix_attn.routing.measured import Results, read_results
from sgl_prefix_attn.routing.profile import Fit, Profile

_EXAMPLES = """examples:
  %(prog)s --model /models/Llama-3.1-8B-Instruct --tp 2
      measure this machine for a model, on the GPU where there is one; servers here take the profile from then on
  %(prog)s --heads 64/8 --kv-dtype bf16 fp8_e4m3 --page-size 16
      for a head shape, with both KV types and pages of 16 tokens
  %(prog)s --from results.json --out my-gpu.json
      fit a profile to results of `python -m benchmarks.kernel.gpu_attention` or gpu_drawn
  %(prog)s --from old.json:fa3,flashinfer_tc new.json:native --out my-gpu.json --check unseen.json
      take the kernels' times from different files; report on a file that was not fitted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures packed and stock kernels on drawn batches, fits a routing profile, then judges it on unseen seeds: "
        "regret against an oracle, losses against the stock backend. A run that was stopped goes on where it was."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="PROFILE.json", help="file to write (default: the user's profiles)")
    shape = parser.add_argument_group("shape")
    shape.add_argument("--model", metavar="DIR", help="take heads and head_dim from its config.json")
    shape.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks: of their share of heads")
    shape.add_argument("--heads", metavar="Q/KV", help="query heads / KV heads (default 32/8; on a CPU 8/2)")
    shape.add_argument("--head-dim", type=int, metavar="N", help="64, 128 or 256 (default 128; on a CPU 64)")
    shape.add_argument(
        "--kv-dtype", nargs="+", choices=("bf16", "fp8_e4m3"), default=["bf16"],
        help="on a GPU (default bf16); two: a profile for each, one after the other",
    )  # fmt: skip
    shape.add_argument("--page-size", type=int, default=1, metavar="N", help="of the server (default 1)")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU, else cpu")
    measuring.add_argument(
        "--stock", nargs="+", choices=("fa3", "flashinfer", "triton"), default=["fa3", "flashinfer", "triton"],
        help="stock kernels on a GPU (default: all that are installed)",
    )  # fmt: skip
    measuring.add_argument(
        "--kernels", choices=("auto", "native", "triton"), default="auto",
        help="packed kernels on a GPU, as the setting gpu_kernels of the servers (default auto)",
    )  # fmt: skip
    measuring.add_argument("--jit", action="store_true", help="let FlashInfer compile kernels of other shapes")
    measuring.add_argument("--seed", type=int, default=11, metavar="N", help="of the batches to fit (default 11)")
    measuring.add_argument(
        "--check-seeds", type=int, default=5, metavar="N", help="unseen seeds, 5 or more (default 5)"
    )
    measuring.add_argument("--families", nargs="+", metavar="FAMILY", help="of batches (default: all)")
    measuring.add_argument("--minutes", type=float, default=5.0, help="most time for measuring a profile (default 5)")
    measuring.add_argument("--fresh", action="store_true", help="drop the steps of a stopped run")
    measuring.add_argument(
        "--retry-failed", action="store_true", help="measure the batches again on which a kernel failed"
    )
    files = parser.add_argument_group("from results files")
    files.add_argument(
        "--from", dest="sources", nargs="+", metavar="FILE[:KERNELS]",
        help="results of the kernel benchmarks; KERNELS: only the times of these, e.g. native,fa3,flashinfer_tc",
    )  # fmt: skip
    files.add_argument("--kv-bits", type=int, choices=(16, 8), default=16, help="KV type of the steps (default 16)")
    files.add_argument("--check", nargs="+", default=[], metavar="FILE", help="report on the steps of these files too")


def run(args: argparse.Namespace, simulated_times: Callable[[Results], Mapping[str, float]] | None = None) -> int:
    """Runs the command.

    Args:
        simulated_times: with `--from`, microseconds of the native kernels by key of steps without a packed time.
    """
    try:
        if args.sources is None:
            command.run(args)
        else:
            _from_files(args, simulated_times)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except DeviceLostError as error:
        print(f"{error}\nthe device was lost; start the command again to go on with the next batch", file=sys.stderr)
        return 1
    return 0


def _from_files(
    args: argparse.Namespace, simulated_times: Callable[[Results], Mapping[str, float]] | None = None
) -> None:
    if args.out is None:
        raise ValueError("--from needs --out")
    command.check_out(args.out)
    kv_bytes = args.kv_bits // 8
    sources = [Source.parse(text) for text in args.sources]
    results = gather(sources, kv_bytes)
    for path in dict.fromkeys(source.path for source in sources):
        if path.name not in results.source.split(", "):
            print(f"{path}: not used, it has no decode steps with {args.kv_bits}-bit KV", file=sys.stderr)
    simulated = simulated_times(results) if simulated_times else None
    profile = fit_profile(results, simulated={"native": simulated} if simulated else None)
    try:
        profile.save(args.out)
    except OSError as error:
        raise ValueError(f"{args.out}: cannot write the profile: {error.strerror}") from error
    print_profile(profile, args.out)
    for path in args.check:
        cases = [case for case in read_results(path).cases if case.shape.kv_bytes == kv_bytes]
        command.print_without_cost(profile, cases, f"{path}: ")
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
