"""Builds a profile from the measured steps of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from sgl_prefix_attn.calibration.fit import METHOD, fits_of
from sgl_prefix_attn.calibration.margins import margins_of
from sgl_prefix_attn.routing.measured import MeasuredCase, Results
from sgl_prefix_attn.routing.profile import VERSION, MeasuredStep, Profile

SIMULATED = "; margins: packed times that were not measured are simulated"


def fit_profile(
    results: Results,
    margins: Mapping[str, Mapping[str, int]] | None = None,
    simulated: Mapping[str, Mapping[str, float]] | None = None,
) -> Profile:
    """A profile of all kernels that were measured on enough cases.

    Args:
        margins: replaces the margins that `margins_of` finds.
        simulated: for `margins_of`.

    Raises:
        ValueError: no packed kernel, or no stock kernel, was measured on as many cases as its cost has terms.
    """
    decode = [case for case in results.cases if case.step.rows == 1]
    packed = fits_of("packed", decode, results.sm_count)
    stock = fits_of("stock", decode, results.sm_count)
    for kind, fits in (("packed", packed), ("stock", stock)):
        if not fits:
            raise ValueError(f"{results.source} has too few measured cases to fit any {kind} kernel")
    found = margins_of(decode, simulated, results.sm_count) if margins is None else margins
    return Profile(
        version=VERSION,
        machine=results.machine,
        commit=results.commit,
        measured=results.measured,
        source=results.source,
        method=METHOD if simulated is None else METHOD + SIMULATED,
        kv_bytes=results.kv_bytes,
        capability=results.capability,
        head_shapes=list(results.head_shapes),
        head_dims=_head_dims(decode),
        dtype=results.dtype,
        kernels_version=results.kernels_version,
        page_size=results.page_size,
        sm_count=results.sm_count,
        packed=packed,
        stock=stock,
        margins={kernel: dict(by_stock) for kernel, by_stock in found.items()},
        steps=[measured_step(case) for case in decode] if len(results.head_shapes) == 1 else [],
    )


def _head_dims(cases: Sequence[MeasuredCase]) -> list[int]:
    """Those that packed and stock kernels were measured with."""
    return sorted(
        {case.shape.head_dim for case in cases if case.packed} & {case.shape.head_dim for case in cases if case.stock}
    )


def measured_step(case: MeasuredCase) -> MeasuredStep:
    """A step as profiles keep it."""
    *values, _ = astuple(case.step)  # without rows
    return MeasuredStep(step=tuple(values), packed=dict(case.packed), stock=dict(case.stock))
