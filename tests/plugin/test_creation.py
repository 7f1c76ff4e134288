"""The factory behind the name `prefixpack`: what it refuses, wraps and hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import creation, runtime, versions
from sgl_prefix_attn.sglang_plugin.creation import create_backend
from sgl_prefix_attn.sglang_plugin.executor import cpu_device
from tests.plugin.attention_world import World


@pytest.fixture(autouse=True)
def _one_runtime_per_test() -> Iterator[None]:
    yield
    runtime.stop()


class TestFactory:
    @pytest.fixture(autouse=True)
    def _no_hooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(creation.hooks, "ensure_applied", lambda wanted: [])
        monkeypatch.setattr(creation.cpu_traps, "note_cpu_backend", lambda: None)

    def runner(self, **options: Any) -> Any:
        return World([[]], [9], **options).runner

    def test_an_mla_model_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"'prefixpack' does not support .*\(MLA\)"):
            create_backend(self.runner(use_mla_backend=True), Settings())

    def test_on_a_cpu_torch_native_is_wrapped(self) -> None:
        runner = self.runner()
        runtime.stop()
        backend = create_backend(runner, Settings(metrics=False))
        assert type(backend.inner).__name__ == "TorchNativeAttnBackend"

    @pytest.mark.parametrize("name", ["flashinfer", "fa3", "triton"])
    def test_a_gpu_backend_on_a_cpu_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"inner_backend='{name}' needs a GPU"):
            create_backend(self.runner(), Settings(inner_backend=name))

    def test_the_patch_is_asked_for_but_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(versions, "has_native_seam", lambda: False)
        with pytest.raises(ValueError, match=r"handover='patch', but the installed SGLang .* does not carry the patch"):
            create_backend(self.runner(), Settings(handover="patch"))

    @pytest.mark.parametrize(
        ("setting", "patched", "kind"),
        [
            ("auto", False, "hooks"),
            ("auto", True, "patch"),
            ("hooks", True, "hooks"),
            ("hooks", False, "hooks"),
            ("patch", True, "patch"),
        ],
    )
    def test_how_paths_are_handed_over(
        self, setting: Any, patched: bool, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(versions, "has_native_seam", lambda: patched)
        assert creation.handover_kind(Settings(handover=setting), "0.5.20") == kind

    def test_a_hook_that_could_not_be_applied_is_named_with_the_version(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        lost = creation.hooks.HANDOVER_HOOKS[1]
        monkeypatch.setattr(creation.hooks, "ensure_applied", lambda wanted: [lost])
        runner = self.runner()
        runtime.stop()
        with caplog.at_level(logging.ERROR):
            create_backend(runner, Settings(metrics=False))
        assert "could not hook sglang.srt.model_executor.model_runner.ModelRunner.forward" in caplog.text
        assert f"SGLang {versions.installed_version()}" in caplog.text
        assert "no step runs packed" in caplog.text

    @pytest.mark.parametrize(("route", "hooked"), [("auto", True), ("packed", False), ("inner", False)])
    def test_decode_graphs_are_hooked_where_steps_may_go_either_way(
        self, route: Any, hooked: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(creation.hooks, "ensure_applied", lambda wanted: asked.extend(wanted) or [])
        monkeypatch.setattr(creation, "build_inner", lambda runner, name: SimpleNamespace())
        runner = self.runner(is_draft_worker=True)  # a GPU runner that needs no kernels
        runner.device = "cuda"
        runtime.stop()
        create_backend(runner, Settings(metrics=False, inner_backend="fa3", route=route))
        assert (set(creation.hooks.GRAPH_HOOKS) <= set(asked)) == hooked

    def test_a_profile_that_is_none_is_refused_by_name(self) -> None:
        runner = self.runner()
        runtime.stop()
        with pytest.raises(ValueError, match=r"nowhere\.json: cannot read the profile"):
            create_backend(runner, Settings(metrics=False, route_profile="nowhere.json"))

    @pytest.mark.parametrize(
        ("chosen", "inner"),
        [
            ("fa3", "fa3"),
            ("flashinfer", "flashinfer"),
            ("triton", "triton"),
            ("trtllm_mha", "triton"),
            (None, "triton"),
        ],
    )
    def test_on_cuda_the_inner_backend_is_sglangs_own_choice_where_it_can_be_wrapped(
        self, chosen: str | None, inner: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(versions, "default_attention_backend", lambda runner: chosen)
        assert creation.inner_name(SimpleNamespace(device="cuda"), "auto") == inner

    def test_settings_shape_the_planners_device(self) -> None:
        device = cpu_device(Settings(cpu_threads=3, max_tile_rows=16))
        assert device.workers == 3
        assert max(device.tile_rows) == 16
        assert cpu_device(Settings(cpu_threads=3, workers=7)).workers == 7
