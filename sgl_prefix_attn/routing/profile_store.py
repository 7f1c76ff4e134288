"""Finds the profile of a server: the user's, then the package's, else none.

A profile is of a GPU, its compute capability, head shapes, a query type, a KV type and a version of our kernels. The
user's are the JSON files in `user_folder()`, where `python -m sgl_prefix_attn calibrate` writes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.profile import (
    SHIPPED_FILES,
    Profile,
    ProfileError,
    head_shape,
    load_profile,
    read_shipped,
)
from sgl_prefix_attn.routing.versions import KERNELS_VERSION, TAKEN_VERSIONS

logger = logging.getLogger(__name__)

SETTING, USER, SHIPPED_ORIGIN = "setting", "user", "shipped"
NOT_PROFILES = (".steps.json", ".report.json")  # beside a profile
_FOLDER = "sgl-prefix-attn/profiles"


@dataclass(frozen=True)
class ServerFacts:
    """What a profile has to fit.

    Attributes:
        gpu: CUDA's name; "cpu" without a GPU.
        capability: compute capability, "9.0"; "" without a GPU.
        shape: attention shape of one rank.
        dtype: of queries: bf16, fp16 or fp32.
        packed, stock: names of the kernels in profiles.
        page_size: tokens of a page of the KV cache.
    """

    gpu: str
    capability: str
    shape: ModelShape
    dtype: str
    packed: str
    stock: str
    page_size: int = 1


@dataclass(frozen=True)
class StoredProfile:
    """A profile and where it is from. origin: setting, user or shipped."""

    origin: str
    name: str
    profile: Profile

    def __str__(self) -> str:
        return f"{self.origin} profile {self.name}"


@dataclass(frozen=True)
class FoundProfile:
    """A profile for a server; borrowed: what of the server it was not measured with, in words, or ""."""

    stored: StoredProfile
    borrowed: str = ""


def user_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the user's profiles, by the XDG base directory specification.

    Raises:
        ProfileError: the user has no home.
    """
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ProfileError(f"no folder of the user's profiles: {error} XDG_CACHE_HOME names one.") from error
    return base / _FOLDER


