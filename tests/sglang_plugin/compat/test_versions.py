"""Which SGLang versions the plug-in registers with, and what it says otherwise."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

from sgl_prefix_attn.sglang_plugin.compat import targets, versions
from sgl_prefix_attn.sglang_plugin.compat.cpu_fallbacks import CpuFallbacks
from sgl_prefix_attn.sglang_plugin.startup import entry, hook_table
from tests.support.pages import ROOT
from tests.support.server_facts import server_facts


@pytest.mark.parametrize("version", ["0.5.13", "0.5.12.post1", "0.5.14rc1", "0.5.99", "0.6.0", "unknown"])
def test_others_are_refused_with_the_way_out(version: str) -> None:
    with pytest.raises(versions.UnsupportedSglangError) as caught:
        versions.check_supported(version)
    message = str(caught.value)
    assert version in message
    assert f"{versions.OLDEST} to {versions.NEWEST}" in message
    assert "PREFIXPACK_ALLOW_UNTESTED_SGLANG=1" in message


def test_pages_and_package_files_name_the_supported_versions() -> None:
    """The places where CONTRIBUTING says that a new version is written."""
    for name in ("README.md", "docs/install.md", "Dockerfile"):
        found = re.findall(r"\b(0\.5\.\S+) to (0\.5\.[\w.]*\w)", (ROOT / name).read_text())
        assert set(found) == {(versions.OLDEST, versions.NEWEST)}, name
    (requirement,) = re.findall(r'"sglang(>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert set(SpecifierSet(requirement).filter(targets.SUPPORTED_VERSIONS)) == set(targets.SUPPORTED_VERSIONS)
    assert re.search(rf"^VERSIONS \?= .*\b{re.escape(versions.NEWEST)}$", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("version", ["0.5.13", "0.5.99", "unknown"])
def test_others_are_accepted_when_allowed(version: str) -> None:
    versions.check_supported(version, allow_untested=True)


@pytest.mark.parametrize(
    ("arguments", "dp", "ranks"),
    [
        ({}, 1, 1),
        ({"tp_size": 8, "dp_size": 2}, 1, 8),
        ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True, "attn_cp_size": 2}, 4, 1),
        ({"tp_size": 8, "attn_dp_size": 4, "enable_dp_attention": False}, 4, 2),  # 0.5.22 and later
    ],
)
def test_ranks_of_attention(arguments: dict[str, int], dp: int, ranks: int) -> None:
    facts = server_facts(**arguments)
    assert (facts.attention_dp_ranks, facts.attention_ranks) == (dp, ranks)


class TestCommittedLengths:
    """Where requests keep them: bounds of a verify step's lengths need one of the two places."""

    @pytest.fixture(autouse=True)
    def _cache(self) -> Iterator[None]:
        versions._committed_len.cache_clear()
        yield
        versions._committed_len.cache_clear()

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...] | None) -> None:
        from sglang.srt.managers import schedule_batch

        monkeypatch.delattr(schedule_batch, "ReqKvInfo", raising=False)
        if fields is not None:
            info = dataclasses.make_dataclass("ReqKvInfo", [(name, int, 0) for name in fields])
            monkeypatch.setattr(schedule_batch, "ReqKvInfo", info, raising=False)

    def test_on_the_request(self, monkeypatch: pytest.MonkeyPatch) -> None:  # 0.5.16 to 0.5.18
        self.install(monkeypatch, ("kv_allocated_len",))
        requests = [SimpleNamespace(kv_committed_len=length, kv=SimpleNamespace()) for length in (7, 9)]
        assert versions.keeps_committed_lens()
        assert versions.committed_lens(requests).tolist() == [7, 9]

    def test_beside_the_other_lengths(self, monkeypatch: pytest.MonkeyPatch) -> None:  # 0.5.19 and later
        self.install(monkeypatch, ("kv_committed_len", "kv_allocated_len"))
        requests = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=length)) for length in (7, 9)]
        assert versions.keeps_committed_lens()
        assert versions.committed_lens(requests).tolist() == [7, 9]

    def test_no_bound_before_0_5_16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, None)
        assert not versions.keeps_committed_lens()


