"""The one hook on admission: whom it asks, in which order, and what an exception of one gatekeeper ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from sgl_prefix_attn.sglang_plugin.compat.targets import ADD_ONE_REQ, CALC_PRIORITY
from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission, Gatekeeper
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import GroupScheduler
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.telemetry.failures import OF_AN_EXCEPTION, Failures


class Keeper(Gatekeeper):
    """Notes what it is asked, and may raise."""

    unhooked = "it is not asked"

    def __init__(self, gate: str, told: list[str], *, verdict: str | None = None, raises: bool = False) -> None:
        self.gate, self._told, self._verdict, self.raises = gate, told, verdict, raises

    def _ask(self, question: str) -> None:
        self._told.append(f"{self.gate} {question}")
        if self.raises:
            raise RuntimeError("a fault of ours")

    def queue_ordered(self, policy: Any, waiting: list[Any]) -> None:
        self._ask("queue")

    def holds_back(self, adder: Any, request: Any) -> str | None:
        self._ask("holds back?")
        return self._verdict

    def admitted(self, adder: Any, request: Any) -> None:
        self._ask("admitted")


def admission_of(*gatekeepers: Gatekeeper, failures: Failures | None = None) -> Admission:
    admission = Admission(failures or Failures())
    for gatekeeper in gatekeepers:
        admission.enlist(gatekeeper)
    return admission


def admit(admission: Admission, *results: AddReqResult) -> AddReqResult:
    """The hook's answer where SGLang's answers would be `results`, one after the other."""
    adder, answers = SimpleNamespace(can_run_list=[]), iter(results or [AddReqResult.CONTINUE])

    def original(adder: Any, request: Any) -> AddReqResult:
        result = next(answers)
        if result is AddReqResult.CONTINUE:
            adder.can_run_list.append(request)
        return result

    result: AddReqResult = admission.around_add_one_req(original, adder, object())
    return result


def test_gatekeepers_are_asked_in_one_order_however_they_came() -> None:
    told: list[str] = []
    pins, prefill, jobs = (Keeper(gate, told) for gate in ("pins", "shared_prefill", "group_scheduling"))
    admission = admission_of(pins, prefill)
    for _ in range(2):
        admission.enlist(jobs)
    assert admit(admission) is AddReqResult.CONTINUE
    order = ("shared_prefill", "group_scheduling", "pins")
    assert told == [f"{gate} {asked}" for asked in ("holds back?", "admitted") for gate in order]


@pytest.mark.parametrize("verdict", ["CONTINUE", "OTHER"])
def test_the_first_that_holds_a_request_back_decides(verdict: str) -> None:
    told: list[str] = []
    admission = admission_of(Keeper("shared_prefill", told, verdict=verdict), Keeper("pins", told))
    assert admit(admission, *[]) is AddReqResult[verdict]
    assert told == ["shared_prefill holds back?"]


def test_one_that_raises_ends_alone_under_its_own_name(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    failures = Failures()
    broken, other = Keeper("group_scheduling", told, raises=True), Keeper("pins", told)
    admission = admission_of(broken, other, failures=failures)
    admission.after_calc_priority(None, None, [])
    admission.enlist(broken)  # by another backend of the process
    assert admit(admission) is AddReqResult.CONTINUE
    assert told == ["group_scheduling queue", "pins queue", "pins holds back?",
                    "pins admitted"]  # fmt: skip
    assert failures.counts == {"group_scheduling": 1}
    assert failures.disabled == {"group_scheduling": OF_AN_EXCEPTION}
    assert caplog.text.count("group_scheduling failed") == 1


@pytest.mark.parametrize("second", [AddReqResult.CONTINUE, AddReqResult.NO_TOKEN])
def test_a_refused_request_may_be_tried_again(second: AddReqResult) -> None:
    class Room(Keeper):
        def refused(self, adder: Any, request: Any, result: Any, try_again: Any) -> Any:
            self._ask(f"refused: {result.name}")
            return try_again()

    told: list[str] = []
    admission = admission_of(Room("pins", told), Keeper("group_scheduling", told))
    assert admit(admission, AddReqResult.NO_TOKEN, second) is second
    admitted = ["group_scheduling admitted", "pins admitted"] if second is AddReqResult.CONTINUE else []
    assert told == ["group_scheduling holds back?", "pins holds back?", "pins refused: NO_TOKEN", *admitted]


def test_sglangs_own_exceptions_arrive() -> None:
    failures = Failures()
    admission = admission_of(Keeper("pins", []), failures=failures)
    with pytest.raises(StopIteration):
        admission.around_add_one_req(lambda adder, request: next(iter(())), None, None)
    assert not failures.counts


def test_each_function_of_sglang_has_one_hook_and_only_where_a_gatekeeper_needs_it() -> None:
    admission = admission_of()
    assert admission.hooks() == ()
    admission.enlist(SharedPrefill.__new__(SharedPrefill))
    (hook,) = admission.hooks()
    assert hook.target is ADD_ONE_REQ, "the waiting queue is read"
    for kind in (PinningHooks, GroupScheduler):
        admission.enlist(kind.__new__(kind))
    queue, adder = admission.hooks()
    assert (queue.target, adder.target) == (CALC_PRIORITY, ADD_ONE_REQ)
    assert adder.function == hook.function, "the hook of the first backend serves the others"
    assert queue.consequence == "offline jobs run as they come, and retention ignores the waiting queue"
    assert adder.consequence == (
        "requests compute shared prefixes again, and offline jobs run as they come, and pins can block admission"
    )
