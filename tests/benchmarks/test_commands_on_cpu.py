"""Every server benchmark that the pages run on a GPU, on a CPU: its backends and options as far as a CPU has them."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.support.pages import ROOT, run, shell_commands

pytestmark = pytest.mark.slow

SIDE_BY_SIDE, ROLLOUT = "-m benchmarks.serving --model", "-m benchmarks.serving.rollout --model"
OFFLINE = "-m benchmarks.offline.throughput --device cuda"
SIZES = {
    SIDE_BY_SIDE: "--context-length 8192 --times 2 --groups 2 --samples 2 --prompt-tokens 64 --output-tokens 4",
    ROLLOUT: "--context-length 1024 --prompt-tokens 128 --output-tokens 20 --groups 120 --samples 4 --running 8 "
    "--window 1",
    OFFLINE: "--settings 60/10x4 --requests 8 --output-tokens 4 --repeats 1",
}
SHIMS = ROOT / "tests" / "support" / "cpu_speculation"
KEPT = ("--enable-mixed-chunk", "--speculative")  # of the options of servers
COMMANDS = [
    case.values[0]
    for case in shell_commands()
    if re.sub(r"^[A-Z_]+=\S+ ", "", case.values[0]).startswith(tuple(f"python {begin}" for begin in SIZES))
]


def options_of(words: list[str]) -> dict[str, list[str]]:
    """Option -> its values. The options of servers are one value, with spaces."""
    found: dict[str, list[str]] = {}
    for word in words:
        if re.fullmatch(r"--[a-z-]+", word):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def as_words(options: dict[str, list[str]]) -> str:
    words = []
    for name, values in options.items():
        words += [f"{name}={values[0]}"] if values and values[0].startswith("--") else [name, *values]
    return shlex.join(words)


def names(values: list[str]) -> list[str]:
    """Backends, stock ones as torch_native."""
    written = re.split(r",(?![^\[]*\])", ",".join(values))
    return list(dict.fromkeys(re.sub(r"fa3|flashinfer", "torch_native", name) for name in written))


def on_a_cpu(command: str, model: Path, out: Path) -> tuple[str, dict[str, str]]:
    """The command with what a CPU has, small sizes, and the variables of its servers."""
    begin = next(begin for begin in SIZES if begin in command)
    for name in ("MODEL-with-weights", "MODEL", "DRAFT"):
        command = command.replace(name, str(model))
    before, _, rest = command.partition("--")
    options = options_of(shlex.split(f"--{rest}"))
    servers = options_of(shlex.split(" ".join(options.pop("--server-args", []))))
    kept = {name: values for name, values in servers.items() if name.startswith(KEPT)}
    variables = {"SGLANG_USE_CPU_ENGINE": "1"}
    if "--speculative-algorithm" in kept:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIMS), os.environ.get("PYTHONPATH")]))
    for name in {"--backends", "--repeat"} & options.keys():
        found = names(options[name])
        options[name] = found if begin == OFFLINE else [",".join(found)]
    if "--workload" in options:
        options["--workload"] = [
            f"{name}:2" for name in dict.fromkeys(it.partition(":")[0] for it in options["--workload"])
        ]
    if begin == OFFLINE:
        options = {name: values for name, values in options.items() if name not in ("--device", "--model")}
    else:
        options.pop("--tp", None)
        options |= {"--device": ["cpu"], "--load-format": ["auto"], "--server-args": [as_words(kept)]}
    options |= options_of(shlex.split(SIZES[begin])) | {"--out": [str(out)]}
    return before + as_words(options), variables


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_for_a_gpu_runs_on_a_cpu(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words, variables = on_a_cpu(command, tiny_model(), out)
    run(words, **variables)
    assert json.loads(out.read_text())
