"""The last step of each microbatch. A pipeline's microbatches take turns: the step before is that of another one."""

from __future__ import annotations

from typing import Generic, TypeVar

from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths

T = TypeVar("T")


class LastSteps(Generic[T]):
    """Values of the last steps, by the object of their paths: a steady microbatch has the same one in each step.

    Args:
        microbatches: most steps to keep: those that were kept or asked for last.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._kept: list[tuple[StepPaths, T]] = []  # the newest first

    def get(self, paths: object) -> T | None:
        """The value of the step with these paths, which becomes the newest one."""
        for known, value in self._kept:
            if known is paths:
                self.keep(known, value)
                return value
        return None

    def keep(self, paths: StepPaths, value: T) -> None:
        """Keeps a value as that of the newest step."""
        others = [kept for kept in self._kept if kept[0] is not paths]
        self._kept = [(paths, value), *others[: self._microbatches - 1]]

    def drop(self, paths: StepPaths) -> None:
        """Forgets the step with these paths."""
        self._kept = [kept for kept in self._kept if kept[0] is not paths]

    def clear(self) -> None:
        """Forgets all steps."""
        self._kept.clear()