class TestEntry:
    @pytest.fixture(autouse=True)
    def _registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt import server_args
        from sglang.srt.layers.attention import attention_registry

        known = [name for name in server_args.ATTENTION_BACKEND_CHOICES if name != entry.NAME]
        factories = {name: f for name, f in attention_registry.ATTENTION_BACKENDS.items() if name != entry.NAME}
        monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", known)
        monkeypatch.setattr(server_args, "add_attention_backend_choices", known.extend)
        monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", factories)
        self.choices, self.factories = known, factories

    def test_the_name_is_registered_once(self) -> None:
        entry.register()
        entry.register()
        assert self.choices.count("prefixpack") == 1
        assert "prefixpack" in self.factories

    @pytest.mark.parametrize("scheduler", [False, True])
    def test_a_variable_that_is_not_read_is_in_the_log_once_a_server(
        self, scheduler: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("PREFIX_PACK_WRAP", "1")
        monkeypatch.setattr(entry, "in_scheduler_process", lambda: scheduler)
        entry.register()
        said = "PREFIX_PACK_WRAP is not read; did you mean PREFIXPACK_WRAP?"
        assert (said in caplog.text) != scheduler

    @pytest.mark.parametrize("wrap", ["0", "1"])
    @pytest.mark.parametrize("why", ["0.5.99 is installed", "PREFIXPACK_STOCK_BACKND"])
    def test_an_unsupported_version_or_a_typo_in_the_settings_registers_nothing_and_says_so(
        self, why: str, wrap: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        monkeypatch.setenv("PREFIXPACK_WRAP", wrap)
        before, registered = dict(self.factories), list[str]()
        monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: registered.append(target))
        if why.startswith("PREFIXPACK"):
            monkeypatch.setenv(why, "triton")
        else:
            monkeypatch.setattr(versions, "installed_version", lambda: "0.5.99")
        entry.register()
        assert "prefixpack" not in self.choices
        assert (self.factories, registered) == (before, [])
        assert why in caplog.text

    @pytest.mark.parametrize("gpu", [False, True])
    @pytest.mark.parametrize("scheduler", [False, True])
    def test_hooks_come_with_a_backend_except_those_of_the_name_on_a_cpu(
        self, scheduler: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SGLang decides by the name before it builds a backend. `factory.connect` adds the others."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        registered: list[str] = []
        monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: registered.append(target))
        monkeypatch.setattr(entry, "in_scheduler_process", lambda: scheduler)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        entry.register()
        of_cpu = {hook.target.path for hook in hook_table.cpu_hooks(CpuFallbacks())}
        assert set(registered) == (of_cpu if scheduler and not gpu else set())


def test_a_process_that_does_not_use_us_loads_next_to_nothing_of_ours() -> None:
    program = """
import os
import sys
import sglang.srt.server_args
import torch
from sgl_prefix_attn.sglang_plugin.startup import entry
torch.cuda.is_available = lambda: True
for scheduler in (False, True):
    if os.fork() == 0:
        entry.in_scheduler_process = lambda: scheduler
        entry.register()
        print(*(name for name in sys.modules if name.startswith("sgl_prefix_attn.")), flush=True)
        os._exit(0)
    os.wait()
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXPACK_")}
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=300).stdout
    lines = output.splitlines()
    assert len(lines) == 2
    for loaded in map(str.split, lines):
        assert "sgl_prefix_attn.sglang_plugin.startup.entry" in loaded
        heavy = ("_native", "core", *(f"sglang_plugin.{part}" for part in ("backend", "dispatch", "execution")))
        assert not [name for name in loaded if name.removeprefix("sgl_prefix_attn.").startswith(heavy)]


def test_a_native_core_that_tells_no_paths_is_replaced_unless_the_user_chose_it(monkeypatch):
    from sglang.srt.environ import envs

    pytest.importorskip("sglang.srt.mem_cache.unified_cache", reason="SGLang before 0.5.17 has no choice of cores")
    from sglang.srt.mem_cache.unified_cache import unified_tree_core_interface

    monkeypatch.setattr(unified_tree_core_interface, "UnifiedTreeCoreInterface", type("Core", (), {}))
    monkeypatch.setattr(type(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND), "get", lambda self: "rust")
    environ: dict[str, str] = {}
    assert versions.ask_for_readable_tree_core(environ)
    assert environ == {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    environ = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"}
    assert not versions.ask_for_readable_tree_core(environ)
    assert environ == {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"}
