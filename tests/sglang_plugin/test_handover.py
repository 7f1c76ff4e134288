"""From batch to backend: what is handed over when, and that nothing that goes wrong in it reaches the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.sglang_plugin.compat import hooks, targets
from sgl_prefix_attn.sglang_plugin.prefix import handover
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING, Handover
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

STEP = StepPaths(PrefixForest.from_paths([[], []]), "decode", 2, 2)
BATCH = SimpleNamespace(req_pool_indices="rows", seq_lens_cpu="lengths")
TARGET = SimpleNamespace(is_draft_worker=False)
DRAFT = SimpleNamespace(is_draft_worker=True)


class Tracker:
    """Gives the same step for every batch, or raises."""

    def __init__(self, step: Any = STEP) -> None:
        self.result = step
        self.calls = 0

    def step(self, batch: Any) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture(autouse=True)
def _no_handover_left() -> Iterator[None]:
    yield
    handover.activate(None)


def started(kind: handover.Kind = "hooks", step: Any = STEP) -> tuple[Handover, Counters]:
    counters = Counters()
    active = Handover(kind, Tracker(step), counters)  # type: ignore[arg-type]
    handover.activate(active)
    return active, counters


class TestHooks:
    def test_paths_are_there_inside_the_forward_and_gone_after(self) -> None:
        active, _ = started()
        forward_batch = SimpleNamespace()
        handover.after_forward_batch_init(forward_batch, object, BATCH, TARGET)
        assert active.take() is NOTHING
        seen = []

        def forward(runner: Any, batch: Any, *, pp_proxy_tensors: Any = None) -> str:
            seen.append((active.take(), active.take(), pp_proxy_tensors))
            return "logits"

        assert handover.around_model_runner_forward(forward, TARGET, forward_batch, pp_proxy_tensors=1) == "logits"
        first, again, proxy = seen[0]
        assert first.step is STEP
        assert first.rows == "rows"
        assert again is first
        assert proxy == 1
        assert active.take() is NOTHING

    def test_a_forward_that_raises_leaves_nothing_behind(self) -> None:
        active, counters = started()
        forward_batch = SimpleNamespace()
        handover.after_forward_batch_init(forward_batch, object, BATCH, TARGET)

        def forward(runner: Any, batch: Any) -> None:
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            handover.around_model_runner_forward(forward, TARGET, forward_batch)
        assert active.take() is NOTHING
        assert not counters.fallbacks

    def test_a_batch_nobody_read_has_no_paths(self) -> None:
        active, _ = started()
        seen = []
        handover.around_model_runner_forward(
            lambda runner, batch: seen.append(active.take()), TARGET, SimpleNamespace()
        )
        assert seen == [NOTHING]
        assert NOTHING.step == fallback_reasons.NO_PATHS

    def test_a_forward_batch_given_by_name_is_found(self) -> None:
        active, _ = started()
        forward_batch = SimpleNamespace()
        handover.after_forward_batch_init(forward_batch, object, BATCH, TARGET)
        seen = []
        handover.around_model_runner_forward(
            lambda runner, *, forward_batch: seen.append(active.take().step), TARGET, forward_batch=forward_batch
        )
        assert seen == [STEP]

    def test_draft_models_are_left_alone(self) -> None:
        active, _ = started()
        forward_batch = SimpleNamespace()
        handover.after_forward_batch_init(forward_batch, object, BATCH, DRAFT)
        assert vars(forward_batch) == {}
        assert active.take() is NOTHING

    def test_without_a_prefixpack_backend_the_hooks_do_nothing(self) -> None:
        forward_batch = SimpleNamespace()
        handover.after_forward_batch_init(forward_batch, object, BATCH, TARGET)
        assert vars(forward_batch) == {}
        assert handover.around_model_runner_forward(lambda runner, batch: 5, TARGET, forward_batch) == 5

    def test_an_exception_is_counted_logged_once_and_the_step_falls_back(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        active, counters = started(step=AttributeError("no such field"))
        seen = []
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                forward_batch = SimpleNamespace()
                handover.after_forward_batch_init(forward_batch, object, BATCH, TARGET)
                handover.around_model_runner_forward(
                    lambda runner, batch: seen.append(active.take().step), TARGET, forward_batch
                )
        assert seen == [fallback_reasons.HOOK_FAILED] * 3
        assert counters.fallbacks[fallback_reasons.HOOK_FAILED] == 3
        assert caplog.text.count("Traceback") == 1
        assert "no such field" in caplog.text

    def test_host_time_is_counted(self) -> None:
        _, counters = started()
        handover.after_forward_batch_init(SimpleNamespace(), object, BATCH, TARGET)
        assert 0 < counters.host_seconds < 1


class TestNativeSeam:
    def test_what_was_announced_is_for_one_forward_only(self) -> None:
        active, _ = started("patch")
        active.prepare(BATCH)
        assert active.take().step is STEP
        assert active.take() is NOTHING

    def test_the_latest_announcement_counts(self) -> None:
        active, _ = started("patch")
        active.prepare(BATCH)
        active.prepare(SimpleNamespace(req_pool_indices="other rows", seq_lens_cpu="lengths"))
        assert active.take().rows == "other rows"

    def test_an_exception_does_not_reach_the_server(self) -> None:
        active, counters = started("patch", ValueError("contradiction"))
        active.prepare(BATCH)
        assert active.take().step == fallback_reasons.HOOK_FAILED
        assert counters.fallbacks[fallback_reasons.HOOK_FAILED] == 1


class TestVerification:
    """Against SGLang's own HookRegistry, with a target of our own."""

    @pytest.fixture
    def hook(self, monkeypatch: pytest.MonkeyPatch) -> hooks.Hook:
        from sglang.srt.managers import overlap_utils  # any module of SGLang: the target below is ours
        from sglang.srt.plugins.hook_registry import HookRegistry

        class Runner:
            def forward(self, value: int) -> int:
                return value

            @classmethod
            def init_new(cls, value: int) -> int:
                return value

        monkeypatch.setattr(overlap_utils, "PrefixPackTestRunner", Runner, raising=False)
        monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
        monkeypatch.setattr(HookRegistry, "_patched", set())
        return self.hook_on("PrefixPackTestRunner.forward")

    @staticmethod
    def hook_on(name: str) -> hooks.Hook:
        target = targets.Target(f"managers.overlap_utils.{name}", targets.Use.HOOK)

        def plus_one(result: int, *args: Any) -> int:
            return result + 1

        return hooks.Hook(target, plus_one, "AFTER", "nothing works")

    def test_a_missing_hook_is_applied_late(self, hook: hooks.Hook) -> None:
        from sglang.srt.managers import overlap_utils

        assert not hooks.is_applied(hook)
        assert hooks.ensure_applied((hook,)) == []
        assert hooks.is_applied(hook)
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 2
        assert hooks.ensure_applied((hook,)) == []
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 2

    def test_a_classmethod_is_seen_through(self, hook: hooks.Hook) -> None:
        on_class = self.hook_on("PrefixPackTestRunner.init_new")
        assert hooks.ensure_applied((on_class,)) == []
        assert hooks.is_applied(on_class)

    def test_a_hook_below_another_plugins_hook_is_seen(self, hook: hooks.Hook) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks.register((hook,))
        HookRegistry.register(hook.target.path, lambda original, *args: original(*args), HookType.AROUND)
        HookRegistry.apply_hooks()
        assert hooks.is_applied(hook)

    def test_a_target_that_sglang_lost_is_reported(self, hook: hooks.Hook) -> None:
        lost = self.hook_on("PrefixPackTestRunner.gone")
        assert hooks.ensure_applied((lost,)) == [lost]

    def test_a_target_already_taken_by_another_plugin_is_reported(self, hook: hooks.Hook) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(hook.target.path, lambda original, *args: original(*args), HookType.AROUND)
        HookRegistry.apply_hooks()
        assert hooks.ensure_applied((hook,)) == [hook]
