"""Names of the previous release, in which the stock backend was the inner backend.

This release reads the old names and warns with the new ones. The next release deletes this module and its calls.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

SETTINGS = {"inner_backend": "stock_backend"}
SETTING_VALUES = {"route": {"inner": "stock"}}
PROFILE_KEYS = {"inner": "stock"}
IGNORED_PROFILE_KEYS = ("verify",)  # fits of verify steps, which a rule decides now
RESULT_KEYS = {"ways": "baselines"}
ROUTE_COUNTS = {"inner": "stock"}
SERVER_STATE_KEYS = {"inner_backend": "stock_backend"}
# Command -> option or policy of its command line.
ARGUMENTS = {"route": {"--inner": "--stock", "inner": "stock"}}


def warn(old: str, new: str, where: str = "") -> None:
    """Logs that `old` was read as `new`."""
    logger.warning("%s%s is deprecated and will not be read by the next release; use %s", where, old, new)


def conflict(old: str, new: str, where: str = "") -> str:
    """The message for an old name and its new one used together."""
    return f"{where}{old} is the deprecated name of {new}, and both are given; remove {old}"


def renamed(values: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """`values` under the new key names.

    Args:
        names: old key to new key.
        where: start of each message, for example the file name.

    Raises:
        ValueError: an old key and its new one are both present.
    """
    result = dict(values)
    for old, new in names.items():
        if old not in result:
            continue
        if new in result:
            raise ValueError(conflict(f"{old!r}", f"{new!r}", where))
        warn(f"{old!r}", f"{new!r}", where)
        result[new] = result.pop(old)
    return result


def renamed_rows(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    """Rows under the new key names, with one warning for each key.

    Args:
        names: old key to new key.
        where: start of each message, for example the file name.

    Raises:
        ValueError: a row has an old key and its new one.
    """
    result = [dict(row) for row in rows]
    for old, new in names.items():
        found = [row for row in result if old in row]
        if any(new in row for row in found):
            raise ValueError(conflict(f"{old!r}", f"{new!r}", where))
        if found:
            warn(f"{old!r}", f"{new!r}", where)
        for row in found:
            row[new] = row.pop(old)
    return result


def renamed_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with the options of this release.

    Raises:
        ValueError: an old option and its new one are both given.
    """
    names = ARGUMENTS.get(arguments[0], {}) if arguments else {}
    given = {argument.partition("=")[0] for argument in arguments}
    result = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        new = names.get(name)
        if new is None:
            result.append(argument)
            continue
        if new in given:
            raise ValueError(conflict(name, new))
        warn(name, new)
        result.append(f"{new}{separator}{value}")
    return result


def route_labels(route: str) -> tuple[str, ...]:
    """Deprecated values of the metric label `route` that are exported beside `route`."""
    return tuple(old for old, new in ROUTE_COUNTS.items() if new == route)
