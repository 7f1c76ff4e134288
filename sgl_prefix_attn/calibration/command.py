"""`python -m sgl_prefix_attn calibrate`: measures, fits, freezes the profile, and judges it on unseen seeds."""

from __future__ import annotations

import argparse
import json
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_prefix_attn.calibration.bench import Bench, CpuBench, CudaBench, Shape
from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.judge import Outcome, kernels_without_cost, outcomes_by_pair
from sgl_prefix_attn.calibration.report import as_json, lines_of, rows_of
from sgl_prefix_attn.calibration.run import AGAIN, CHECK, FIT, StepsFile, drawn_cases, families_of, header_of, measure
from sgl_prefix_attn.core.files import read_text
from sgl_prefix_attn.core.limits import why_not_native
from sgl_prefix_attn.routing.measured import HEAD_DIMS, MeasuredCase, read_results
from sgl_prefix_attn.routing.profile import Profile
from sgl_prefix_attn.routing.profile_store import NOT_PROFILES, user_folder

LEAST_CHECK_SEEDS = 5
FIT_SEEDS = 3
# Endings of files beside a profile, and of reports: a profile with one would replace the other file.
_NO_PROFILES = (*NOT_PROFILES, ".png")


@dataclass(frozen=True)
class Counts:
    """How many batches are drawn: of each of FIT_SEEDS seeds for the fit, of each seed for the check."""

    fit: int
    check: int


CUDA_COUNTS, CPU_COUNTS = Counts(150, 54), Counts(27, 9)


def shape_of(args: argparse.Namespace, cuda: bool, kv_dtype: str = "bf16") -> Shape:
    """The attention shape of the arguments. kv_dtype: on a GPU.

    Raises:
        ValueError: an unusable argument or model.
    """
    heads, head_dim = args.heads, args.head_dim
    if args.model is not None:
        if heads is not None or head_dim is not None:
            raise ValueError("--model has the heads: leave out --heads and --head-dim")
        q_heads, kv_heads, head_dim = _heads_of_model(Path(args.model))
    else:
        match = re.fullmatch(r"(\d{1,4})/([1-9]\d{0,3})", heads or ("32/8" if cuda else "8/2"))
        if match is None:
            raise ValueError(f"--heads {heads}: expected query heads / KV heads, for example 32/8")
        q_heads, kv_heads = int(match[1]), int(match[2])
        head_dim = (128 if cuda else 64) if head_dim is None else head_dim
    if args.tp < 1 or q_heads % args.tp:
        raise ValueError(f"--tp {args.tp}: {q_heads} query heads cannot be divided by it")
    q_heads, kv_heads = q_heads // args.tp, max(1, kv_heads // args.tp)
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"{q_heads}/{kv_heads} heads: the query heads have to be a multiple of the KV heads")
    if not 1 <= args.page_size <= 1024:
        raise ValueError(f"--page-size {args.page_size}: expected 1 to 1024")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: a profile can be measured with 64, 128 or 256")
    if not cuda:
        return Shape((q_heads, kv_heads), head_dim, "fp32", "fp32", args.page_size)
    return Shape((q_heads, kv_heads), head_dim, kv_dtype, "bf16", args.page_size)


