"""The examples that need no server. `tests/e2e` and `tests/pinning` run the clients on real ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import packed_attention
from sgl_prefix_attn.settings import load_settings
from sgl_prefix_attn.sglang_plugin.pinning import metrics as pinning_metrics
from sgl_prefix_attn.sglang_plugin.telemetry.metrics import METRICS, PREFIX
from tests.support.pages import documented
from tests.test_docs import parse_launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("way", ["name", "wrap", "rollout"])
def test_launch_passes_arguments_that_sglang_and_the_package_accept(tmp_path: Path, way: str) -> None:
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nenv | grep ^PREFIXPACK_; echo "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(EXAMPLES / "launch.sh"), way, "a model", "--port", "30001"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *variables, launch = done.stdout.splitlines()
    settings = load_settings(dict(line.split("=", 1) for line in variables))
    assert bool(settings.wrap) == (way != "name")
    words = shlex.split(launch.replace("a model", "'a model'"))
    assert words[:2] == ["-m", "sglang.launch_server"]
    parse_launch(words[2:])


def test_packed_attention_equals_pytorchs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = documented("python examples/packed_attention.py", {"64": 8, "2048": 256, "128": 32})
    monkeypatch.setattr(sys, "argv", line.split()[1:])
    packed_attention.main()
    assert "KV positions read: 512, request by request 2,304" in capsys.readouterr().out


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """SGLang's own metrics are checked on the real server."""
    dashboard = json.loads((EXAMPLES / "grafana" / "prefixpack.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert PREFIX == "sglang:prefixpack_"
    asked = set(re.findall(r'"sglang\[:_\]prefixpack_(\w+)"', queries))
    labels = set(re.findall(r"by \((\w+)\)", queries))
    selectors = re.findall(r"{(__name__=[^}]*)}", queries)
    assert len(selectors) == queries.count("{") >= len(asked)
    assert all(text.endswith(', model_name=~"$model", instance=~"$server"') for text in selectors)
    assert {"model", "server"} <= {variable["name"] for variable in dashboard["templating"]["list"]}
    known = {metric.name: metric.label for metric in (*METRICS, *pinning_metrics._METRICS)}
    assert asked <= set(known)
    assert labels <= set(known.values())
    of_tests = {f"{name}_total" for name in ("arm_steps", "arm_step_seconds", "arm_tokens")}
    assert {metric.name for metric in METRICS if metric.kind == "counter"} - asked == of_tests
