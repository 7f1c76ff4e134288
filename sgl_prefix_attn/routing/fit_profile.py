"""A profile of a machine from what was measured on it."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_prefix_attn.routing.fit import METHOD, fits_of
from sgl_prefix_attn.routing.margins import margins_of
from sgl_prefix_attn.routing.measured import Results
from sgl_prefix_attn.routing.profile import VERSION, Profile


def fit_profile(results: Results, margins: Mapping[str, Mapping[str, int]] | None = None) -> Profile:
    """A profile of everything that was measured on enough cases.

    Args:
        margins: instead of those that the results suggest, see `margins_of`.

    Raises:
        ValueError: no kernel of ours, or no stock backend, was measured on as many cases as its cost has terms.
    """
    packed = fits_of("packed", results.cases)
    stock = fits_of("stock", results.cases)
    for kind, fits in (("packed", packed), ("stock", stock)):
        if not fits:
            raise ValueError(f"{results.source} has too few measured cases to fit any {kind} kernel")
    found = margins_of(results.cases) if margins is None else margins
    return Profile(
        version=VERSION,
        machine=results.machine,
        commit=results.commit,
        measured=results.measured,
        source=results.source,
        method=METHOD,
        kv_bytes=results.kv_bytes,
        packed=packed,
        stock=stock,
        margins={kernel: dict(by_stock) for kernel, by_stock in found.items()},
    )
