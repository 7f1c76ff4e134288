"""Sends bodies that no honest client sends to every endpoint of ours, until its standard input has a line.

    python -m tests.e2e.hostile HOST PORT BYTES

BYTES: what the server reads of a body about pins. Several clients send bodies that are refused. One sends the most that
is accepted: long pins, many labels, long tests and recordings. Sockets trickle: some send a header a byte at a time,
two a body.
Prints JSON: how often each body was sent, for each body the HTTP statuses of its answers, and when it was sent. It runs
beside the clients that are measured, in a process of its own with the lowest priority.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from itertools import cycle

PINS, TESTS = "/prefixpack/pins", "/prefixpack/abtest"
PROMPTS = "/prefixpack/prompts"
CLIENTS = 3  # that send bodies which are refused
TRICKLED_BODIES, TRICKLED_HEADERS = 2, 100  # sockets
LONGEST_PIN, MOST_PINS = 1 << 17, 200
MEGABYTE = 1 << 20
POLICIES = {
    "spaces": "packed" + " " * 30_000 + "x",
    "10,000 conditions": " and ".join(["auto"] * 10_000),
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
        ("the longest text that is encoded", filled(b'{"text":"', b"w20 ", b'"}', most * 49 // 100)),
        ("2^20 tokens", filled(b'{"token_ids":[', b"20,", b"20]}", 3 * MEGABYTE)),
        ("as many tokens as are read", filled(b'{"token_ids":[', b"1,", b"1]}")),
        ("lists as tokens", filled(b'{"token_ids":[', b"[],", b"[]]}")),
        ("objects as tokens", filled(b'{"token_ids":[', b'{"a":0},', b"1]}")),
        ("tokens of no vocabulary", b'{"token_ids":[2000000000]}'),
        ("60 MB of extra_key", filled(b'{"token_ids":[20],"extra_key":"', b"k", b'"}', 60 * MEGABYTE)),
        ("a long cache_salt", filled(b'{"token_ids":[20],"cache_salt":"', b"k", b'"}')),
        ("strings as tokens", filled(b'{"token_ids":[', b'"",', b'""]}')),
        ("a text of quotes", filled(b'{"text":"', b'\\" ', b'"}', most * 73 // 100)),
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
            for method, path in (("GET", PINS), ("GET", TESTS), ("DELETE", TESTS), ("GET", PROMPTS))
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


class Attack:
    """What was sent, by its name, and what came back."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.statuses: dict[str, set[int]] = {}
        self.sent: list[tuple[float, float, str]] = []
        self.rounds: dict[str, int] = {}
        self.ended, self.turn = threading.Event(), threading.Lock()

    def send(self, name: str, method: str, path: str, body: bytes = b"", *, chunked: bool = False) -> None:
        begin = time.monotonic()
        status = status_of(*self.address, method, path, body, chunked=chunked)
        self.sent.append((begin, time.monotonic(), name))
        self.statuses.setdefault(name, set()).add(status)

    def refused(self, sent: Iterator[tuple[int, tuple[str, str, str, bytes]]], count: int) -> None:
        """Sends what is next, which no other client sends."""
        while not self.ended.is_set():
            with self.turn:
                number, (method, path, name, body) = next(sent)
            self.send(f"{method} {path[:30]}: {name}", method, path, body, chunked=number % 2 == 1)
            self.rounds["refused"] = max(self.rounds.get("refused", 0), (number + 1 - CLIENTS) // count)

    def accepted(self) -> None:
        """The longest pins and as many as there may be, released again; the longest test and recording."""
        long = ",".join(["20"] * LONGEST_PIN)
        while not self.ended.is_set():
            for label in range(6):
                self.send(
                    "accepted: a long pin", "POST", PINS, b'{"token_ids":[%s],"label":"%d"}' % (long.encode(), label)
                )
            for label in range(MOST_PINS):
                self.send("accepted: many labels", "POST", PINS, b'{"token_ids":[30,31],"label":"%d"}' % label)
                if self.ended.is_set():
                    break
            self.send("accepted: all pins", "GET", PINS)
            plan = b'{"arms":["packed","stock"],"block_steps":16,"pairs":3125,"lease_steps":20000}'
            for method, sent in (("POST", plan), ("GET", b""), ("DELETE", b"")):
                self.send(f"live: {method} {TESTS}", method, TESTS, sent)
            for tokens in (long, "30,31"):
                self.send("accepted: released", "DELETE", PINS, b'{"token_ids":[%s]}' % tokens.encode())
            self.rounds["accepted"] = self.rounds.get("accepted", 0) + 1

    def trickle(self) -> None:
        """A byte a second on each of many sockets, which are opened again where the server closes them."""
        head = b"POST %s HTTP/1.1\r\nHost: a\r\n"
        texts = [head % PINS.encode() + b"Content-Length: 999999\r\n\r\n" + b"{" * 500] * TRICKLED_BODIES
        texts += [head % path.encode() + b"X: " + b"x" * 500 for path in (PINS, TESTS)] * (TRICKLED_HEADERS // 2)
        first = [text.index(b"\r\n\r\n") + 4 if number < TRICKLED_BODIES else 0 for number, text in enumerate(texts)]
        sockets: list[tuple[socket.socket, int] | None] = [None] * len(texts)
        while not self.ended.wait(1.0):
            for number, (text, opened) in enumerate(zip(texts, sockets, strict=True)):
                try:
                    if opened is None:
                        made = socket.create_connection(self.address)
                        made.sendall(text[: first[number]])
                        opened = made, first[number]
                    to, at = opened
                    to.sendall(text[at : at + 1])
                    sockets[number] = (to, at + 1) if at + 1 < len(text) else None
                except OSError:
                    sockets[number] = None


def main(host: str, port: str, most: str) -> None:
    os.nice(19)  # its own work is that of another machine
    sent = [(*to, name, body) for to, named in bodies(int(most)).items() for name, body in named]
    attack, all_sent = Attack(host, int(port)), enumerate(cycle(sent))
    clients = [threading.Thread(target=attack.trickle), threading.Thread(target=attack.accepted)]
    clients += [threading.Thread(target=attack.refused, args=(all_sent, len(sent))) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    told = False
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        if not told and len(attack.rounds) == 2 and min(attack.rounds.values()) >= 1:
            told = True
            print("each body was sent", flush=True)
    attack.ended.set()
    for client in clients:
        client.join()
    statuses = {name: sorted(found) for name, found in attack.statuses.items()}
    print(json.dumps({"rounds": attack.rounds, "sent": attack.sent, "statuses": statuses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
