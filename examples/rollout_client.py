"""A rollout as RL launchers run it: n samples of each prompt, each a request of its own, refilled one by one.

    python examples/rollout_client.py http://HOST:PORT prompts.txt --samples 16 --running 256

All samples of a prompt carry its group key. Behind a router with `--policy manual` they reach one engine, where they
share the prompt's KV.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_prefix_attn.group_routing import group_key

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Sample:
    """One answer: its text or token ids, and numbers of tokens."""

    prompt: int
    output: Any
    tokens: int
    prompt_tokens: int
    cached_tokens: int


def sample(url: str, number: int, prompt: Prompt, sampling: dict[str, Any]) -> Sample:
    """Sends one request and waits for its answer."""
    body: dict[str, Any] = {"sampling_params": sampling}
    body["text" if isinstance(prompt, str) else "input_ids"] = prompt if isinstance(prompt, str) else list(prompt)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": group_key(prompt)}
    request = urllib.request.Request(f"{url.rstrip('/')}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    meta = answer["meta_info"]
    output = answer.get("text") or answer["output_ids"]
    return Sample(number, output, meta["completion_tokens"], meta["prompt_tokens"], meta["cached_tokens"])


def rollout(
    url: str, prompts: Sequence[Prompt], samples: int, running: int, sampling: dict[str, Any]
) -> Iterable[Sample]:
    """Samples of all prompts, at most `running` at a time. The next one starts when one ends."""
    with ThreadPoolExecutor(max_workers=running) as pool:
        jobs = [
            pool.submit(sample, url, number, prompt, sampling)
            for number, prompt in enumerate(prompts)
            for _ in range(samples)
        ]
        for job in jobs:
            yield job.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path, help="a text file with a prompt on each line")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--running", type=int, default=256, help="requests at a time (256)")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    arguments = parser.parse_args()
    prompts = arguments.prompts.read_text("utf-8-sig").splitlines()
    sampling = {"temperature": 1.0, "max_new_tokens": arguments.max_new_tokens}
    started = time.monotonic()
    done = list(rollout(arguments.url, prompts, arguments.samples, arguments.running, sampling))
    seconds = time.monotonic() - started
    tokens, prompt_tokens = sum(one.tokens for one in done), sum(one.prompt_tokens for one in done)
    cached = sum(one.cached_tokens for one in done) / prompt_tokens
    print(f"{len(done)} samples, {tokens / seconds:,.0f} output tokens/s, {cached:.0%} of prompt tokens cached")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error}: {error.read().decode()}") from error
    except OSError as error:  # no server, or no file with prompts
        raise SystemExit(str(error)) from error
