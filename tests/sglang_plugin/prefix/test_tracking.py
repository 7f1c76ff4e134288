"""The tracker against SGLang's real radix trees: what it shares, and what it reads, in known situations."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handover
from sgl_prefix_attn.sglang_plugin.prefix.tree_mirror import TreeMirror
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from tests.sglang_plugin.prefix.sharing import check
from tests.support.small_scheduler import TREES, SmallScheduler


def decoded(scheduler: SmallScheduler, tracker: BatchTracker) -> StepPaths:
    """The next decode step of all that run, checked."""
    scheduler.decode()
    return check(scheduler, tracker, scheduler.decode_batch())


@pytest.mark.parametrize("kind", TREES)
class TestKnownSituations:
    def start(self, kind: str, *prompts: list[int]) -> tuple[SmallScheduler, BatchTracker]:
        scheduler = SmallScheduler(kind)
        for prompt in prompts:
            scheduler.join(prompt)
        return scheduler, BatchTracker()

    def test_steady_decode_returns_the_same_object(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        first = decoded(scheduler, tracker)
        assert first.forest.paths() == [[(0, 0, 50)], [(0, 0, 50)]]
        for _ in range(5):
            scheduler.decode()
            assert tracker.step(scheduler.decode_batch()) is first

    def test_nothing_is_kept_from_a_tree_that_another_has_replaced(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 50 + [last] for last in range(2, 8)))
        for _ in range(6):  # until none counts as new
            first = decoded(scheduler, tracker)
        batch = scheduler.decode_batch()
        batch.tree_cache = object()
        assert tracker.step(batch) == fallback_reasons.UNKNOWN_TREE
        assert check(scheduler, tracker, scheduler.decode_batch()) is not first
        assert tracker.restarts == 0

    def test_a_flushed_tree_is_forgotten(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 50 + [last] for last in range(2, 12)))
        decoded(scheduler, tracker)
        for request in scheduler.running:
            scheduler.finish(request)
        scheduler.filter()
        scheduler.flush()
        scheduler.join([1] * 50 + [2])
        decoded(scheduler, tracker)
        assert len(tracker._mirror) == 1

    def test_requests_that_are_only_prefilled_are_not_kept_alive(self, kind: str) -> None:
        scheduler, tracker = self.start(kind)
        prefilled = []
        for number in range(20):
            request = scheduler.request([number] * 10)
            scheduler.match(request)
            check(scheduler, tracker, scheduler.extend_batch([request]))
            scheduler.prefill_done(request)
            scheduler.finish(request, insert=True)
            prefilled.append(weakref.ref(request))
        del request
        gc.collect()
        assert not any(reference() for reference in prefilled)

    def test_a_microbatch_that_reads_the_tree_anew_leaves_the_other_one_right(self, kind: str) -> None:
        scheduler, _ = self.start(kind, *([1] * 50 + [last] for last in range(2, 22)))
        tracker, halves = BatchTracker(2), (scheduler.running[:10], scheduler.running[10:])
        for _ in range(6):  # until none counts as new
            for half in halves:
                check(scheduler, tracker, scheduler.decode_batch(half))
        tracker._mirror._mirror.clear()  # as for nodes that other batches did not use in many steps
        for half in halves * 2:
            scheduler.finish(half.pop())
            check(scheduler, tracker, scheduler.decode_batch(half))
        assert tracker.restarts == 1

    def test_microbatches_of_a_pipeline_keep_a_step_each(self, kind, monkeypatch):
        """Requests leave and join one of them; the other is not read again."""
        scheduler = SmallScheduler(kind)
        tracker, read = BatchTracker(microbatches=2), []
        halves = [[scheduler.join([1] * 30 + [half, last]) for last in range(8)] for half in (2, 3)]

        def steps() -> list[StepPaths]:
            scheduler.decode()
            return [check(scheduler, tracker, scheduler.decode_batch(half)) for half in halves]

        for _ in range(6):  # until none counts as new
            first = steps()
        forest = TreeMirror.forest
        monkeypatch.setattr(TreeMirror, "forest", lambda *args: read.append(len(args[1])) or forest(*args))
        assert steps() == first
        assert read == []
        scheduler.finish(halves[0].pop(3))
        scheduler.filter()
        halves[0].append(scheduler.join([1] * 30 + [2, 9]))
        assert steps()[1] is first[1]
        assert read == [8]
        halves[0] = [scheduler.join([1] * 30 + [4, last]) for last in range(3)]  # all others have left it
        assert steps()[1] is first[1]
        assert tracker.restarts == 0

    def test_a_finished_request_that_stays_in_the_batch_shares_nothing_some_steps_later(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 30 + [i] for i in (2, 3, 4)))
        decoded(scheduler, tracker)
        scheduler.finish(scheduler.running[2])
        for _ in range(32):
            step = check(scheduler, tracker, scheduler.decode_batch())
        assert step.forest.paths() == [[(0, 0, 30)], [(0, 0, 30)], []]

    def test_requests_that_come_and_go_every_step_hide_no_node_that_moves(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 30 + [2, i] for i in range(40)))
        decoded(scheduler, tracker)
        scheduler.running[20].last_node = None
        for count in range(32):
            scheduler.finish(scheduler.running[-1])
            scheduler.filter()
            scheduler.join([1] * 30 + [3, count])
            scheduler.decode()
            step = tracker.step(scheduler.decode_batch())
        assert isinstance(step, StepPaths)
        assert step.forest.tail_node[20] == -1
        assert (np.delete(step.forest.tail_node, 20) >= 0).all()

    def test_only_requests_that_joined_or_whose_turn_it_is_are_looked_up(self, kind, monkeypatch):
        looked_up: list[int] = []
        look_up = TreeMirror._look_up

        def counting(mirror: TreeMirror, handles: list[Any]) -> list[int]:
            looked_up.append(len(handles))
            return look_up(mirror, handles)

        monkeypatch.setattr(TreeMirror, "_look_up", counting)
        scheduler, tracker = self.start(kind, *([1] * 30 + [i] for i in range(2, 66)))
        for _ in range(8):
            decoded(scheduler, tracker)
        scheduler.join([1] * 30 + [70])
        for _ in range(8):
            decoded(scheduler, tracker)
        assert looked_up == [64, 1 + 65 // 32 + 1]

    def test_those_that_decode_in_a_mixed_step_are_not_looked_up_again(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        scheduler.decode()
        first = tracker.step(scheduler.decode_batch())
        chunked = scheduler.request([1] * 30 + [4] * 30)
        scheduler.match(chunked, upto=40)
        scheduler.decode()
        check(scheduler, tracker, scheduler.extend_batch([chunked], scheduler.running))
        scheduler.decode()
        assert tracker.step(scheduler.decode_batch()) is first

    @pytest.mark.parametrize("overlap", [False, True])
    def test_kinds_of_steps_that_never_run_packed_are_not_read(self, kind, overlap, monkeypatch):
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        tracker.why_stock = lambda mode: None if mode == "decode" else fallback_reasons.COMPUTE_BOUND
        decoded(scheduler, tracker)
        late = [scheduler.request([1] * 30 + [number] * 9) for number in (4, 5)]
        for request in late:
            scheduler.match(request)
        with monkeypatch.context() as patch:
            patch.setattr(TreeMirror, "forest", lambda *args: pytest.fail("the tree was read"))
            assert tracker.step(scheduler.extend_batch(late[:1])) == fallback_reasons.COMPUTE_BOUND
            scheduler.decode()
            assert tracker.step(scheduler.extend_batch(late[1:], scheduler.running)) == fallback_reasons.COMPUTE_BOUND
        scheduler.running += late
        if overlap:
            decoded(scheduler, tracker)
        for request in late:
            scheduler.prefill_done(request)
        step = decoded(scheduler, tracker)
        assert [path[0] for path in step.forest.paths()] == [(0, 0, 30)] * 4
        tracker.why_stock = lambda mode: fallback_reasons.NO_MEMORY
        scheduler.running.pop()
        assert tracker.step(scheduler.decode_batch()) == fallback_reasons.NO_MEMORY


def two_that_decode() -> SmallScheduler:
    scheduler = SmallScheduler(TREES[0])
    for last in (2, 3):
        scheduler.join([1] * 50 + [last])
    scheduler.decode()
    return scheduler


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"forward_mode": ForwardMode.IDLE}, fallback_reasons.IDLE),
        ({"forward_mode": ForwardMode.SPLIT_PREFILL}, fallback_reasons.MODE),
        ({"seq_lens": torch.ones(4)}, fallback_reasons.BEAM_ROWS),
        ({"encoder_lens": [5, 5]}, fallback_reasons.ENCODER_DECODER),
        ({"seq_lens_cpu": None}, fallback_reasons.NO_HOST_LENGTHS),
        ({"forward_mode": ForwardMode.EXTEND, "prefix_lens": torch.ones(2)}, fallback_reasons.NO_HOST_LENGTHS),
    ],
    ids=["idle", "mode", "beams", "encoder", "decode lengths", "prefill lengths"],
)
def test_batches_that_have_no_paths(changes: dict[str, Any], reason: fallback_reasons.Reason) -> None:
    batch = two_that_decode().decode_batch()
    vars(batch).update(changes)
    assert BatchTracker().step(batch) == reason


class TestSpeculation:
    """Batches of a server with speculative decoding."""

    def start(self) -> tuple[SmallScheduler, BatchTracker]:
        return two_that_decode(), BatchTracker()

    def test_steady_drafts_return_the_same_object(self) -> None:
        scheduler, tracker = self.start()
        first = check(scheduler, tracker, scheduler.verify_batch(4))
        assert (first.mode, first.num_requests) == ("verify", 2)
        assert first.query_lens.tolist() == [4, 4]
        for _ in range(5):
            for _ in range(3):
                scheduler.decode()
            assert tracker.step(scheduler.verify_batch(4)) is first

    def test_without_lengths_in_host_memory_committed_ones_bound_them(self) -> None:
        scheduler, tracker = self.start()
        batch = scheduler.verify_batch(4)
        exact = batch.seq_lens_cpu
        expected = check(scheduler, tracker, batch)
        handover = Handover(BatchTracker(), Counters())
        batch.seq_lens_cpu = None
        handed = handover.read(batch)
        assert not isinstance(handed.paths, fallback_reasons.Reason)
        assert handed.paths.forest.paths() == expected.forest.paths()
        assert handed.bounds
        assert handed.seq_lens.tolist() == (exact + 4).tolist()
        batch.forward_mode = ForwardMode.DECODE
        assert handover.read(batch).paths == fallback_reasons.SPECULATIVE

    def test_another_number_of_drafts_is_another_step(self) -> None:
        scheduler, tracker = self.start()
        first = check(scheduler, tracker, scheduler.verify_batch(4))
        second = check(scheduler, tracker, scheduler.verify_batch(2))
        assert second is not first
        assert second.query_lens.tolist() == [2, 2]
        assert check(scheduler, tracker, scheduler.decode_batch()).query_lens is None

    def test_steps_without_drafts(self) -> None:
        scheduler, tracker = self.start()
        batch = scheduler.verify_batch(4)
        request = scheduler.request([1] * 50 + [5, 6])
        scheduler.match(request)
        extend = scheduler.extend_batch([request])
        extend.spec_algorithm = batch.spec_algorithm
        assert check(scheduler, tracker, extend).mode == "extend"
        decode = scheduler.decode_batch()
        decode.spec_algorithm = batch.spec_algorithm
        assert tracker.step(decode) == fallback_reasons.SPECULATIVE

    def test_nothing_is_read_where_drafts_do_not_run_packed(self) -> None:
        scheduler, tracker = self.start()
        tracker.refuses_drafts = True
        batch = scheduler.verify_batch(4)
        batch.tree_cache = None
        assert tracker.step(batch) == fallback_reasons.SPECULATIVE
