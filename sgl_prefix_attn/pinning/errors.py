"""What can be wrong with a request to pin."""

from __future__ import annotations


class PinBudgetError(ValueError):
    """A pin does not fit into the token budget; the message says by how much and what to do."""


class UnknownPinError(KeyError):
    """There is no pin with this number: it was never given out, was released, has expired or was shed."""

    def __str__(self) -> str:
        return str(self.args[0])
