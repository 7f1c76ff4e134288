"""Errors of pinning."""

from __future__ import annotations


class PinBudgetError(ValueError):
    """A pin does not fit into the token budget; the message says by how much and what to do.

    Attributes:
        renews: whether the pin exists, shorter than asked for. It stays as it is.
    """

    def __init__(self, message: str, renews: bool = False) -> None:
        super().__init__(message)
        self.renews = renews


class UnknownPinError(KeyError):
    """There is no pin with this id: it never existed, was released, has expired or was shed."""

    def __str__(self) -> str:
        return str(self.args[0])
