"""One hook on each function by which SGLang's scheduler admits requests, for all features that have a say in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.compat.targets import ADD_ONE_REQ, CALC_PRIORITY
from sgl_prefix_attn.sglang_plugin.telemetry.failures import OF_AN_EXCEPTION, Failures

# Gatekeepers in the order in which they are asked. Requests that wait for a prefill are passed over, so they come
# first; one that a job holds back ends the round. Pins make room for what the others have let through.
_ORDER: Final = ("shared_prefill", "group_scheduling", "pins")

_Answer = TypeVar("_Answer")


class Gatekeeper:
    """A feature with a say in admission. Methods that it does not define do nothing.

    Attributes:
        gate: one of `_ORDER`.
        unhooked: effect on the server if admission is not hooked, for the log.
        queue_unhooked: effect if the waiting queue is not hooked; empty: the feature does not read the queue.
    """

    gate: str
    unhooked: str
    queue_unhooked = ""

    def queue_ordered(self, policy: Any, waiting: list[Any]) -> None:
        """The waiting queue is in SGLang's order. It may be changed in place."""

    def holds_back(self, adder: Any, request: Any) -> str | None:
        """The AddReqResult by name for a request that is not admitted now, None for one that may be."""

    def refused(self, adder: Any, request: Any, result: Any, try_again: Callable[[], Any]) -> Any | None:
        """The result for a request that SGLang did not admit, None if it stays; `try_again` asks SGLang once more."""

    def admitted(self, adder: Any, request: Any) -> None:
        """SGLang admitted a request."""


class Admission:
    """The gatekeepers of one process, with the bodies of the hooks. A gatekeeper that raises is asked no more."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._gatekeepers: list[Gatekeeper] = []
        self._ended: set[Gatekeeper] = set()

    def enlist(self, gatekeeper: Gatekeeper) -> None:
        """Asks a gatekeeper from now on; works once for each."""
        if gatekeeper not in self._gatekeepers:
            self._gatekeepers = sorted([*self._gatekeepers, gatekeeper], key=lambda known: _ORDER.index(known.gate))

    def hooks(self) -> tuple[Hook, ...]:
        """The hooks that the gatekeepers need."""
        queue = ", and ".join(known.queue_unhooked for known in self._gatekeepers if known.queue_unhooked)
        adder = ", and ".join(known.unhooked for known in self._gatekeepers)
        hooks = (
            Hook(CALC_PRIORITY, self.after_calc_priority, "AFTER", queue),
            Hook(ADD_ONE_REQ, self.around_add_one_req, "AROUND", adder),
        )
        return tuple(hook for hook in hooks if hook.consequence)

    def after_calc_priority(self, result: Any, policy: Any, waiting_queue: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `SchedulePolicy.calc_priority`."""
        self._ask(lambda gatekeeper: gatekeeper.queue_ordered(policy, waiting_queue))

    def around_add_one_req(self, original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND hook on `PrefillAdder.add_one_req`."""
        verdict = self._ask(lambda gatekeeper: gatekeeper.holds_back(adder, req))
        if verdict is not None:
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult[verdict]

        def add() -> Any:
            return original(adder, req, *args, **kwargs)

        result = add()
        if adder.can_run_list[-1:] != [req]:
            changed = self._ask(lambda gatekeeper: gatekeeper.refused(adder, req, result, add))
            result = result if changed is None else changed
        if adder.can_run_list[-1:] == [req]:
            self._ask(lambda gatekeeper: gatekeeper.admitted(adder, req))
        return result

    def _ask(self, ask: Callable[[Gatekeeper], _Answer | None]) -> _Answer | None:
        """The first answer of a gatekeeper, None if none has one."""
        for gatekeeper in self._gatekeepers:
            if gatekeeper in self._ended:
                continue
            try:
                answer = ask(gatekeeper)
            except Exception as error:  # the one guard of admission: the scheduler must go on
                self._failures.failed(gatekeeper.gate, error, "from now on admission goes on without it")
                self._failures.switch_off(gatekeeper.gate, OF_AN_EXCEPTION)
                self._ended.add(gatekeeper)
                continue
            if answer is not None:
                return answer
        return None
