"""Model shape and device of an explanation. Options of the command line override what a server reports."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.explain.batch import InputError, first_problem

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_DEFAULT_SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)
# A100 (80 GB, SXM) and H100 (SXM): bandwidth by the data sheet; the rest as on an H200, without WGMMA on the A100.
_GPUS: dict[str, Callable[[ModelShape], DeviceModel]] = {
    "a100": lambda shape: _gpu(shape, 108, bandwidth=2.04e12, warpgroup_products=False),
    "h100": lambda shape: _gpu(shape, 132, bandwidth=3.35e12),
    "h200": lambda shape: _gpu(shape, 132),
}
DEVICE_NAMES = ("cpu", *_GPUS)


def _gpu(shape: ModelShape, multiprocessors: int, *, warpgroup_products: bool = True, **figures: Any) -> DeviceModel:
    """The device with the row tiles that the kernels have for this shape."""
    return DeviceModel.gpu(
        multiprocessors,
        head_dim=shape.head_dim,
        group=shape.group,
        kv_bytes=shape.kv_bytes,
        warpgroup_products=warpgroup_products,
        **figures,
    )


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
    if args.partial_dtype is not None:
        changes["partial_bytes"] = _BYTES[args.partial_dtype]
    shape = dataclasses.replace(shape, **changes)
    if shape.kv_heads < 1:
        raise InputError(f"{shape.q_heads}/{shape.kv_heads} heads: expected at least one KV head")
    if shape.head_dim < 1:
        raise InputError(f"--head-dim {shape.head_dim}: expected 1 or more")
    return shape


def device_model(args: argparse.Namespace, shape: ModelShape, reported: dict[str, Any] | None = None) -> DeviceModel:
    """Device to plan models of this shape for. reported: a server's DeviceModel fields.

    Raises:
        InputError: an unusable option.
    """
    if args.workers is not None and args.workers < 1:
        raise InputError(f"--workers {args.workers}: expected at least 1")
    if args.device is None and reported is not None:
        device = _reported(DeviceModel, "device", reported)
    elif args.device in (None, "cpu"):
        return DeviceModel.cpu(args.workers)
    else:
        device = _GPUS[args.device](shape)
    return device if args.workers is None else dataclasses.replace(device, workers=args.workers)


def _reported(kind: type, name: str, fields: dict[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        raise InputError(f"the server's {name}: {first_problem(error)}") from error
