"""Names of routing policies, as the setting `route` and the tools take them. Imports nothing heavy.

A policy is one condition, or several joined by `and`; a step runs packed if all of them hold:

    auto          the rule of the two kernels holds (`rule.py`), or where none was measured the conservative one
    conservative  the conservative rule holds
    batch>=N      at least N requests run
    reuse>=X      each distinct KV token is read X times on average, or more
    saved>=MiB    sharing saves as many MiB of a layer's KV on a rank
    packed        always
    stock         never

`cost` is `auto`, as releases with fitted costs called it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

ConditionKind = Literal["auto", "conservative", "batch", "reuse", "saved", "packed", "stock"]
FORMS = "auto, conservative, packed, stock, batch>=N, reuse>=X, saved>=MiB, or several joined by 'and'"
_WORDS: dict[str, ConditionKind] = {
    "auto": "auto",
    "cost": "auto",
    "conservative": "conservative",
    "packed": "packed",
    "stock": "stock",
}
_AND = re.compile(r"(?<!\S)and(?!\S)|&&?", re.IGNORECASE)  # spaces are stripped later: a search stays linear
_THRESHOLD = re.compile(r"(batch|reuse|saved)\s*>=\s*(\S+)", re.IGNORECASE)
MOST_CONDITIONS = 8
MOST_CHARACTERS = 200


class PolicyNameError(ValueError):
    """Not a routing policy: the message names the part and what is accepted."""


@dataclass(frozen=True)
class Condition:
    """One condition. bound: of batch, reuse and saved."""

    kind: ConditionKind
    bound: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}>={self.bound:g}" if self.kind in ("batch", "reuse", "saved") else self.kind


@dataclass(frozen=True)
class PolicyName:
    """A policy: all conditions have to hold for a step to run packed."""

    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))

    @property
    def fixed(self) -> Literal["packed", "stock"] | None:
        """The route of every step, None if steps may go either way."""
        kind = self.conditions[0].kind
        return kind if kind in ("packed", "stock") else None

    @property
    def automatic(self) -> bool:
        """Whether `auto` is a condition."""
        return any(condition.kind == "auto" for condition in self.conditions)


def parse(text: str) -> PolicyName:
    """A policy from its name. Conditions without influence are left out.

    Raises:
        PolicyNameError: the message has the part that is not a condition, and the accepted forms.
    """
    if len(text) > MOST_CHARACTERS:
        raise PolicyNameError(f"{text[:20]!r}... has {len(text)} characters; at most {MOST_CHARACTERS} are accepted")
    names = _AND.split(text)
    if len(names) > MOST_CONDITIONS:
        raise PolicyNameError(f"{text!r} has {len(names)} conditions; at most {MOST_CONDITIONS} are accepted")
    parts = [_condition(name.strip(), text) for name in names]
    if any(part.kind == "stock" for part in parts):
        return PolicyName((Condition("stock"),))
    kept = tuple(part for part in dict.fromkeys(parts) if part.kind != "packed")
    return PolicyName(kept or (Condition("packed"),))


def _condition(part: str, text: str) -> Condition:
    word = _WORDS.get(part.lower())
    if word is not None:
        return Condition(word)
    where = repr(text) if part == text.strip() else f"{part!r} in {text!r}"
    match = _THRESHOLD.fullmatch(part)
    if match is None:
        raise PolicyNameError(f"{where} is not a routing policy; expected {FORMS}")
    kind, bound_text = match[1].lower(), match[2]
    try:
        bound = float(bound_text)
    except ValueError:
        bound = math.nan
    if kind == "batch":
        if not (1 <= bound <= 1 << 20 and bound == int(bound)):
            raise PolicyNameError(f"{where}: the N of batch>=N has to be a whole number from 1 to {1 << 20}")
        return Condition("batch", bound)
    if kind == "saved":
        if not 0 < bound <= 1e6:
            raise PolicyNameError(f"{where}: the MiB of saved>=MiB has to be a number above 0, up to 1000000")
        return Condition("saved", bound)
    if not 1 <= bound <= 1e6:
        raise PolicyNameError(f"{where}: the X of reuse>=X has to be a number from 1 to 1000000")
    return Condition("reuse", bound)
