"""`python -m sgl_prefix_attn settings`: values in force, their sources and meanings; also their documentation."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from typing import Any

from sgl_prefix_attn.settings import (
    CONFIG_VARIABLE,
    OTHER_VARIABLES,
    LoadedSettings,
    Settings,
    SettingsError,
    accepted_values,
    load_settings_with_sources,
    variable_name,
)

_COLUMN_GAP = 2
_NARROWEST_MEANING = 30
_MARKDOWN_COLUMNS = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print every setting of the prefixpack backend: the value in force, its source and its meaning. "
        f"Set them in the TOML file named by {CONFIG_VARIABLE} or as PREFIXPACK_<KEY>; a variable overrides the file."
    )
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON instead of a table")
    formats.add_argument("--markdown", action="store_true", help="print the reference of all settings as Markdown")


def run(args: argparse.Namespace) -> int:
    if args.markdown:
        print(markdown())
        return 0
    try:
        loaded = load_settings_with_sources()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(_records(loaded), indent=2, default=str) if args.json else _table(loaded))
    return 0


def markdown() -> str:
    """The reference of all settings and other variables: the generated part of docs/settings.md."""
    settings = [
        f'- <a id="{key}"></a>`{key}` (default {_as_text(field.default)}; accepted: {accepted_values(key)}). '
        + str(field.description)
        for key, field in Settings.model_fields.items()
    ]
    variables = [f"- `{name}`: {meaning}" for name, meaning in OTHER_VARIABLES.items()]
    return "\n".join([*map(_wrapped, settings), "", "## Other variables", "", *variables])


def _wrapped(item: str) -> str:
    return textwrap.fill(
        item, _MARKDOWN_COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _records(loaded: LoadedSettings) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": getattr(loaded.settings, key),
            "source": loaded.sources[key],
            "default": field.default,
            "variable": variable_name(key),
            "accepted": accepted_values(key),
            "description": field.description,
        }
        for key, field in Settings.model_fields.items()
    ]


def _table(loaded: LoadedSettings) -> str:
    header = ("key", "value", "source", "meaning")
    rows = [
        (record["key"], _as_text(record["value"]), record["source"], f"{record['description']} [{record['accepted']}]")
        for record in _records(loaded)
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) + _COLUMN_GAP for column in range(3)]
    meaning_width = max(_NARROWEST_MEANING, shutil.get_terminal_size((120, 24)).columns - sum(widths))
    lines = []
    for row in [header, *rows]:
        first, *rest = textwrap.wrap(row[3], meaning_width)
        lines.append("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + first)
        lines += [" " * sum(widths) + line for line in rest]
    return "\n".join(lines)


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value) or "false"
    return "none" if value is None else str(value)
