"""Names of routing policies, as the setting `route` and the tools take them. Imports nothing heavy.

A policy is one condition, or several joined by `and`; a step runs packed if all of them hold:

    cost          the profile predicts packed to be faster; without a profile for the GPU, the conservative rule
    conservative  the rule for a GPU without a profile
    batch>=N      at least N requests run
    reuse>=X      each distinct KV token is read X times on average, or more
    packed        always
    stock         never

`auto` is `cost`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

ConditionKind = Literal["cost", "conservative", "batch", "reuse", "packed", "stock"]
FORMS = "auto, cost, conservative, packed, stock, batch>=N, reuse>=X, or several of them joined by 'and'"
_WORDS: dict[str, ConditionKind] = {
    "auto": "cost",
    "cost": "cost",
    "conservative": "conservative",
    "packed": "packed",
    "stock": "stock",
}
_AND = re.compile(r"(?<!\S)and(?!\S)|&&?", re.IGNORECASE)  # spaces are stripped later: a search stays linear
_THRESHOLD = re.compile(r"(batch|reuse)\s*>=\s*(\S+)", re.IGNORECASE)
MOST_CONDITIONS = 8
MOST_CHARACTERS = 200


class PolicyNameError(ValueError):
    """Not a routing policy: the message names the part and what is accepted."""


@dataclass(frozen=True)
class Condition:
    """One condition. bound: of batch and reuse."""

    kind: ConditionKind
    bound: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}>={self.bound:g}" if self.kind in ("batch", "reuse") else self.kind


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
    def predicts(self) -> bool:
        """Whether a profile is needed."""
        return any(condition.kind == "cost" for condition in self.conditions)


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
    if not 1 <= bound <= 1e6:
        raise PolicyNameError(f"{where}: the X of reuse>=X has to be a number from 1 to 1000000")
    return Condition("reuse", bound)
