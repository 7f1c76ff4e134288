"""Arguments of `python -m sgl_prefix_attn route`."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.explain.batch import InputError, parse_tree
from sgl_prefix_attn.explain.devices import model_shape
from sgl_prefix_attn.explain.prediction import why_no_kernel
from sgl_prefix_attn.routing import conservative
from sgl_prefix_attn.routing.cost import TERMS, CostModel, KernelKind
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.measured import BACKENDS, stock_kernel
from sgl_prefix_attn.routing.policy import Route, cost_policy
from sgl_prefix_attn.routing.profile import Profile, load_profile, shipped_profile_of
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts, facts_as_text, refusal, user_folder

_EXAMPLES = """examples:
  %(prog)s explain --tree 1,10/4096,416 --heads 32/8 --stock flashinfer
      predicted times of a batch by term, and its route
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Routing of decode steps between packed and stock kernels by predicted cost: explain the route of a batch, "
        "and list the profiles."
    )
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    explain = commands.add_parser("explain", help="predicted times and route of a batch")
    explain.add_argument("--tree", required=True, metavar="NODES/TOKENS", help="as in `explain --tree`")
    _add_shape(explain)
    explain.add_argument("--profile", metavar="FILE", help="default: the package's, of an NVIDIA H200")
    explain.add_argument("--margin", type=int, metavar="PERCENT", help="default: the profile's own")
    _add_kernels(explain)
    explain.set_defaults(act=_explain)

    profiles = commands.add_parser("profiles", help="list the profiles, and the one that a server would take")
    _add_shape(profiles)
    profiles.add_argument("--gpu", metavar="NAME", help="CUDA's name of the GPU (default: this machine's, or cpu)")
    profiles.add_argument("--page-size", type=int, default=1, metavar="N", help="of the server (default 1)")
    _add_kernels(profiles, packed=None, choices=("native", "triton"))
    profiles.set_defaults(act=_profiles)


def _add_kernels(
    parser: argparse.ArgumentParser, packed: str | None = "native", choices: tuple[str, ...] | None = None
) -> None:
    parser.add_argument(
        "--packed",
        default=packed,
        choices=choices,  # of `explain` those of its profile
        metavar="KERNELS",
        help="native or triton (default native; `profiles`: as servers here)",
    )
    parser.add_argument("--stock", default="fa3", choices=BACKENDS, help="the stock backend (default fa3)")


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", default="32/8", metavar="Q/KV", help="query heads / KV heads (default 32/8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--kv-dtype", default="bf16", choices=("bf16", "fp16", "fp8"), help="default bf16")


def run(args: argparse.Namespace) -> int:
    try:
        args.act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _explain(args: argparse.Namespace) -> None:
    if args.margin is not None and not 0 <= args.margin <= 1000:
        raise InputError(f"--margin {args.margin}: expected a percentage from 0 to 1000, as route_margin")
    shape = model_shape(args)
    if (refused := why_no_kernel(args.packed, shape.head_dim)) is not None:
        raise InputError(refused)
    kernel = stock_kernel(args.stock, shape)
    if args.profile is not None:
        profile = load_profile(args.profile)
    else:
        profile = shipped_profile_of(args.packed, kernel, shape.kv_bytes)
    batch = parse_tree(args.tree)
    step = StepFeatures.of(ForestFacts.of(PrefixForest.from_paths(batch.paths)), batch.seq_lens)
    packed, stock = _cost(profile, "packed", args.packed), _cost(profile, "stock", kernel)
    policy = cost_policy(profile, args.packed, kernel, shape, margin=None if args.margin is None else args.margin / 100)
    assert policy is not None  # it has both costs
    decision = policy.decide(step)
    kv = f"{8 * profile.kv_bytes}-bit KV"
    print(f"profile: {profile.machine}, {kv}, commit {profile.commit}, measured {profile.measured}")
    print(f"step:    {step}")
    packed_us = _print_parts(args.packed, packed, step, shape)
    stock_us = _print_parts(kernel, stock, step, shape)
    close = decision.route is Route.STOCK and packed_us < stock_us
    margin = 100 * (policy.needed(step, packed_us, stock_us) - 1)
    why = f" (packed is not faster by {margin:.0f} %; a batch that runs packed stays packed)" if close else ""
    print(f"route:   {decision.route.value}{why}")


def _profiles(args: argparse.Namespace) -> None:
    shape = model_shape(args)
    gpu, capability = _this_gpu()
    packed = "cpu" if (args.gpu or gpu) == "cpu" else args.packed or _packed_of(args.gpu)
    stock = "torch_native" if packed == "cpu" else stock_kernel(args.stock, shape)
    dtype = "bf16"
    if packed == "cpu":  # as `calibrate` measures it
        dtype, shape = "fp32", dataclasses.replace(shape, kv_bytes=4)
    if args.gpu is not None:
        gpu, capability = args.gpu, ""
    if args.page_size < 1:
        raise InputError(f"--page-size {args.page_size}: expected 1 or more")
    facts = ServerFacts(gpu, capability, shape, dtype, packed, stock, args.page_size)
    store = ProfileStore.read()
    found = store.find(facts)
    print(f"server:  {facts_as_text(facts)}")
    print(f"folder:  {user_folder()}")
    for stored in store.profiles:
        taken = found is not None and stored is found.stored
        why = "taken" if taken else f"not taken: {refusal(stored.profile, facts) or 'another one fits better'}"
        heads = ", ".join(stored.profile.head_shapes) or "drawn"
        pages = "" if stored.profile.page_size == 1 else f", pages of {stored.profile.page_size}"
        kv = f"{8 * stored.profile.kv_bytes}-bit KV{pages}"
        print(f"{stored}: {stored.profile.machine}, heads {heads}, {kv}, {stored.profile.measured}: {why}")
    for message in store.unreadable:
        print(message)
    if found is None:
        rule = (
            "every step runs packed" if packed == "cpu" else f"a step runs packed only if {conservative.rule(packed)}"
        )
        print(f"no profile fits, so {rule}")
    elif found.borrowed:
        print(f"borrowed: it was measured with {found.borrowed}")


def _packed_of(name: str | None) -> str:
    """The kernels that servers take by default on this machine's GPU (None), or the native ones for a name."""
    import torch

    from sgl_prefix_attn.core.limits import why_not_native

    if name is not None:
        return "native"
    return "native" if why_not_native(torch.device("cuda", torch.cuda.current_device())) is None else "triton"


def _this_gpu() -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return "cpu", ""
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), f"{major}.{minor}"


def _cost(profile: Profile, kind: KernelKind, kernel: str) -> CostModel:
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
