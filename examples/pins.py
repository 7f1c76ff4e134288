"""Keeps system prompts in the prefix cache of a running server, and shows what is pinned.

    python examples/pins.py http://HOST:PORT pin prompts.txt
    python examples/pins.py http://HOST:PORT list
    python examples/pins.py http://HOST:PORT release prompts.txt

The server needs PREFIXPACK_PIN_BUDGET_PERCENT, for example 30, in its environment.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask(url: str, method: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The answer of each scheduler. Raises HTTPError with a JSON body that says why a command was refused."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/prefixpack/pins", data, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)["schedulers"])


def listing(url: str) -> str:
    """Every pin with its tokens, and the budget."""
    lines = []
    for number, scheduler in enumerate(ask(url, "GET")):
        lines.append(f"scheduler {number}: {scheduler['pinned_tokens']} of {scheduler['budget_tokens']} tokens pinned")
        lines += [f"  {pin['label']}: {pin['cached_tokens']} of {pin['tokens']} cached" for pin in scheduler["pins"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("action", choices=("pin", "list", "release"))
    parser.add_argument("prompts", type=Path, nargs="?", help="a text file with a prompt on each line")
    arguments = parser.parse_args()
    if (arguments.action == "list") == bool(arguments.prompts):
        parser.error("pin and release need a file with prompts, list takes none")
    for number, prompt in enumerate(arguments.prompts.read_text("utf-8-sig").splitlines() if arguments.prompts else []):
        if arguments.action == "pin":
            ask(arguments.url, "POST", {"text": prompt, "label": f"{arguments.prompts.name}:{number + 1}"})
        else:
            ask(arguments.url, "DELETE", {"text": prompt})
    print(listing(arguments.url))


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{error}: {error.read().decode()}") from error
    except OSError as error:  # no server, or no file with prompts
        raise SystemExit(str(error)) from error
