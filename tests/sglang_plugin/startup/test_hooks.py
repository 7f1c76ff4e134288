"""Whether hooks on SGLang are applied, against its own HookRegistry and a target of ours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers import overlap_utils  # any module of SGLang: the target below is ours
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_prefix_attn.sglang_plugin.compat import hooks, targets


class TestVerification:
    @pytest.fixture
    def hook(self, monkeypatch: pytest.MonkeyPatch) -> hooks.Hook:
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
        assert not hooks.is_applied(hook)
        assert hooks.ensure_applied((hook,)) == []
        assert hooks.is_applied(hook)
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 2
        assert hooks.ensure_applied((hook,)) == []
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 2

    def test_a_target_that_another_plugin_had_before_gets_ours_too(self, hook: hooks.Hook) -> None:
        HookRegistry.register(hook.target.path, lambda result, *args: 10 * result, HookType.AFTER)
        HookRegistry.apply_hooks()
        assert hooks.ensure_applied((hook,)) == []
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 11
        assert hooks.ensure_applied((hook,)) == []
        assert overlap_utils.PrefixPackTestRunner().forward(1) == 11

    def test_a_classmethod_is_seen_through_and_a_lost_target_reported(self, hook: hooks.Hook) -> None:
        on_class = self.hook_on("PrefixPackTestRunner.init_new")
        assert hooks.ensure_applied((on_class,)) == []
        assert hooks.is_applied(on_class)
        lost = self.hook_on("PrefixPackTestRunner.gone")
        assert hooks.ensure_applied((lost,)) == [lost]
