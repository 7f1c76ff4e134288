"""The pages' own benchmark commands run, with small sizes added: on a CPU, and as they stand on a GPU."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.support.pages import INLINE, ROOT, documented, run

RESULTS = ROOT / "benchmarks" / "results"

FAST = {
    "benchmarks/kernel/plan_time.py --out": "--repeats 1 --steps 2",
    "benchmarks/kernel/plan_time.py --drawn": "--cases 2",
    "-m benchmarks.on_gpu": "--list",
}
_ROLLOUT = (
    "--prompt-tokens 128 --output-tokens 40 --groups 240 --samples 4 --running 8 --window 2 --context-length 1024"
)
_ROLLOUTS = "-m benchmarks.serving.rollout --model MODEL --load-format dummy --backends prefixpack,fa3,flashinfer"
_SIDE_BY_SIDE = "-m benchmarks.serving --model MODEL --load-format dummy --backends fa3,prefixpack,flashinfer"
SLOW = {  # they import SGLang or start servers
    "benchmarks/serving/host_cost.py": "--requests 8 --steps 8 --changes 1",
    "-m benchmarks.serving.rollout --backends prefixpack --": "--output-tokens 16 --samples 4 --running 8 --window 2",
    "-m benchmarks.cache TRACE.jsonl": "--requests 20 --pools 200 --lookahead 16",
    "-m benchmarks.offline.cache_saving": "--requests 32 --settings '2000/200 x2'",
    "-m benchmarks.offline.throughput --out": "--settings 60/10x4 --requests 8 --output-tokens 4 --repeats 1",
    "-m sgl_prefix_attn demo": "--requests 20 --samples 4",
    "-m benchmarks.serving.random_model": "",
}
_ARGS = "--disable-prefill-cuda-graph --cuda-graph-max-bs-decode 16 --dtype bfloat16 --mem-fraction-static 0.5"
_SMALL_POOL = f"--server-args '{_ARGS} --max-total-tokens 60000'"
GPU = {
    "-m benchmarks.on_gpu": "--minutes 5 --only verify_4 --out FOLDER",
    "-m benchmarks.serving.random_model": "",
    _ROLLOUTS: f"{_ROLLOUT} {_SMALL_POOL}",
    _SIDE_BY_SIDE: "--times 2 --workload rl:1 no-sharing:2 --prompt-tokens 256 --output-tokens 16 " + _SMALL_POOL,
    "-m benchmarks.offline.throughput --device cuda --model MODEL --settings": "--settings 60/10x4 --requests 8 "
    f"--output-tokens 4 --repeats 1 --server-args '{_ARGS}'",
}
LISTED = {  # `--list` draws the same cases and needs no GPU
    "-m benchmarks.kernel.gpu_drawn --set acceptance": "--cases 4",
    "-m benchmarks.kernel.gpu_drawn --set dev": "--cases 4",
    "-m benchmarks.kernel.gpu_attention --out": "--quick",
    "-m benchmarks.kernel.gpu_attention --baselines": "--quick",
    "-m benchmarks.kernel.gpu_attention --kv-dtype": "--quick",
    "-m benchmarks.kernel.mixed_steps --verify 4 --head-dim": "--cases 4",
    "-m benchmarks.kernel.mixed_steps --cases 120": "--cases 4",
    "-m benchmarks.kernel.mixed_steps --wide": "--cases 4",
    "-m benchmarks.kernel.mixed_steps --cases 60": "--cases 4",
}
ELSEWHERE = ("make test-slow", "make bench")
_MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZES = [
    *FAST.items(),
    *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items()),
    *(pytest.param(*item, marks=_MARKS, id=f"{item[0]}-on a GPU") for item in (GPU | LISTED).items()),
]


@pytest.mark.parametrize(("begin", "sizes"), SIZES)
def test_the_command_of_a_page_runs(begin: str, sizes: str, tmp_path: Path) -> None:
    command = documented(f"python {begin}", more=sizes)
    written, out = "FILE" in command, tmp_path / "out.json"
    model = tiny_model("llama_gpu")
    for old, new in (
        ("TRACE.jsonl", "sgl_prefix_attn/demo/data/mooncake_conversation_slice.jsonl"),
        ("MODEL-with-weights", tmp_path / "weights"), (" MODEL", f" {model}"), ("FILE", out), ("FOLDER", tmp_path),
        ("/models/Llama-3.1-8B-Instruct", model), ("rollout.json", out),
        (" serving.json", f" {out}"), ("offline.json", out),
    ):  # fmt: skip
        command = command.replace(old, str(new))
    named = lambda found: str(RESULTS / found[1]) if (RESULTS / found[1]).exists() else found[1]  # noqa: E731
    command = re.sub(r"(?<![\w/])(\w+\.json)", named, command)
    for more in ("", " --resume") if "serving.rollout" in begin else ("",):
        run(command + more)
    assert not written or json.loads(out.read_text())


@pytest.mark.parametrize(("begin", "sizes"), LISTED.items())
def test_the_cases_of_a_command_are_listed(begin: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: each import of torch takes seconds."""
    _, _, module, *words = shlex.split(documented(f"python {begin}", more=f"{sizes} --list"))
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0


def test_every_benchmark_without_a_gpu_is_run() -> None:
    section = (ROOT / "docs" / "measuring.md").read_text().partition("## Without a GPU")[2].partition("\n## ")[0]
    begins = (*(f"python {begin}" for begin in FAST | SLOW), *ELSEWHERE)
    assert [command for command in INLINE.findall(section) if not command.startswith(begins)] == []
