"""Profiles made by hand, for decisions that a test can foresee."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sgl_prefix_attn.routing.profile import VERSION, Fit, Profile
from sgl_prefix_attn.routing.versions import KERNELS_VERSION


def profile(
    packed: Mapping[str, float], stock: Mapping[str, float], *, kernels: str = "native", backend: str = "fa3"
) -> Profile:
    """A profile of one packed and one stock kernel with these microseconds by term."""
    return Profile(
        version=VERSION, machine="made by hand", commit="none", measured="never", source="a test", method="none",
        kernels_version=KERNELS_VERSION, packed={kernels: Fit(us=dict(packed))}, stock={backend: Fit(us=dict(stock))},
    )  # fmt: skip


def write_profile(
    folder: Path, packed: Mapping[str, float], stock: Mapping[str, float], *, kernels: str, backend: str
) -> str:
    """Path of a file with such a profile."""
    path = folder / "profile.json"
    profile(packed, stock, kernels=kernels, backend=backend).save(path)
    return str(path)
