"""What a step runs and what a process holds, by counting instead of by a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

Step = Callable[[], Any]


def calls(step: Step) -> list[str]:
    """The functions that a step calls, in order: those in Python and those in C."""
    seen: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            seen.append(f"{argument.__module__}.{argument.__qualname__}")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return seen


def instructions(step: Step) -> list[tuple[CodeType, int]]:
    """The bytecode that a step runs, in order: code objects, and the places in them."""
    seen: list[tuple[CodeType, int]] = []

    def note(frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            seen.append((frame.f_code, frame.f_lasti))
        frame.f_trace_opcodes = True
        return note

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it when the next line runs
    sys.settrace(note)
    try:
        step()
    finally:
        sys.settrace(None)
    return seen


def attributes() -> dict[tuple[str, str], Any]:
    """Functions, classes and descriptors of SGLang's modules and classes, by owner and name."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"}
    classes = {
        f"{value.__module__}.{value.__qualname__}": value
        for module in modules.values()
        for value in list(vars(module).values())
        if isinstance(value, type) and value.__module__ in modules
    }
    return {
        (owner, name): value
        for owner, holder in {**modules, **classes}.items()
        for name, value in list(vars(holder).items())
        if callable(value) or hasattr(type(value), "__get__")
    }


def changed(before: dict[tuple[str, str], Any]) -> list[str]:
    """Which of these attributes are others by now."""
    now = attributes()
    return sorted(".".join(key) for key, value in before.items() if now.get(key) is not value)


def memory_bytes() -> dict[str, int]:
    """Memory in use, see `refused`, after what nobody uses was given back. On a CPU: the storages of all tensors."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        numbers = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
        return dict(zip(("allocated", "reserved", "device"), numbers, strict=True))
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {"allocated": sum(storages.values())}


def more_bytes(before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in memory_bytes().items()}


def held_bytes() -> dict[str, int]:
    """What this process holds, and the most that it held, with nothing given back to the device before."""
    import torch

    if not torch.cuda.is_available():
        return memory_bytes()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    known = torch.cuda.memory_stats()
    kinds = ("requested_bytes", "allocated_bytes", "reserved_bytes", "segment", "inactive_split_bytes")
    found = {f"{kind}.{when}": known[f"{kind}.all.{when}"] for kind in kinds for when in ("current", "peak")}
    return {**found, "device": total - free}
