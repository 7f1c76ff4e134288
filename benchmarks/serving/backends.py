"""Backends as a user writes them: NAME, prefixpack[key=value,...] with other settings, +mixed with mixed chunk."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sgl_prefix_attn.settings import SettingsError, load_settings, variable_name

OURS = "prefixpack"
MIXED = ("--enable-mixed-chunk",)
_ONE = re.compile(r"\s*([\w-]+)\s*(?:\[([^\[\]]*)\])?\s*(\+mixed)?\s*")


class UsageError(Exception):
    """Arguments that do not go together; the message says what to change."""


@dataclass(frozen=True)
class Backend:
    """An attention backend of SGLang and what its server's environment and arguments get in addition."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def parse_backends(text: str, option: str) -> dict[str, Backend]:
    """Backends by the name the user gave them, in order.

    Raises:
        UsageError: not of the form, twice the same, or settings that prefixpack does not have.
    """
    found: dict[str, Backend] = {}
    for written in re.split(r",(?![^\[]*\])", text):
        match = _ONE.fullmatch(written)
        if match is None or written.strip() in found:
            raise UsageError(
                f"{option} {text!r}: expected different backends with commas between them, {OURS} perhaps with "
                f"settings behind it, for example {OURS}[route=packed],{OURS}[route=auto],flashinfer"
            )
        name, settings, mixed = match.groups()
        environment = {} if settings is None else _environment(name, settings, option)
        found[written.strip()] = Backend(name, environment, MIXED if mixed else ())
    return found


def _environment(name: str, settings: str, option: str) -> dict[str, str]:
    if name != OURS:
        raise UsageError(f"{option}: {name}[{settings}]: only {OURS} has settings")
    environment = {}
    for setting in settings.split(","):
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"{option}: {name}[{settings}]: {setting!r} is not of the form key=value")
        environment[variable_name(key.strip())] = value.strip()
    try:
        load_settings(environment)
    except SettingsError as error:
        raise UsageError(f"{option}: {name}[{settings}]: {error}") from error
    return environment
