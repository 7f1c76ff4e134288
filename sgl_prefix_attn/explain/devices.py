"""Model shape and device of an explanation. Options of the command line override what a server reports."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sgl_prefix_attn.core.gpu import Gpu, planner_model
from sgl_prefix_attn.core.limits import TESTED_CODE
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.batch import InputError, first_problem
from sgl_prefix_attn.explain.route import Machine
from sgl_prefix_attn.gpus import known_gpus
from sgl_prefix_attn.routing.rule import KernelPair

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_DEFAULT_SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
_GPUS = {name: known for name, known in known_gpus().items() if known.clock}
DEVICE_NAMES = ("cpu", *_GPUS)
MAX_SIZE = 65_536  # of heads and head_dim; the planner's numbers have 32 bits
STOCK_BACKENDS = ("fa3", "flashinfer", "triton")


def model_shape(args: argparse.Namespace, reported: dict[str, Any] | None = None) -> ModelShape:
    """Shape of the model. reported: a server's ModelShape fields. Raises InputError for an unusable option."""
    shape = _DEFAULT_SHAPE if reported is None else _reported(ModelShape, "shape", reported)
    changes: dict[str, int] = {}
    if args.heads is not None:
        q_heads, slash, kv_heads = args.heads.partition("/")
        if not slash or not q_heads.isdecimal() or not kv_heads.isdecimal():
            raise InputError(f"--heads {args.heads}: expected query heads / KV heads, for example 32/8")
        changes |= {"q_heads": int(q_heads), "kv_heads": int(kv_heads)}
    if args.head_dim is not None:
        changes["head_dim"] = args.head_dim
    if args.kv_dtype is not None:
        changes["kv_bytes"] = _BYTES[args.kv_dtype]
    shape = dataclasses.replace(shape, **changes)
    if shape.kv_heads < 1:
        raise InputError(f"{shape.q_heads}/{shape.kv_heads} heads: expected at least one KV head")
    if shape.q_heads < 1 or shape.q_heads % shape.kv_heads:
        raise InputError(
            f"{shape.q_heads}/{shape.kv_heads} heads: the query heads have to be a multiple of the KV heads"
        )
    if shape.q_heads > MAX_SIZE:
        raise InputError(f"{shape.q_heads}/{shape.kv_heads} heads: expected at most {MAX_SIZE} query heads")
    if not 1 <= shape.head_dim <= MAX_SIZE:
        raise InputError(f"--head-dim {shape.head_dim}: expected 1 to {MAX_SIZE}")
    return shape


def machine(args: argparse.Namespace, shape: ModelShape, stock_backend: str = STOCK_BACKENDS[0]) -> Machine:
    """What `--device` and `--stock` stand for.

    Args:
        stock_backend: of a GPU, without `--stock`.

    Raises:
        InputError: an unusable option.
    """
    if args.device in (None, "cpu"):
        return Machine(DeviceModel.cpu(), KernelPair("cpu", "", "cpu", args.stock or "torch_native"))
    gpu = Gpu.of_file(_GPUS[args.device])
    code = 10 * gpu.capability[0] + gpu.capability[1]
    packed = "native" if code in TESTED_CODE else "triton"
    kernels = KernelPair(gpu.name, ".".join(map(str, gpu.capability)), packed, args.stock or stock_backend)
    return Machine(planner_model(gpu, shape, code if packed == "native" else None), kernels, gpu.memory)


def machine_of_server(
    args: argparse.Namespace,
    shape: ModelShape,
    reported: dict[str, Any] | None,
    kernels: dict[str, str] | None,
    stock_backend: str,
) -> Machine:
    """A server's machine; options replace what it reports.

    Args:
        shape: of the model, options included.
        reported: fields of DeviceModel; None: not told.
        kernels: fields of KernelPair; None: not told.
        stock_backend: the server's.

    Raises:
        InputError: an unusable option or answer.
    """
    if args.device is not None or reported is None:
        known = stock_backend in STOCK_BACKENDS
        return machine(args, shape, stock_backend if known else STOCK_BACKENDS[0])
    model = _reported(DeviceModel, "device", reported)
    if kernels is None:
        return Machine(model, "the server does not name its kernels")
    told = _reported(KernelPair, "route.kernels", kernels)
    if args.stock is not None:
        told = dataclasses.replace(told, stock=args.stock)
    return Machine(model, told, next((gpu.bandwidth for gpu in _GPUS.values() if gpu.name == told.gpu), 0.0))


def _reported(kind: type, name: str, fields: dict[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise InputError(f"the server's {name}: {first_problem(error)}") from error
