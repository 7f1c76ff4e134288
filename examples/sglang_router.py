"""Sends samples of prompts through the SGLang router; all samples of a prompt reach one engine.

    python examples/sglang_router.py http://HOST:PORT prompts.txt --samples 16

Start the router with `--policy manual --assignment-mode min_load`.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sgl_prefix_attn.group_routing import group_key

HEADER = "X-SMG-Routing-Key"


def request(url: str, prompt: str | Sequence[int], sampling_params: dict[str, Any]) -> urllib.request.Request:
    """One sample of a prompt, with the routing key of its group."""
    body: dict[str, Any] = {"sampling_params": sampling_params}
    body["text" if isinstance(prompt, str) else "input_ids"] = prompt if isinstance(prompt, str) else list(prompt)
    headers = {"Content-Type": "application/json", HEADER: group_key(prompt)}
    return urllib.request.Request(f"{url.rstrip('/')}/generate", json.dumps(body).encode(), headers)


def generate(url: str, prompts: Sequence[str], samples: int, sampling_params: dict[str, Any]) -> list[list[Any]]:
    """The answers to `samples` requests of each prompt, all sent at once."""

    def send(prompt: str) -> Any:
        with urllib.request.urlopen(request(url, prompt, sampling_params)) as answer:
            return json.loads(answer.read())

    with ThreadPoolExecutor(max_workers=max(1, len(prompts) * samples)) as pool:
        groups = [[pool.submit(send, prompt) for _ in range(samples)] for prompt in prompts]
        return [[future.result() for future in group] for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("prompts", type=Path, help="a text file with a prompt on each line")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    prompts = arguments.prompts.read_text("utf-8-sig").splitlines()
    sampling_params = {"temperature": 1.0, "max_new_tokens": arguments.max_new_tokens}
    for group in generate(arguments.url, prompts, arguments.samples, sampling_params):
        print(json.dumps([answer["text"] for answer in group]))


if __name__ == "__main__":
    main()