class ProfileStore:
    """All profiles that a server may take.

    Attributes:
        profiles: in the order of preference: the setting's, the user's, the package's.
        unreadable: messages on files of the user that are not profiles, or on the folder.
    """

    def __init__(self, profiles: list[StoredProfile], unreadable: list[str]) -> None:
        self.profiles = profiles
        self.unreadable = unreadable

    @classmethod
    def read(cls, route_profile: str | None = None, folder: Path | None = None) -> ProfileStore:
        """Reads the profiles.

        Args:
            route_profile: the setting; its profile is taken whatever it was measured on.
            folder: of the user's profiles; None: `user_folder()`.

        Raises:
            ProfileError: `route_profile` cannot be read or is not a profile.
        """
        profiles, unreadable = [], []
        if route_profile is not None:
            profiles.append(StoredProfile(SETTING, route_profile, load_profile(route_profile)))
        try:
            files = _user_files(user_folder() if folder is None else folder)
        except ProfileError as error:
            files = []
            unreadable.append(str(error))
        for path in files:
            try:
                profiles.append(StoredProfile(USER, str(path), load_profile(path)))
            except ProfileError as error:
                unreadable.append(str(error))
        profiles += [StoredProfile(SHIPPED_ORIGIN, name, read_shipped(name)) for name in SHIPPED_FILES]
        return cls(profiles, unreadable)

    def as_json(self) -> dict[str, Any]:
        """The store as JSON-able values, to send it to other ranks."""
        return {
            "profiles": [(stored.origin, stored.name, stored.profile.model_dump()) for stored in self.profiles],
            "unreadable": self.unreadable,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> ProfileStore:
        """A store from `as_json` of another rank."""
        made = [StoredProfile(origin, name, Profile.model_validate(v)) for origin, name, v in values["profiles"]]
        return cls(made, list(values["unreadable"]))

    def find(self, facts: ServerFacts) -> FoundProfile | None:
        """The profile that a server takes, None if there is none for it.

        The setting's is taken first. Then profiles of these heads, then of any heads, the user's before the package's.
        Then profiles of other heads are borrowed, and for 8-bit KV those of 16-bit KV. Among equals one of the server's
        page size comes first.
        """
        if self.profiles and self.profiles[0].origin == SETTING:
            return FoundProfile(self.profiles[0], _borrowed(self.profiles[0].profile, facts))
        usable = [stored for stored in self.profiles if refusal(stored.profile, facts) is None]
        if not usable:
            return None
        best = min(usable, key=lambda stored: _rank(stored, facts))  # min keeps the order of equals
        return FoundProfile(best, _borrowed(best.profile, facts))


def refusal(profile: Profile, facts: ServerFacts) -> str | None:
    """Why a server does not take a profile, None if it may."""
    if profile.machine != facts.gpu:
        return f"of {profile.machine}, not of {facts.gpu}"
    if profile.capability and facts.capability and profile.capability != facts.capability:
        return f"of compute capability {profile.capability}, not {facts.capability}"
    if profile.kernels_version not in TAKEN_VERSIONS:
        return f"of kernels {profile.kernels_version}; these are {KERNELS_VERSION}: calibrate again"
    if profile.dtype and profile.dtype != facts.dtype and "fp32" in (profile.dtype, facts.dtype):
        return f"of {profile.dtype} queries, not {facts.dtype}"
    for kind, kernel, known in (("packed", facts.packed, profile.packed), ("stock", facts.stock, profile.stock)):
        if kernel not in known:
            return f"without a cost of the {kind} kernel {kernel}"
    if profile.kv_bytes < facts.shape.kv_bytes:
        return f"of {8 * profile.kv_bytes}-bit KV, not {8 * facts.shape.kv_bytes}-bit"
    return None


def _borrowed(profile: Profile, facts: ServerFacts) -> str:
    parts = []
    if profile.kv_bytes != facts.shape.kv_bytes:
        parts.append(
            f"{8 * profile.kv_bytes}-bit KV; of {8 * facts.shape.kv_bytes} bits, predictions know the bytes alone"
        )
    if profile.head_shapes and head_shape(facts.shape) not in profile.head_shapes:
        parts.append(f"heads {', '.join(profile.head_shapes)}; these are {head_shape(facts.shape)}")
    elif profile.head_dims and facts.shape.head_dim not in profile.head_dims:
        parts.append(f"head_dim {', '.join(map(str, profile.head_dims))}; this is {facts.shape.head_dim}")
    if profile.page_size != facts.page_size:
        parts.append(f"page size {profile.page_size}; this is {facts.page_size}")
    if profile.kernels_version != KERNELS_VERSION:
        parts.append(f"kernels of version {profile.kernels_version}; these are of {KERNELS_VERSION}")
    return "; ".join(parts)


def _rank(stored: StoredProfile, facts: ServerFacts) -> tuple[int, int, int, int]:
    profile = stored.profile
    heads = 1 if not profile.head_shapes else 0 if head_shape(facts.shape) in profile.head_shapes else 2
    return (
        int(profile.kv_bytes != facts.shape.kv_bytes),
        int(heads == 2),
        int(stored.origin == SHIPPED_ORIGIN) * 2 + heads,
        int(profile.page_size != facts.page_size),
    )


def _user_files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.glob("*.json") if path.is_file() and not path.name.endswith(NOT_PROFILES))
    except OSError as error:
        logger.warning("prefixpack: cannot list the profiles in %s: %s", folder, error.strerror)
        return []


def facts_as_text(facts: ServerFacts) -> str:
    """The facts on one line."""
    values = asdict(facts)
    pages = "" if facts.page_size == 1 else f"pages of {facts.page_size}, "
    return (
        f"{values['gpu']}, heads {head_shape(facts.shape)}, {facts.dtype}, {8 * facts.shape.kv_bytes}-bit KV, {pages}"
        f"{facts.packed} or {facts.stock}"
    )