def _heads_of_model(folder: Path) -> tuple[int, int, int]:
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(read_text(path))
        config = config.get("text_config", config)
        q_heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or q_heads)
        return q_heads, kv_heads, int(config.get("head_dim") or config["hidden_size"] // q_heads)
    except OSError as error:
        raise ValueError(f"--model {folder}: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--model {folder}: {path} does not tell the attention heads: {error!r}") from error


def make_bench(args: argparse.Namespace, shape: Shape, cuda: bool) -> Bench:
    """The bench for the device.

    Raises:
        ValueError: the kernels cannot run here.
    """
    if not cuda:
        return CpuBench(shape, threads=torch.get_num_threads())
    stocks = list(args.stock)
    compiled = shape.kv_dtype == "bf16" and shape.head_dim == 128
    if "flashinfer" in stocks and not compiled and not args.jit:
        print("flashinfer is left out: it compiles kernels of this shape at first use, for minutes; --jit allows it")
        stocks.remove("flashinfer")
    free, _ = torch.cuda.mem_get_info()
    return CudaBench(shape, stocks, min(8e9, 0.3 * free), packed_kernels(args.kernels))


def packed_kernels(wanted: str) -> str:
    """The packed kernels to measure on the current GPU. auto: those that servers take there.

    Raises:
        ValueError: the native kernels are wanted and cannot run.
    """
    if wanted == "triton":
        return wanted
    problem = why_not_native(torch.device("cuda", torch.cuda.current_device()), asked=wanted == "native")
    if problem is None:
        return "native"
    if wanted == "native":
        raise ValueError(f"--kernels native: {problem}")
    print(f"the Triton kernels are measured: {problem}, and --kernels native measures them")
    return "triton"


def run(args: argparse.Namespace) -> None:
    """Runs the command.

    Raises:
        ValueError: unusable arguments, or too few measured batches.
        DeviceLostError: see `run.measure`.
    """
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device")
    if args.check_seeds < LEAST_CHECK_SEEDS:
        raise ValueError(f"--check-seeds {args.check_seeds}: at least {LEAST_CHECK_SEEDS} are needed")
    if not 0 < args.minutes <= 600:
        raise ValueError(f"--minutes {args.minutes}: expected more than 0, up to 600")
    if args.out is not None:
        check_out(args.out)
    families = families_of(args.families)
    kv_dtypes = list(dict.fromkeys(args.kv_dtype)) if cuda else ["fp32"]
    if args.out is not None and len(kv_dtypes) > 1:
        raise ValueError("--out is one profile: give one --kv-dtype with it")
    for kv_dtype in kv_dtypes:
        shape = shape_of(args, cuda, kv_dtype)
        bench = make_bench(args, shape, cuda)
        calibrate(bench, shape, args, families, CUDA_COUNTS if cuda else CPU_COUNTS)
        del bench  # its KV, before the next one's


def check_out(out: Path) -> None:
    """Checks --out before anything is measured.

    Raises:
        ValueError: it is no name for a profile, or a folder.
    """
    if not out.name or out.is_dir():
        raise ValueError(f"--out {out}: expected a file, this is a folder")
    if out.name.endswith(_NO_PROFILES):
        raise ValueError(f"--out {out}: a profile is JSON: expected a name as PROFILE.json")


def beside(out: Path, ending: str) -> Path:
    """A file beside the profile. Only a final .json is left out: a name as llama-3.1 keeps its dot."""
    return out.with_name(out.name.removesuffix(".json") + ending)


def calibrate(
    bench: Bench, shape: Shape, args: argparse.Namespace, families: tuple[str, ...], counts: Counts
) -> Profile:
    """Measures the fit seeds, saves the profile, then measures the check seeds and judges the saved profile."""
    header = header_of(bench, shape, arguments_of(args, shape, families, bench.packed_name))
    out = args.out or user_folder() / f"{slug(header)}.json"
    steps_path, report_path = (beside(out, end) for end in (".steps.json", ".report.json"))
    if args.fresh:
        steps_path.unlink(missing_ok=True)
    # Drawn when the run begins and kept with its steps: nothing can have been tuned to them.
    header["check_seeds"] = [secrets.randbits(31) for _ in range(args.check_seeds)]
    steps = StepsFile(steps_path, header)

    retry = args.retry_failed
    fit_plan = _in_turn(
        [list(drawn_cases(args.seed + n, shape, bench, counts.fit, families)) for n in range(FIT_SEEDS)]
    )
    if not measure(bench, shape, steps, [(FIT, case) for case in fit_plan], 0.6 * 60 * args.minutes, "fit", retry):
        print(f"not all {len(fit_plan)} batches were measured in the time: the command with more --minutes goes on")
    print_failures(steps.rows)
    part = beside(out, ".part.steps.json")
    profile = fit_profile(read_results(steps.select(FIT, part)))
    profile.save(out)

    seeds = steps.header["check_seeds"]
    check_plan = _in_turn([list(drawn_cases(seed, shape, bench, counts.check, families)) for seed in seeds])
    measure(bench, shape, steps, [(CHECK, case) for case in check_plan], 0.35 * 60 * args.minutes, "check", retry)
    checked = read_results(steps.select(CHECK, part)).cases
    print_without_cost(profile, checked)
    pairs = outcomes_by_pair(profile, checked)
    behind = {step.case.key for steps_ in pairs.values() for step in steps_ if is_behind(step)}
    again = [(AGAIN, case) for case in check_plan if case.key in behind]
    measure(bench, shape, steps, again, 60.0, "again", retry)
    second = outcomes_by_pair(profile, read_results(steps.select(AGAIN, part)).cases)
    part.unlink()
    if not pairs:
        raise ValueError(f"{steps_path}: no batch of the check seeds has both times; give it more --minutes")

    report: dict[str, Any] = {**steps.header, "profile": str(out), "pairs": {}}
    for title, found in pairs.items():
        rows = rows_of(found)
        print(f"\n{title}: {len(seeds)} unseen seeds")
        print("\n".join(lines_of(rows)))
        still = [step for step in second.get(title, []) if is_behind(step)]
        print(f"behind stock by more than 3 % and 1 us: {rows[0].behind}; when timed again: {len(still)}")
        report["pairs"][title] = {"rows": as_json(rows), "behind_again": [step.case.key for step in still]}
    report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nprofile {out}\nreport  {report_path}")
    if bench.packed_name == args.kernels:
        print(f"for servers that run the {args.kernels} kernels (PREFIXPACK_GPU_KERNELS={args.kernels})")
    if not out.is_relative_to(user_folder()):
        print(f"servers take it with PREFIXPACK_ROUTE_PROFILE={out}")
    return profile


def print_failures(rows: list[dict[str, Any]]) -> None:
    """Tells which kernels failed on how many batches, and the most frequent reason."""
    reasons: dict[str, Counter[str]] = {}
    for row in rows:
        for kernel, found in row["baselines"].items():
            if "failed" in found:
                reasons.setdefault(kernel, Counter())[found["failed"]] += 1
    for kernel, counts in reasons.items():
        reason = counts.most_common(1)[0][0]
        print(f"{kernel} has no time of {counts.total()} of {len(rows)} batches, mostly: {reason}")
    if reasons:
        print("--retry-failed measures these batches again")


def print_without_cost(profile: Profile, cases: list[MeasuredCase], where: str = "") -> None:
    """Tells which measured kernels are not judged."""
    if kernels := kernels_without_cost(profile, cases):
        print(f"{where}not judged, the profile has no cost of it: {', '.join(kernels)}")


def is_behind(step: Outcome) -> bool:
    """Whether a step is behind the stock backend by more than 3 % and 1 us."""
    return step.us - step.stock_us > max(0.03 * step.stock_us, 1.0)


def arguments_of(args: argparse.Namespace, shape: Shape, families: tuple[str, ...], packed_name: str) -> dict[str, Any]:
    """What has to be the same for a run to go on."""
    return {
        "heads": list(shape.heads),
        "head_dim": shape.head_dim,
        "kv_dtype": shape.kv_dtype,
        "page_size": shape.page_size,
        "seed": args.seed,
        "check_seeds": args.check_seeds,
        "families": list(families),
        "stock": list(args.stock),
        "packed": packed_name,
    }


def slug(header: dict[str, Any]) -> str:
    """A file name for a machine, shape and kernels."""
    page = [f"page{header['page_size']}"] if header["page_size"] > 1 else []
    kernels = ["triton"] if header["arguments"]["packed"] == "triton" else []
    text = "-".join([header["machine"]["gpu"], *header["head_shapes"], header["kv_dtype"], *page, *kernels])
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _in_turn(lists: list[list[Any]]) -> list[Any]:
    """The first of each list, then the second of each, and so on: a run that is stopped has some of every seed."""
    longest = max(map(len, lists), default=0)
    return [items[index] for index in range(longest) for items in lists if index < len(items)]
