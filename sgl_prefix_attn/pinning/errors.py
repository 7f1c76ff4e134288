"""Errors of pinning."""

from __future__ import annotations


class PinBudgetError(ValueError):
    """A pin does not fit into the token budget; the message says by how much and what to do."""


class UnknownPinError(KeyError):
    """There is no pin with this id: it never existed, was released, has expired or was shed."""

    def __str__(self) -> str:
        return str(self.args[0])
