"""Sends bodies that no honest client sends to every endpoint of ours, until its standard input has a line.

    python -m tests.e2e.hostile HOST PORT BYTES

BYTES: what the server reads of a body about pins.
Prints JSON: for each body the HTTP statuses of its answers. It runs beside the clients that are measured, in a process
of its own with the lowest priority.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
from collections.abc import Iterator
from itertools import cycle

PINS, TESTS = "/prefixpack/pins", "/prefixpack/abtest"
MEGABYTE = 1 << 20
POLICIES = {
    "spaces": "packed" + " " * 30_000 + "x",
    "10,000 conditions": " and ".join(["cost"] * 10_000),
    "few bytes, many conditions": "&" * 200,
}


def plan(first_arm: str) -> bytes:
    return json.dumps({"arms": [first_arm, "packed"]}).encode()


def bodies(most: int) -> dict[tuple[str, str], list[tuple[str, bytes]]]:
    """Name and body, by method and path. most: bytes that the server reads of a body about pins."""

    def filled(begin: bytes, item: bytes, end: bytes, size: int = most) -> bytes:
        return begin + item * ((size - len(begin) - len(end)) // len(item)) + end

    keys = b"{" + b",".join(b'"%x":0' % number for number in range(most // 10)) + b"}"
    any_path = [
        ("64 MB of text", filled(b'{"text":"', b"w20 ", b'"}', 64 * MEGABYTE)),
        ("nested 10,000 deep", b'{"text":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
        ("nested 960 deep", b'{"arms":' + b"[" * 960 + b"]" * 960 + b"}"),
        ("many keys", keys),
        ("a long key", filled(b'{"', b"k", b'":1}')),
        ("no UTF-8", b'{"text":"\xff"}'),
        ("NaN", b'{"pairs":NaN,"token_ids":[NaN]}'),
        ("a huge number", filled(b'{"id":', b"9", b"}")),
        ("no object", b"[]"),
        ("twice the same key", b'{"text":"","text":1,"arms":1,"arms":2}'),
    ]
    pins = [
        ("the longest text that is encoded", filled(b'{"text":"', b"w20 ", b'"}', most * 9 // 10)),
        ("2^20 tokens", filled(b'{"token_ids":[', b"20,", b"20]}", 3 * MEGABYTE)),
        ("as many tokens as are read", filled(b'{"token_ids":[', b"1,", b"1]}")),
        ("lists as tokens", filled(b'{"token_ids":[', b"[],", b"[]]}")),
        ("objects as tokens", filled(b'{"token_ids":[', b'{"a":0},', b"1]}")),
        ("tokens of no vocabulary", b'{"token_ids":[2000000000]}'),
        ("60 MB of extra_key", filled(b'{"token_ids":[20],"extra_key":"', b"k", b'"}', 60 * MEGABYTE)),
        ("a long cache_salt", filled(b'{"token_ids":[20],"cache_salt":"', b"k", b'"}')),
        ("strings as tokens", filled(b'{"token_ids":[', b'"",', b'""]}')),
        ("a text of quotes", filled(b'{"text":"', b'\\" ', b'"}')),
        ("a text that does not end", filled(b'{"text":"', b"\\\\", b"")),
        ("a long label", filled(b'{"token_ids":[20],"label":"', b"k", b'"}')),
    ]
    tests = [(name, plan(text)) for name, text in POLICIES.items()]
    tests += [("numbers of many digits", b'{"arms":["packed","stock"],"pairs":' + b"9" * 16_000 + b"}")]
    return {
        ("POST", PINS): any_path + pins,
        ("DELETE", PINS): any_path + pins,
        ("POST", TESTS): any_path + tests,
        **{
            (method, path + query): [("a query", b"")]
            for method, path in (("GET", PINS), ("GET", TESTS), ("DELETE", TESTS))
            for query in ("?first=" + "9" * 400, "?token=" + "t" * 30_000, "?more=1")
        },
    }


def status_of(host: str, port: int, method: str, path: str, body: bytes, *, chunked: bool) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=60)

    def chunks() -> Iterator[bytes]:
        for begin in range(0, len(body), 1 << 16):
            yield body[begin : begin + (1 << 16)]

    try:
        connection.request(method, path, chunks() if chunked else body, encode_chunked=chunked)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def main(host: str, port: str, most: str) -> None:
    os.nice(19)
    sent = [(*to, name, body) for to, named in bodies(int(most)).items() for name, body in named]
    statuses: dict[str, set[int]] = {}
    rounds = 0
    for number, (method, path, name, body) in enumerate(cycle(sent)):
        status = status_of(host, int(port), method, path, body, chunked=number % 2 == 1)
        statuses.setdefault(f"{method} {path[:30]}: {name}", set()).add(status)
        rounds = (number + 1) // len(sent)
        if number + 1 == len(sent):
            print("each body was sent", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    print(json.dumps({"rounds": rounds, "statuses": {name: sorted(found) for name, found in statuses.items()}}))


if __name__ == "__main__":
    main(*sys.argv[1:])
