"""Batch files for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sgl_prefix_attn.offline.runner import journal_of


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
