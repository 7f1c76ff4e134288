"""What a user can change about each reason for which steps do not run packed, and the list of all reasons."""

from __future__ import annotations

import argparse
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from sgl_prefix_attn.sglang_plugin.doctor.launch_command import arguments_without
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import KV_LAYOUT, REASONS, Reason

# For KV_LAYOUT where the model's code does not divide its heads as the KV pool's are.
HEADS_OF_ALL_RANKS: Final = replace(
    KV_LAYOUT,
    advice="Leave out --enable-dp-attention, --dp-size, --attn-dp-size and --attn-cp-size: this model spreads its "
    "heads over all ranks, and the KV pool of SGLang does not.",
    unset=(),
    without=("--enable-dp-attention", "--dp-size", "--data-parallel-size", "--attn-dp-size", "--attn-cp-size"),
)


@dataclass(frozen=True)
class Change:
    """One thing to change about a server.

    Attributes:
        reason: what it removes, by its advice.
        by_hand: whether following it does not remove the reason, as for an option in a configuration file.
    """

    reason: Reason
    by_hand: bool = False

    @property
    def can_be_followed(self) -> bool:
        """Whether the change can be made without a decision of the user's."""
        return bool(self.reason.variables or self.reason.unset or self.reason.without)

    def followed(self, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Launch arguments and environment after the change."""
        kept = {name: value for name, value in environ.items() if name not in self.reason.unset}
        named = self.reason.without
        without = [*named, *_spellings(arguments, named)] if named else []
        return arguments_without(arguments, without), kept | dict(self.reason.variables)

    def as_dict(self) -> dict[str, Any]:
        """The change as JSON-able values."""
        reason = self.reason
        return {
            "text": reason.advice,
            "reason": reason.key,
            "variables": dict(reason.variables),
            "unset": reason.unset,
            "without": reason.without,
            "by_hand": self.by_hand,
        }


def markdown() -> str:
    """All reasons by section, with what there is to do about them: the end of docs/troubleshooting.md."""
    sections = groupby(REASONS, lambda reason: reason.section)
    return "\n\n".join(f"### {title}\n\n" + "\n".join(map(_entry, reasons)) for title, reasons in sections)


def _entry(reason: Reason) -> str:
    text = f"- `{reason.key}`: {reason.text[0].lower()}{reason.text[1:]}."
    if not reason.advice.startswith(("Nothing:", "Nothing.")):
        text += f" *{reason.advice}*"
    return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _spellings(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Options among launch arguments that SGLang's parser takes for `names`: aliases and abbreviations."""
    targets = targets_of_options()
    wanted = {targets.get(name, name) for name in names}
    found = []
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--"):
            exact = {targets[option]} if option in targets else set()
            meant = exact or {target for known, target in targets.items() if known.startswith(option)}
            if meant and meant <= wanted:
                found.append(option)
    return found


@functools.cache
def targets_of_options() -> dict[str, str]:
    """Where SGLang's parser stores the value of each option; aliases have the same place."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option: action.dest for action in parser._actions for option in action.option_strings}
