"""Benchmarks that need no GPU: the pages' own commands run, with small sizes added. The list of GPU jobs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.on_gpu import JOBS
from tests.test_docs import INLINE, ROOT, shell_commands

FAST = {
    "benchmarks/kernel/plan_time.py --out": "--repeats 1 --steps 2",
    "benchmarks/kernel/plan_time.py --drawn": "--cases 2",
    "benchmarks/kernel/cpu_packed.py": "--trees 2 --heads 32/8 --dtypes float32 --seconds 0.01 --max-kv-gib 0.1",
    "-m benchmarks.serving.abtest_simulated": "--tests 1 --pairs 20",
    "-m benchmarks.prefix.deep_paths": "--repeats 1 --limit 0.001",
    "-m benchmarks.offline.tree_time": "--prompts 200 --tokens 40",
    "-m benchmarks.kernel.partial_precision": "--cases 'pat/01*' --queries 1",
    "-m benchmarks.kernel.wide_balance": "",
}
SLOW = {  # they import SGLang or start servers
    "-m benchmarks.kernel.borrowed_heads": "",
    "-m benchmarks.kernel.probes --emulate": "",
    "benchmarks/serving/host_cost.py": "--requests 8 --steps 8 --changes 1",
    "-m benchmarks.serving.host_cost_pair": "--requests 16 --rounds 1",
    "-m benchmarks.serving.refused --out": "--only mla --steps 4 --builds 2 --starts 1",
    "benchmarks/serving/refused_cost.py": "--rounds 3",
    "-m benchmarks.serving.rollout --backends prefixpack --": "--output-tokens 16 --samples 4 --running 8 --window 2",
    "-m benchmarks.serving.rollout_start": "--groups 2 --samples 2 --prompt-tokens 64 --times 1",
    "benchmarks/cache/retention_cost.py": "--branches 500 --rounds 1",
    "-m benchmarks.cache.retention_server": "--branches 50 --rounds 1 --repeats 1",
    "-m benchmarks.cache TRACE.jsonl": "--requests 20 --pools 200 --lookahead 16",
    "-m benchmarks.offline.cache_saving": "--requests 32 --settings '2000/200 x2'",
    "-m benchmarks.offline.throughput --out": "--settings 60/10x4 --requests 8 --output-tokens 4 --repeats 1",
    "-m benchmarks.offline.group_scheduling_cost": "--repeats 1",
}
ELSEWHERE = ("make test-slow", "make bench", "python -m sgl_prefix_attn demo")
SIZES = [*FAST.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())]


@pytest.mark.parametrize(("begin", "sizes"), SIZES)
def test_the_command_of_a_page_runs(begin: str, sizes: str, tmp_path: Path) -> None:
    found = {case.values[0] for case in shell_commands() if case.values[0].startswith(f"python {begin}")}
    command = max(found, key=len).replace("OTHER_CHECKOUT", ".").replace("FILE", str(tmp_path / "out.json"))
    command = command.replace("TRACE.jsonl", "sgl_prefix_attn/demo/data/mooncake_conversation_slice.jsonl")
    for more in ("", " --resume") if "serving.rollout" in begin else ("",):
        words = [sys.executable, *shlex.split(f"{command} {sizes}{more}")[1:]]
        subprocess.run(words, cwd=ROOT, check=True)
    assert "--out" not in command or json.loads((tmp_path / "out.json").read_text())


def test_every_benchmark_without_a_gpu_is_run() -> None:
    section = (ROOT / "docs" / "measuring.md").read_text().partition("## Without a GPU")[2].partition("\n## ")[0]
    begins = (*(f"python {begin}" for begin in FAST | SLOW), *ELSEWHERE)
    assert [command for command in INLINE.findall(section) if not command.startswith(begins)] == []


def test_gpu_jobs_name_modules_and_files_that_exist() -> None:
    for job in JOBS:
        arguments = job.arguments(Path("out"), Path("a model"))
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]), job.name
        assert all(Path(word).exists() for word in arguments if word.startswith("tests/")), job.name
        assert job.needs_model == ("a model" in arguments)
