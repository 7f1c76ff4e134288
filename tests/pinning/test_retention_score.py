"""Retention scores: known uses by how soon they come, unknown ones by what prefixes like it did."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable

import pytest

from sgl_prefix_attn.pinning import Lookahead, RetentionScores, ReuseMemory, prefix_keys


def test_keys_stand_for_everything_up_to_their_block() -> None:
    keys = prefix_keys(range(10), 4)
    assert len(keys) == 2
    assert prefix_keys(range(9), 4) == keys
    other = prefix_keys([9, *range(1, 10)], 4)
    assert set(other).isdisjoint(keys)
    assert set(prefix_keys(range(10), 4, "lora")).isdisjoint(keys)


def test_keys_are_the_same_in_every_process() -> None:
    code = "from sgl_prefix_attn.pinning import prefix_keys; print(prefix_keys(range(64), 16, 'x'))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_nothing_is_refused_as_a_size() -> None:
    with pytest.raises(ValueError, match="block is 0"):
        prefix_keys([1], 0)
    with pytest.raises(ValueError, match="uses is 0"):
        RetentionScores().announce([1], uses=0)
    with pytest.raises(ValueError, match="max_keys is 0"):
        RetentionScores(max_keys=0)


class TestLookahead:
    def test_only_requests_within_the_limit_are_looked_at(self) -> None:
        queue = Lookahead(limit=2)
        for name in range(4):
            queue.add(name, [name])
        assert [queue.next_use(key) for key in range(4)] == [1, 2, None, None]
        queue.remove(2)  # beyond the limit: never looked at
        queue.remove(0)
        assert [queue.next_use(key) for key in range(4)] == [None, 1, None, 2]

    def test_it_follows_a_queue_whose_order_changes(self) -> None:
        queue = Lookahead(limit=3)
        keys = {"a": [1], "b": [2], "c": [3], "d": [4], "e": [1]}
        queue.follow(["a", "b", "c", "d"], keys.__getitem__)
        assert queue.requests() == ["a", "b", "c"]
        queue.follow(["b", "c", "d", "e"], keys.__getitem__)
        assert [queue.next_use(key) for key in (1, 2, 3, 4)] == [None, 1, 2, 3]
        queue.follow(["e", "d", "b"], keys.__getitem__)
        assert [queue.next_use(key) for key in (1, 2, 3, 4)] == [1, 3, None, 2]

    def test_a_new_order_asks_for_the_keys_of_new_requests_alone(self) -> None:
        queue = Lookahead(limit=4)
        asked: list[Hashable] = []
        changed: list[int] = []
        queue.on_change = changed.append

        def keys_of(request: Hashable) -> list[int]:
            asked.append(request)
            return [ord(str(request))]

        for order in ("abcd", "abdc", "adbc", "axbd", "yaxb", "by"):
            changed.clear()
            queue.follow(order, keys_of)
            assert queue.requests() == list(order)
            assert [queue.next_use(ord(name)) for name in order] == list(range(1, len(order) + 1))
            assert (ord("a") in changed) == (order in ("abcd", "yaxb", "by"))  # what keeps its place is not touched
        assert asked == list("abcdxy")

    def test_a_request_joins_once(self) -> None:
        queue = Lookahead()
        queue.add("a", [1])
        with pytest.raises(ValueError, match="in the queue already"):
            queue.add("a", [1])


def score_in(memory: ReuseMemory, key: int) -> float:
    """What the memory says of a prefix that it knows."""
    placement = memory.placement(key)
    return memory.score(*placement)


class TestReuseMemory:
    def test_prefixes_that_come_back_score_higher_than_those_that_never_do(self) -> None:
        memory = ReuseMemory()
        for step in range(2000):
            memory.record([step % 10, 1000 + step])  # ten that return every ten requests, one that never does
        returning, once = score_in(memory, 5), score_in(memory, 1000 + 1995)
        assert returning > 10 * once

    def test_the_score_falls_when_the_usual_time_of_reuse_has_passed(self) -> None:
        memory = ReuseMemory()
        for step in range(4000):  # half of all prefixes are used again after 40 requests
            memory.record([step, step - 40] if step % 2 else [step])
        keys = [key for key in range(3960, 4000) if key % 2 == 0]
        at_twenty, at_forty = score_in(memory, keys[-10]), score_in(memory, min(keys))
        memory.record([])
        for _ in range(30):
            memory.record([])
        assert at_forty > at_twenty > score_in(memory, min(keys))

    def test_it_remembers_no_more_than_it_may(self) -> None:
        memory = ReuseMemory(max_keys=50, horizon=64)
        for step in range(500):
            memory.record(range(step, step + 5))
        assert len(memory) == 50
        assert memory.uses(10) == 0
        assert memory.uses(499) == 5

    def test_a_key_twice_in_one_request_is_one_use(self) -> None:
        memory = ReuseMemory()
        memory.record([1, 1, 1])
        assert memory.uses(1) == 1


class TestRetentionScores:
    def test_the_nearer_use_scores_higher_and_any_known_use_higher_than_a_guess(self) -> None:
        memory, queue = ReuseMemory(), Lookahead(8)
        scores = RetentionScores(memory, queue)
        for step in range(2000):
            scores.scheduled(step, [step % 10])
        for name, key in enumerate([100, 101, 100, 102]):
            queue.add(name, [key])
        assert scores.of(100) > scores.of(101) > scores.of(102) > scores.of(3) > 0

    def test_a_group_scores_its_remaining_members_and_less_than_the_unknown_after_the_last(self) -> None:
        scores = RetentionScores(ReuseMemory())
        scores.announce([7, 8], uses=2)
        assert scores.of(7) == 2.0
        assert scores.scheduled("a", [7, 8], {7, 8}) == []
        assert scores.of(8) == 1.0
        assert scores.scheduled("b", [7, 8], {7, 8}) == [7, 8]
        assert scores.of(7) < scores.of(12345)

    def test_what_others_have_used_is_never_lowered(self) -> None:
        scores = RetentionScores(ReuseMemory())
        scores.scheduled("other", [7])
        scores.announce([7, 8, 9], uses=1)  # 7 was used before, 8 is used meanwhile
        assert scores.scheduled("other", [8]) == []
        assert scores.scheduled("member", [7, 8, 9], {7, 8, 9}) == [7, 8, 9]
        assert [scores.is_finished(key) for key in (7, 8, 9)] == [False, False, True]

    def test_uses_of_others_do_not_count_for_a_job(self) -> None:
        scores = RetentionScores(ReuseMemory())
        scores.announce([7], uses=2)
        scores.scheduled("other", [7])
        assert scores.of(7) == 2.0
        scores.clear()
        assert scores.of(7) == 0.0

    def test_groups_that_end_early_are_forgotten(self) -> None:
        """Their last use never comes, so nothing else would take them out."""
        scores = RetentionScores(max_announced=3)
        for key in range(5):
            scores.announce([key], uses=2)
            scores.announce([0], uses=1)
        assert [scores.of(key) for key in range(5)] == [7.0, 0.0, 0.0, 2.0, 2.0]

    def test_what_is_spent_is_forgotten_longest_ago_first(self) -> None:
        scores = RetentionScores(ReuseMemory(), max_keys=3)
        for key in range(5):
            scores.announce([key], uses=1)
            assert scores.scheduled(key, [key], {key}) == [key]
        assert [scores.of(key) < 0 for key in range(5)] == [False, False, True, True, True]
