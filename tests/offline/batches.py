"""Batch files for tests."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_prefix_attn.demo.server import ServerProcess
from sgl_prefix_attn.offline.runner import journal_of
from tests.support import forked_server

RUN_SECONDS = 400
ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def line(number: int, prompt: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **body},
    }


def grouped(count: int, *, groups: int = 0, seed: int = 0, vocabulary: int = 900) -> list[dict[str, Any]]:
    """Requests with token ids as prompts, in groups that share 40 to 120 tokens; shuffled."""
    rng = random.Random(seed)
    shared = [
        [rng.randrange(10, vocabulary) for _ in range(rng.randrange(40, 120))] for _ in range(groups or count // 8)
    ]
    lines = []
    for number in range(count):
        own = [rng.randrange(10, vocabulary) for _ in range(rng.randrange(4, 16))]
        lines.append(line(number, rng.choice(shared) + own, max_tokens=rng.randrange(1, 7)))
    return lines


def write(path: Path, lines: list[Any]) -> Path:
    """Dictionaries as JSON, strings as they are."""
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def results(output: Path) -> list[dict[str, Any]]:
    """Results without what differs from run to run."""
    entries = read(output)
    for entry in entries:
        for name in ("id", "created"):
            entry["response"]["body"].pop(name)
    return entries


def finished(output: Path) -> int:
    """Requests in the journal."""
    journal = journal_of(output)
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


def run_forked(module: str, source: Path, output: Path, *more: str, environment: Mapping[str, str] = ON_A_CPU) -> str:
    """What `python -m MODULE batch IN OUT ...` says, with processes that are forks of one that has imported SGLang."""
    log = output.with_suffix(".log")
    start_forked(module, ["batch", str(source), str(output), *more], log, environment).wait(RUN_SECONDS)
    return log.read_text()


def start_forked(
    module: str, words: Sequence[str], log: Path, environment: Mapping[str, str] = ON_A_CPU
) -> ServerProcess:
    with log.open("wb") as file:
        return forked_server.start(
            [sys.executable, "-m", module, *words], {**os.environ, **ON_A_CPU, **environment}, file
        )
