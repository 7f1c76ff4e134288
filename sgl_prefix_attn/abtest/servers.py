"""Two servers compared by requests: each block of requests goes to both, one after the other in a drawn order."""

from __future__ import annotations

import ipaddress
import json
import random
import socket
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from sgl_prefix_attn.abtest.statistics import Comparison, compare
from sgl_prefix_attn.core.files import read_lines
from sgl_prefix_attn.demo.workload import Request

if TYPE_CHECKING:
    from sgl_prefix_attn.demo.client import Answer

MOST_REQUESTS = 100_000
_PROBE_TOKENS = 256


@dataclass(frozen=True)
class BlockTimes:
    """A block of requests on one server.

    Attributes:
        tpot_ms: time per output token after the first, mean over tokens.
        ttft_ms: time to the first token, mean over samples.
        tokens_per_s: output tokens over the time of the block.
        tokens: [samples] generated token ids.
    """

    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float
    tokens: list[list[int]]


@dataclass(frozen=True)
class Arm:
    """A server over all counted blocks: means of the blocks' figures."""

    url: str
    blocks: int
    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float


def read_requests(path: Path) -> list[Request]:
    """Requests from JSON lines {"input_ids": [...], "max_new_tokens": N, "n": samples, 1 if left out}.

    Raises:
        ValueError: the file cannot be read, or a line is none of these; the message has its number.
    """
    found: list[Request] = []
    try:
        for number, line in read_lines(path):
            if len(found) == MOST_REQUESTS:
                raise ValueError(f"{path}: more than {MOST_REQUESTS} requests")
            found.append(_request(line, f"{path}, line {number}"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the requests: {error.strerror}") from error
    return found


def _request(line: bytes, place: str) -> Request:
    try:
        values = json.loads(line)
        ids, tokens, samples = values["input_ids"], values["max_new_tokens"], values.get("n", 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{place}: expected a JSON object with input_ids and max_new_tokens: {error!r}") from error
    whole = isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)
    if not whole:
        raise ValueError(f"{place}: input_ids: expected a list of token ids")
    if type(tokens) is not int or tokens < 2 or type(samples) is not int or samples < 1:
        raise ValueError(f"{place}: expected max_new_tokens from 2 and n from 1 on")
    return Request(place, tuple(ids), tokens, samples=samples)


def block_times(url: str, requests: Sequence[Request], api_key: str | None = None) -> BlockTimes:
    """Sends a block at once, greedy, with as many tokens as each request says.

    Raises:
        ValueError: the server is gone, refuses a request, ends it early, or makes no more tokens.
    """
    begin = time.perf_counter()
    answers = _answers(url, requests, api_key)
    seconds = time.perf_counter() - begin
    for answer in answers:
        _check_length(url, answer)
    samples = [sample for answer in answers for sample in answer.samples]
    gaps = sum(len(sample.tokens) - 1 for sample in samples)
    return BlockTimes(
        tpot_ms=1e3 * sum(sample.last - sample.first for sample in samples) / max(1, gaps),
        ttft_ms=1e3 * float(np.mean([sample.first for sample in samples])),
        tokens_per_s=sum(len(sample.tokens) for sample in samples) / seconds,
        tokens=[sample.tokens for sample in samples],
    )


def _answers(url: str, requests: Sequence[Request], api_key: str | None) -> list[Answer]:
    import aiohttp

    from sgl_prefix_attn.demo.client import STALL_SECONDS, RequestError, replay

    try:
        return replay(url, requests, api_key=api_key)
    except TimeoutError as error:
        raise ValueError(f"{url}: {len(requests)} requests got no token for {STALL_SECONDS:g} s") from error
    except (aiohttp.ClientError, RequestError, OSError) as error:
        more = "; give --api-key" if "status 401" in str(error) else ""
        raise ValueError(f"{url}: {error}{more}") from error


def check_two_servers(urls: tuple[str, str], requests: Sequence[Request], api_key: str | None) -> None:
    """Finds out whether two addresses lead to one server, where the second sending would find its prompts cached.

    Names and proxies hide that, so a drawn prompt is sent to the first address, and then to the second.

    Raises:
        ValueError: one server answers both, or one does not answer.
    """
    message = f"{urls[0]} and {urls[1]} lead to one server: the second sending of a block would find its prompts cached"
    if _place(urls[0]) == _place(urls[1]):
        raise ValueError(message)
    known = sorted({token for request in requests for token in request.prompt})
    probe = Request("to tell the servers apart", tuple(random.SystemRandom().choices(known, k=_PROBE_TOKENS)), 2)
    cached = [_answers(url, [probe], api_key)[0].samples[0].cached_tokens for url in urls]
    if len(known) > 1 and cached[0] < _PROBE_TOKENS // 2 <= cached[1]:
        raise ValueError(message)


def _place(url: str) -> object:
    """What tells the servers of this machine apart: port and path. The address itself, if it leads elsewhere."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        hosts = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, port)}
    except (OSError, ValueError):  # the first request will say it
        return url
    return (port, parts.path) if all(ipaddress.ip_address(host).is_loopback for host in hosts) else url


def _check_length(url: str, answer: Answer) -> None:
    """Times of an answer that was cut short, or streamed in parts, are not comparable."""
    wanted = answer.request.max_new_tokens
    for sample in answer.samples:
        if sample.finish != "length" or len(sample.tokens) != wanted:
            raise ValueError(
                f"{url}: request {answer.request.name}: {len(sample.tokens)} tokens at its end ({sample.finish}), "
                f"{wanted} were asked for"
            )


@dataclass(frozen=True)
class ServersVerdict:
    """The comparison by time per output token.

    Attributes:
        equal_tokens: share of samples with the same tokens from both servers.
        orders: server of the first sending of each pair, 0 or 1.
        tpot_ms: time per output token of each block on server A and B.
        ended: why there are no more blocks, "" after the last one.
    """

    arms: tuple[Arm, Arm]
    comparison: Comparison
    equal_tokens: float
    orders: list[int]
    tpot_ms: list[tuple[float, float]]
    ended: str = ""

    def lines(self) -> list[str]:
        heads = f"{'arm':4} {'blocks':>7} {'TPOT ms':>9} {'TTFT ms':>9} {'tokens/s':>10}  server"
        found = [heads]
        for letter, arm in zip("AB", self.arms, strict=True):
            found.append(
                f"{letter:4} {arm.blocks:7} {arm.tpot_ms:9.3f} {arm.ttft_ms:9.1f} {arm.tokens_per_s:10.0f}  {arm.url}"
            )
        compared = self.comparison
        text = compared.text("times per output token", (self.arms[0].url, self.arms[1].url))
        if compared.winner is None and compared.pairs_needed is not None:
            text += f" A difference of {compared.effect:.1%} needs about {compared.pairs_needed:,} pairs."
        found.append(text)
        if self.orders:
            found.append(f"{self.equal_tokens:.1%} of the samples have equal tokens from both servers.")
        if self.ended:
            found.append(self.ended)
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_servers(
    urls: tuple[str, str],
    requests: Sequence[Request],
    block: int,
    *,
    seed: int,
    effect: float,
    seconds: float,
    api_key: str | None = None,
) -> ServersVerdict:
    """Sends blocks of requests to both servers. The first block is warm-up.

    Args:
        block: requests of a block; those that fill no block at the end are left out.
        seed: of the orders.
        seconds: no block is begun after this time. A block that fails after a counted one ends the comparison, and
            so does Ctrl-C.

    Raises:
        ValueError: too few requests, one server at both addresses, or a server that fails before a block counts.
        KeyboardInterrupt: Ctrl-C before a block counts.
    """
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server {url!r}: expected http://HOST:PORT")
    first, second = (url.rstrip("/") for url in urls)
    blocks = [requests[begin : begin + block] for begin in range(0, len(requests) - block + 1, block)]
    if len(blocks) < 2:
        raise ValueError(f"{len(requests)} requests are fewer than two blocks of {block}, one of them for warm-up")
    check_two_servers((first, second), requests, api_key)
    orders = [int(order) for order in np.random.default_rng(seed).integers(2, size=len(blocks))]
    found, ended = _pairs((first, second), blocks, orders, seconds, api_key)
    known = [(a, b) for a, b in found if min(a.tpot_ms, b.tpot_ms) > 0]  # 0: all tokens came at once
    ratios = [float(np.log(b.tpot_ms / a.tpot_ms)) for a, b in known]
    same = [a == b for one, other in found for a, b in zip(one.tokens, other.tokens, strict=True)]
    arms = _arm(first, [a for a, _ in found]), _arm(second, [b for _, b in found])
    tpot = [(a.tpot_ms, b.tpot_ms) for a, b in found]
    equal = float(np.mean(same)) if same else 0.0
    return ServersVerdict(arms, compare(ratios, seed, effect), equal, orders[1 : 1 + len(found)], tpot, ended)


def _pairs(
    urls: tuple[str, str],
    blocks: Sequence[Sequence[Request]],
    orders: Sequence[int],
    seconds: float,
    api_key: str | None,
) -> tuple[list[tuple[BlockTimes, BlockTimes]], str]:
    """Times of the blocks that count, on both servers, and why there are no more; "" after the last one.

    Raises:
        ValueError: a server fails before a block counts.
        KeyboardInterrupt: Ctrl-C before a block counts.
    """
    found: list[tuple[BlockTimes, BlockTimes]] = []
    number, end = 0, time.monotonic() + seconds
    try:
        for number, chosen in enumerate(tqdm(blocks, desc="A/B", unit="block")):
            if time.monotonic() >= end:
                break
            times: dict[int, BlockTimes] = {}
            for arm in (orders[number], 1 - orders[number]):
                times[arm] = block_times(urls[arm], chosen, api_key)
            if number:  # the first one is warm-up
                found.append((times[0], times[1]))
    except (KeyboardInterrupt, ValueError) as error:
        if not found:
            raise
        of = len(blocks) - 1
        if isinstance(error, KeyboardInterrupt):
            return found, f"The test was stopped early, by Ctrl-C: {len(found)} of {of} blocks count."
        return found, f"Block {number} of {of} failed and does not count: {error}"
    return found, ""


def _arm(url: str, blocks: Sequence[BlockTimes]) -> Arm:
    means = [
        float(np.mean([getattr(block, name) for block in blocks])) if blocks else 0.0
        for name in ("tpot_ms", "ttft_ms", "tokens_per_s")
    ]
    return Arm(url, len(blocks), *means)
