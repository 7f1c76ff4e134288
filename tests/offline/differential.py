"""Compares what bodies mean to `batch` and to SGLang's server.

`python -m tests.offline.differential FOLDER BODIES [SEED]` does it with more bodies than the test.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sgl_prefix_attn.demo.server import Server, serve
from tests.offline import batches, body_grammar, recorded, text_models
from tests.support import forked_server
from tests.support.word_model import WordServer

# One request runs at a time and finds nothing cached: SGLang's server answers a body in other words where others
# run beside it or came before, because sums of floats come out differently.
SIZES = (
    *("--max-total-tokens", "16384", "--context-length", "512"),
    *("--max-running-requests", "1", "--disable-radix-cache"),
)
Case = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What became of a body. `sent`: prompt tokens and sampling parameters; None where it was refused."""

    answer: dict[str, Any] | None
    sent: tuple[list[int], dict[str, str]] | None
    error: str = ""


def of_server(model: Path, cases: Sequence[Case], folder: Path, more: Sequence[str]) -> list[Meaning]:
    """Asks SGLang's server, with its own kernels."""
    record = folder / "server.record"
    options = _Recorded(
        str(model), "torch_native", extra=(*SIZES, "--grammar-backend", "xgrammar", *more), log_folder=folder,
        environment={recorded.RECORD: str(record)}, starter=forked_server.start_without_warm_up,
    )  # fmt: skip
    with serve(options) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: _ask(server, *case), cases))
    sent = recorded.read(record)
    return [_meaning(answer, error, sent) for answer, error in answers]


class _Recorded(WordServer):
    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        return [word.replace("sglang.launch_server", recorded.__name__) for word in super().command(port, nccl_port)]


def _ask(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response), ""
    except urllib.error.HTTPError as error:
        return None, error.read().decode()


def of_batch(model: Path, cases: Sequence[Case], folder: Path, more: Sequence[str]) -> list[Meaning]:
    record, output = folder / "batch.record", folder / "out.jsonl"
    lines = [{"custom_id": str(n), "url": path, "body": body} for n, (path, body) in enumerate(cases)]
    source = batches.write(folder / "in.jsonl", lines)
    batches.run_forked(
        recorded.__name__, source, output, "--model", str(model), "--server-args", " ".join((*SIZES, *more)),
        "--device", "cpu", "--quiet",
        environment={recorded.RECORD: str(record)},
    )  # fmt: skip
    sent = recorded.read(record)
    found = {entry["custom_id"]: (entry["response"]["body"], "") for entry in batches.read(output)}
    errors = output.with_name("out.errors.jsonl")
    if errors.exists():
        found |= {e["custom_id"]: (None, e["error"]["message"]) for e in batches.read(errors)}
    return [_meaning(*found[str(n)], sent) for n in range(len(cases))]


def _meaning(answer: dict[str, Any] | None, error: str, sent: dict[str, Any]) -> Meaning:
    return Meaning(answer, None if answer is None else sent[answer["id"]], error)


def differences(case: Case, server: Meaning, batch: Meaning) -> list[str]:
    if (server.answer is None) != (batch.answer is None):
        return [f"server: {server.error or 'answers'}; batch: {batch.error or 'answers'}"]
    if server.answer is None or batch.answer is None:
        return []
    assert server.sent is not None
    assert batch.sent is not None
    found = [] if server.sent[0] == batch.sent[0] else [f"prompt tokens {server.sent[0]} and {batch.sent[0]}"]
    for name in server.sent[1] | batch.sent[1]:
        values = [sent[1].get(name) for sent in (server.sent, batch.sent)]
        found += [] if values[0] == values[1] else [f"{name} {values[0]} and {values[1]}"]
    # SGLang's parameters of greedy decoding.
    if server.sent[1]["top_k"] == "1" or server.sent[1]["temperature"] in ("0", "0.0"):
        first, second = (_comparable(answer) for answer in (server.answer, batch.answer))
        found += [] if first == second else [f"answers {first} and {second}"]
    return found


def _comparable(answer: dict[str, Any]) -> Any:
    """Without what is drawn or counted for each request, and logarithms as far as both kernels compute the same."""
    text = json.dumps({name: value for name, value in answer.items() if name not in ("id", "created", "metadata")})
    text = re.sub(r'"call_[0-9a-f]+"', '"call"', text)
    return json.loads(text, parse_float=lambda number: round(float(number), 2))


def compare(make: Any, folder: Path, count: int, seed: int, more: Sequence[str] = ()) -> list[str]:
    """Differences of so many bodies drawn for a model; [] if there is none."""
    folder.mkdir()
    model, rng = make(folder / "model"), random.Random(seed)
    cases = [body_grammar.draw(rng) for _ in range(count)]
    servers, ours = of_server(model, cases, folder, more), of_batch(model, cases, folder, more)
    answered = sum(meaning.answer is not None for meaning in servers)
    assert answered > count // 2, f"only {answered} bodies of {count} are answered: {servers[0].error}"
    print(f"{count} bodies, {answered} answered by the server")
    return [
        f"{case}: {difference}"
        for case, server, batch in zip(cases, servers, ours, strict=True)
        for difference in differences(case, server, batch)
    ]


if __name__ == "__main__":
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[3:] or ["0"])[0])
    folder.mkdir(exist_ok=True)
    found = compare(text_models.with_parts, folder / "parts", count // 2, seed, text_models.PARSERS)
    found += compare(text_models.with_text, folder / "text", count - count // 2, seed + 1)
    print("\n".join(found), f"{len(found)} differences", sep="\n")
    sys.exit(bool(found))
