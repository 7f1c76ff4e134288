"""Arguments of `python -m sgl_prefix_attn route`."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from sgl_prefix_attn.explain.batch import InputError
from sgl_prefix_attn.explain.devices import model_shape
from sgl_prefix_attn.routing import conservative
from sgl_prefix_attn.routing.measured import BACKENDS, stock_kernel
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts, facts_as_text, refusal, user_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "The profiles by which decode steps are routed between packed and stock kernels."
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    profiles = commands.add_parser("profiles", help="list the profiles, and the one that a server would take")
    profiles.add_argument("--heads", default="32/8", metavar="Q/KV", help="query heads / KV heads (default 32/8)")
    profiles.add_argument("--head-dim", type=int, default=128, metavar="N", help="default 128")
    profiles.add_argument("--kv-dtype", default="bf16", choices=("bf16", "fp16", "fp8"), help="default bf16")
    profiles.add_argument("--gpu", metavar="NAME", help="CUDA's name of the GPU (default: this machine's, or cpu)")
    profiles.add_argument("--page-size", type=int, default=1, metavar="N", help="of the server (default 1)")
    profiles.add_argument(
        "--packed", choices=("native", "triton"), metavar="KERNELS", help="native or triton (default: as servers here)"
    )
    profiles.add_argument("--stock", default="fa3", choices=BACKENDS, help="the stock backend (default fa3)")
    profiles.set_defaults(act=_profiles)


def run(args: argparse.Namespace) -> int:
    try:
        args.act(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


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
