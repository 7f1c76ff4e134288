"""The tracker against SGLang's real radix trees: what it shares, and what it reads, in known situations."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.tree_mirror import TreeMirror
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.prefix.sharing import check
from tests.support.small_scheduler import TREES, SmallScheduler


@pytest.mark.parametrize("kind", TREES)
class TestKnownSituations:
    def start(self, kind: str, *prompts: list[int]) -> tuple[SmallScheduler, BatchTracker]:
        scheduler = SmallScheduler(kind)
        for prompt in prompts:
            self.join(scheduler, prompt)
        return scheduler, BatchTracker()

    def join(self, scheduler: SmallScheduler, prompt: list[int]) -> None:
        request = scheduler.request(prompt)
        scheduler.match(request)
        scheduler.prefill_done(request)
        scheduler.running.append(request)

    def test_steady_decode_returns_the_same_object(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        scheduler.decode()
        first = check(scheduler, tracker, scheduler.decode_batch())
        assert first.forest.paths() == [[(0, 0, 50)], [(0, 0, 50)]]
        for _ in range(5):
            scheduler.decode()
            assert tracker.step(scheduler.decode_batch()) is first

    def test_a_prefill_between_does_not_forget_the_decode_batch(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        scheduler.decode()
        first = tracker.step(scheduler.decode_batch())
        late = scheduler.request([1] * 30 + [4])
        scheduler.match(late)
        check(scheduler, tracker, scheduler.extend_batch([late]))
        scheduler.decode()
        assert tracker.step(scheduler.decode_batch()) is first

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

    def test_a_request_that_splits_a_running_node_shares_its_upper_part(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
        self.join(scheduler, [1] * 20 + [5])
        scheduler.decode()
        step = check(scheduler, tracker, scheduler.decode_batch())
        assert step.forest.paths() == [[(0, 0, 20), (1, 20, 50)], [(0, 0, 20), (1, 20, 50)], [(0, 0, 20)]]

    def test_splits_of_splits_are_found_through_a_request_that_sees_only_the_top(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 60, [1] * 60)
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
        for cut in (40, 20):  # these split the node twice, and are gone before the tracker looks
            passer = scheduler.request([1] * cut + [9])
            scheduler.match(passer)
            scheduler.prefill_done(passer)
            scheduler.finish(passer, insert=False)
        self.join(scheduler, [1] * 20 + [8])
        scheduler.decode()
        step = check(scheduler, tracker, scheduler.decode_batch())
        assert [path[0] for path in step.forest.paths()] == [(0, 0, 20)] * 3

    def test_first_decode_after_a_joint_prefill_shares_only_what_was_cached(self, kind: str) -> None:
        scheduler, tracker = self.start(kind)
        twins = [scheduler.request([1] * 40 + [i]) for i in (2, 3)]
        for twin in twins:
            scheduler.match(twin)
        scheduler.running += twins
        scheduler.decode()
        assert check(scheduler, tracker, scheduler.decode_batch()).forest.num_nodes == 0
        for twin in twins:
            scheduler.prefill_done(twin)
        scheduler.decode()
        assert check(scheduler, tracker, scheduler.decode_batch()).forest.paths()[0] == [(0, 0, 40)]

    def test_a_finished_request_stops_standing_for_others_at_once(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 30 + [i] for i in (2, 3, 4)))
        scheduler.decode()
        first = check(scheduler, tracker, scheduler.decode_batch())
        scheduler.finish(scheduler.running[first.forest.node_request[0]])
        step = check(scheduler, tracker, scheduler.decode_batch())
        assert step.forest.paths() == [[], [(0, 0, 30)], [(0, 0, 30)]]
        assert step.forest.node_request.tolist() == [1]

    def test_a_finished_request_that_stays_in_the_batch_shares_nothing_some_steps_later(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 30 + [i] for i in (2, 3, 4)))
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
        scheduler.finish(scheduler.running[2])
        for _ in range(32):
            step = check(scheduler, tracker, scheduler.decode_batch())
        assert step.forest.paths() == [[(0, 0, 30)], [(0, 0, 30)], []]

    def test_a_node_that_moves_under_an_old_member_is_seen_some_steps_later(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 30 + [2, 3], [1] * 30 + [2, 3])
        scheduler.decode()
        for _ in range(20):
            check(scheduler, tracker, scheduler.decode_batch())
        scheduler.running[1].last_node = None
        for _ in range(32):
            step = tracker.step(scheduler.decode_batch())
        assert isinstance(step, StepPaths)
        assert step.forest.num_nodes == 0

    def test_requests_that_come_and_go_every_step_hide_no_node_that_moves(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, *([1] * 30 + [2, i] for i in range(40)))
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
        scheduler.running[20].last_node = None
        for count in range(32):
            scheduler.finish(scheduler.running[-1])
            scheduler.filter()
            self.join(scheduler, [1] * 30 + [3, count])
            scheduler.decode()
            step = tracker.step(scheduler.decode_batch())
        assert isinstance(step, StepPaths)
        assert step.forest.tail_node[20] == -1
        assert (np.delete(step.forest.tail_node, 20) >= 0).all()

    def test_only_requests_that_joined_or_whose_turn_it_is_are_looked_up(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked_up: list[int] = []
        look_up = TreeMirror._look_up

        def counting(mirror: TreeMirror, handles: list[Any]) -> list[int]:
            looked_up.append(len(handles))
            return look_up(mirror, handles)

        monkeypatch.setattr(TreeMirror, "_look_up", counting)
        scheduler, tracker = self.start(kind, *([1] * 30 + [i] for i in range(2, 66)))
        for _ in range(8):
            scheduler.decode()
            check(scheduler, tracker, scheduler.decode_batch())
        self.join(scheduler, [1] * 30 + [70])
        for _ in range(8):
            scheduler.decode()
            check(scheduler, tracker, scheduler.decode_batch())
        assert looked_up == [64, 1 + 65 // 32 + 1]

    def test_a_chunk_reads_its_cached_part_and_the_decode_rows_come_last(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 30 + [2], [1] * 30 + [3])
        chunked = scheduler.request([1] * 30 + [4] * 30)
        scheduler.match(chunked, upto=40)
        scheduler.decode()
        step = check(scheduler, tracker, scheduler.extend_batch([chunked], scheduler.running))
        assert (step.mode, step.num_decode) == ("mixed", 2)
        assert step.query_lens is not None
        assert step.query_lens.tolist() == [10, 1, 1]
        assert step.forest.paths() == [[(0, 0, 30)]] * 3

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
    def test_kinds_of_steps_that_never_run_packed_are_not_read(
        self, kind: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler, tracker = self.start(kind, [1] * 50 + [2], [1] * 50 + [3])
        tracker.never_packed = lambda mode: None if mode == "decode" else fallback_reasons.COMPUTE_BOUND
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
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
            scheduler.decode()
            check(scheduler, tracker, scheduler.decode_batch())
        for request in late:
            scheduler.prefill_done(request)
        scheduler.decode()
        step = check(scheduler, tracker, scheduler.decode_batch())
        assert [path[0] for path in step.forest.paths()] == [(0, 0, 30)] * 4
        tracker.never_packed = lambda mode: fallback_reasons.NO_MEMORY
        scheduler.running.pop()
        assert tracker.step(scheduler.decode_batch()) == fallback_reasons.NO_MEMORY

    def test_other_namespaces_do_not_share(self, kind: str) -> None:
        scheduler, tracker = self.start(kind)
        for key in (None, "adapter"):
            request = scheduler.request([1] * 30, extra_key=key)
            scheduler.match(request)
            scheduler.prefill_done(request)
            scheduler.running.append(request)
        scheduler.decode()
        assert check(scheduler, tracker, scheduler.decode_batch()).forest.num_nodes == 0

    def test_a_flushed_tree_starts_afresh(self, kind: str) -> None:
        scheduler, tracker = self.start(kind, [1] * 30, [1] * 30)
        scheduler.decode()
        check(scheduler, tracker, scheduler.decode_batch())
        for request in list(scheduler.running):
            scheduler.finish(request)
        scheduler.filter()
        scheduler.flush()
        for prompt in ([1] * 30, [1] * 10 + [2] * 5):
            self.join(scheduler, prompt)
        scheduler.decode()
        assert check(scheduler, tracker, scheduler.decode_batch()).forest.paths()[1] == [(0, 0, 10)]

    def test_another_tree_object_starts_afresh(self, kind: str) -> None:
        first, tracker = self.start(kind, [1] * 30, [1] * 30)
        first.decode()
        check(first, tracker, first.decode_batch())
        second, _ = self.start(kind, [2] * 30, [3] * 30)
        second.decode()
        assert check(second, tracker, second.decode_batch()).forest.num_nodes == 0


def test_lengths_of_a_decode_step_are_positions_before_the_new_token() -> None:
    scheduler = SmallScheduler("objects")
    prompt = [1] * 9
    for _ in range(2):
        request = scheduler.request(prompt)
        scheduler.match(request)
        scheduler.prefill_done(request)
        scheduler.running.append(request)
    scheduler.decode()
    step = BatchTracker().step(scheduler.decode_batch())
    assert isinstance(step, StepPaths)
    # Nine prompt tokens are cached for both; the tenth position is the step's own token.
    assert step.forest.tail_begin.tolist() == [9, 9]
    assert np.all(scheduler.decode_batch().seq_lens_cpu.numpy() == 10)


class TestSpeculation:
    """Batches of a server with speculative decoding."""

    def start(self) -> tuple[SmallScheduler, BatchTracker]:
        scheduler = SmallScheduler("objects")
        for last in (2, 3):
            request = scheduler.request([1] * 50 + [last])
            scheduler.match(request)
            scheduler.prefill_done(request)
            scheduler.running.append(request)
        scheduler.decode()
        return scheduler, BatchTracker()

    def test_steady_drafts_return_the_same_object(self) -> None:
        scheduler, tracker = self.start()
        first = check(scheduler, tracker, scheduler.verify_batch(4))
        assert (first.mode, first.num_decode) == ("verify", 2)
        assert first.query_lens is not None
        assert first.query_lens.tolist() == [4, 4]
        for _ in range(5):
            for _ in range(3):
                scheduler.decode()
            assert tracker.step(scheduler.verify_batch(4)) is first

    def test_another_number_of_drafts_is_another_step(self) -> None:
        scheduler, tracker = self.start()
        first = check(scheduler, tracker, scheduler.verify_batch(4))
        second = check(scheduler, tracker, scheduler.verify_batch(2))
        assert second is not first
        assert second.query_lens is not None
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
