"""Measured steps gathered from several results files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.measured import MeasuredCase, Results, ResultsError, read_results

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A results file, and the kernels whose times count; none: all of them."""

    path: Path
    kernels: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Source:
        """A source from `FILE` or `FILE:KERNEL,KERNEL`.

        Raises:
            ValueError: there is no file name.
        """
        path, _, kernels = text.partition(":")
        if not path:
            raise ValueError(f"{text!r}: expected FILE or FILE:KERNEL,KERNEL")
        return cls(Path(path), frozenset(name.strip() for name in kernels.split(",") if name.strip()))

    def read(self, kv_bytes: int) -> Results:
        """The file's decode steps with KV elements of this size, with the times of these kernels.

        Raises:
            ResultsError: not a results file, or it lacks a kernel.
        """
        results = read_results(self.path)
        cases = [case for case in results.cases if case.shape.kv_bytes == kv_bytes]
        known = {kernel for case in cases for kernel in (*case.packed, *case.stock)}
        missing = sorted(self.kernels - known)
        if missing:
            raise ResultsError(
                f"{self.path}: no times of {missing[0]} with {8 * kv_bytes}-bit KV; it has {', '.join(sorted(known))}"
            )
        wanted = self.kernels or known
        return replace(results, kv_bytes=kv_bytes, cases=[_only(case, wanted) for case in cases if case.step.rows == 1])


def _only(case: MeasuredCase, kernels: frozenset[str] | set[str]) -> MeasuredCase:
    return replace(
        case,
        packed={kernel: us for kernel, us in case.packed.items() if kernel in kernels},
        stock={kernel: us for kernel, us in case.stock.items() if kernel in kernels},
    )


def gather(sources: Sequence[Source], kv_bytes: int) -> Results:
    """The decode steps of all sources; a step in several has the times of each, of a kernel those of the last source.

    `calibrate` cuts batches to the GPU's memory, so a key may stand for several batches: a step has the same features,
    too. The key of each further batch gets a number.

    Files without any, as those of verify steps, which a rule decides, have no influence.

    Raises:
        ResultsError: an unusable file, no steps, or files of different GPUs.
    """
    found: dict[tuple[str, StepFeatures], MeasuredCase] = {}
    batches: Counter[str] = Counter()
    parts = [part for part in (source.read(kv_bytes) for source in sources) if part.cases]
    for part in parts:
        if part.machine != parts[0].machine:
            raise ResultsError(f"{part.source} is of {part.machine}, {parts[0].source} of {parts[0].machine}")
        for case in part.cases:
            before = found.get((case.key, case.step))
            if before is None:
                batches[case.key] += 1
                number = batches[case.key]
                found[case.key, case.step] = case if number == 1 else replace(case, key=f"{case.key}#{number}")
                continue
            packed, stock = {**before.packed, **case.packed}, {**before.stock, **case.stock}
            found[case.key, case.step] = replace(before, packed=packed, stock=stock)
    # Kernels of versions differ in the native ones; Triton's follow the plans.
    of_native = [part for part in parts if any("native" in case.packed for case in part.cases)]
    if not found:
        raise ResultsError(f"no decode step with {8 * kv_bytes}-bit KV in {', '.join(str(s.path) for s in sources)}")
    return Results(
        source=", ".join(part.source for part in parts),
        machine=parts[0].machine,
        commit=", ".join(dict.fromkeys(part.commit for part in parts)),
        measured=max(part.measured for part in parts),
        kv_bytes=kv_bytes,
        cases=list(found.values()),
        capability=_common((part.capability for part in parts), ""),
        head_shapes=_common((part.head_shapes for part in parts), ()),
        dtype=_common((part.dtype for part in parts), ""),
        page_size=_common((part.page_size for part in parts), 1),
        sm_count=parts[0].sm_count,
        kernels_version=min(part.kernels_version for part in of_native or parts),
    )


def _common(values: Iterable[T], unknown: T) -> T:
    """The value that all have; `unknown` if they differ."""
    first, *others = set(values)
    return unknown if others else first
