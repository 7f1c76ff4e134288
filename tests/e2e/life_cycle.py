"""Random life of a rollout engine: requests, weight updates, flushes, pauses, aborts, released memory, in any order.

A sequence leaves out what SGLang itself does not survive: releasing memory or flushing with an update while requests
are in the engine, and resuming what was not released.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerError
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e.conftest import Tokens, tokens_of

LONGEST = 96  # output tokens
COUNTS = (1, 2, 8, 8, 8, 24, 24, LONGEST)  # often the same: requests then end together
SECONDS = 60.0  # for a call that has to wait for running requests
TAGS = ("kv_cache", "weights", "cuda_graph")
PAUSES = ("abort", "retract", "in_place")

# judge(which prompt, tokens): asserts that they begin the greedy continuation of the prompt.
Judge = Callable[[int, list[int]], None]


def prompts(vocabulary: Vocabulary, family: int = 0) -> list[Request]:
    """Twelve prompts over four documents, whole and in part, half of them behind a system prompt.

    They fork at many depths, so that a request in another's place, or a node that has been split, shows in the tokens.
    Prompts of two families share nothing.
    """
    shared, private = 21 + 2 * family, 22 + 2 * family  # seeds
    system = vocabulary.tokens(30, shared, 9)
    documents = [vocabulary.tokens(110 + 30 * number, shared, number) for number in range(4)]
    prompts = []
    for number in range(12):
        document = documents[number % 4]
        begin = document[: len(document) * (number % 3 + 1) // 3]
        own = vocabulary.tokens(5 + number, private, number)
        prompts.append(Request(f"life-{number}", system * (number % 2) + begin + own, LONGEST))
    return prompts


def other_weights(model: Path, folder: Path) -> Path:
    """The model in another folder with other weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def update_from_disk(server: Server, model: Path, *, flush: bool) -> None:
    answer = server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush}, SECONDS)
    assert json.loads(answer)["success"], answer


def update_from_tensors(server: Server, model: Path, *, flush: bool) -> None:
    """The tensors stay in this process's shared memory, as those of a trainer on the same host do."""
    tensors = load_file(next(model.glob("*.safetensors")))
    before = torch.multiprocessing.get_sharing_strategy()
    # Handles of the default strategy need a key that only processes of one family share.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(list(tensors.items()))
        payload = base64.b64encode(buffer.getvalue()).decode()
        body = {"serialized_named_tensors": [payload], "flush_cache": flush}
        with _session(server):
            answer = server.post("/update_weights_from_tensor", body, SECONDS)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert json.loads(answer)["success"], answer


@contextlib.contextmanager
def _session(server: Server) -> Iterator[None]:
    """SGLang 0.5.23 takes tensors between these calls only."""
    sessions = "/begin_weight_update" in json.loads(server.get("/openapi.json"))["paths"]
    if sessions:
        server.post("/begin_weight_update", {}, SECONDS)
    yield
    if sessions:
        server.post("/end_weight_update", {}, SECONDS)


@dataclass
class Outstanding:
    """A request under way.

    Attributes:
        which: its prompt.
        count: output tokens that it asks for.
        judge: judges its tokens.
        aborted: whether it may have been aborted.
    """

    answer: Future[str]
    which: int
    count: int
    judge: Judge
    aborted: bool = False

    def check(self) -> None:
        """Waits for the answer and has its tokens judged."""
        try:
            answer = json.loads(self.answer.result(SECONDS))
        except ServerError as error:
            if self.aborted and "abort" in str(error).lower():
                return
            raise
        finish, tokens = answer["meta_info"]["finish_reason"]["type"], answer["output_ids"]
        assert finish == "length" or (finish == "abort" and self.aborted), finish
        self.judge(self.which, tokens)
        assert len(tokens) == self.count or (finish == "abort" and len(tokens) < self.count)


@dataclass
class Engine:
    """A server under a random sequence of calls.

    Attributes:
        models: folders with the two sets of weights.
        judges: of the tokens, by set of weights.
        pins: whether the server has a budget for pins.
        releases: how often memory is released, in comparison with the other calls.
        done: calls made so far, with the tags of memory, for the message of a failure.
    """

    server: Server
    requests: Sequence[Request]
    models: tuple[Path, Path]
    judges: tuple[Judge, Judge]
    pool: ThreadPoolExecutor
    draw: random.Random
    pins: bool = False
    releases: int = 1
    weights: int = 0
    paused: str | None = None
    released: set[str] = field(default_factory=set)
    outstanding: list[Outstanding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    # Calls that may come at any time ----------------------------------------------------------------------------------

    def send(self) -> None:
        if self.released:
            return
        for _ in range(self.draw.randint(1, 8)):
            which, count = self.draw.randrange(len(self.requests)), self.draw.choice(COUNTS)
            sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
            body = {"input_ids": list(self.requests[which].prompt), "sampling_params": sampling}
            answer = self.pool.submit(self.server.post, "/generate", body, SECONDS)
            self.outstanding.append(Outstanding(answer, which, count, self.judges[self.weights]))

    def wait(self) -> None:
        time.sleep(self.draw.random() * 0.1)

    def flush(self) -> None:
        if self.outstanding:
            with contextlib.suppress(ServerError):  # SGLang refuses while it works on a request
                self.server.post("/flush_cache", {}, SECONDS)
        else:
            self.server.flush_cache()

    def abort(self) -> None:
        self.server.post("/abort_request", {"abort_all": True}, SECONDS)
        for request in self.outstanding:
            request.aborted = True

    def pause(self) -> None:
        if self.paused is None:
            self.paused = self.draw.choice(PAUSES)
            if self.paused == "abort":
                for request in self.outstanding:
                    request.aborted = True
            self.server.post("/pause_generation", {"mode": self.paused}, SECONDS)

    def carry_on(self) -> None:
        if self.paused is not None and not self.released:
            self.server.post("/continue_generation", {}, SECONDS)
            self.paused = None

    def pin(self) -> None:
        """Pins the beginning of a prompt, or releases that pin. The server may refuse: over budget, or no such pin."""
        if not self.pins:
            return
        prompt = self.draw.choice(self.requests).prompt
        body = json.dumps({"token_ids": prompt[: self.draw.choice([60, 120, 200])]}).encode()
        request = urllib.request.Request(
            f"{self.server.url}/prefixpack/pins", body, method=self.draw.choice(["POST", "POST", "DELETE"])
        )
        try:
            urllib.request.urlopen(request, timeout=SECONDS).close()
        except urllib.error.HTTPError as refused:
            if refused.code not in (404, 409):
                raise

    def update(self) -> None:
        """The same weights again, with requests in the engine, whose KV stays."""
        self._update(self.models[self.weights], flush=False)

    # Calls that need an idle engine -----------------------------------------------------------------------------------

    def other_weights(self) -> None:
        if self.drain() and "weights" not in self.released:
            self.weights = 1 - self.weights
            self._update(self.models[self.weights], flush=True)

    def release(self) -> None:
        left = [tag for tag in TAGS if tag not in self.released]
        if left and self.drain():
            tags = self.draw.sample(left, self.draw.randint(1, len(left)))
            self.done[-1] += f"({'+'.join(sorted(tags))})"
            self.server.post("/release_memory_occupation", {"tags": tags}, SECONDS)
            self.released.update(tags)

    def resume(self) -> None:
        if self.released:
            tags = self.draw.sample(sorted(self.released), self.draw.randint(1, len(self.released)))
            self.done[-1] += f"({'+'.join(sorted(tags))})"
            self.server.post("/resume_memory_occupation", {"tags": tags}, SECONDS)
            self.released.difference_update(tags)
            if "weights" in tags:  # a GPU has lost them
                self._update(self.models[self.weights], flush=False)

    def drain(self) -> bool:
        """Waits until no request is in the engine, and flushes. Returns False if a pause keeps some."""
        if self.outstanding and self.paused is not None:
            return False
        self.join()
        self.server.flush_cache()  # succeeds once the engine is idle
        return True

    def join(self) -> None:
        """Waits for all answers. The prefix cache stays for the next sequence."""
        for request in self.outstanding:
            request.check()
        self.outstanding.clear()

    def _update(self, model: Path, *, flush: bool) -> None:
        if "weights" not in self.released:
            self.draw.choice([update_from_disk, update_from_tensors])(self.server, model, flush=flush)

    # A sequence -------------------------------------------------------------------------------------------------------

    def live(self, calls: int) -> None:
        """One sequence of calls. Afterwards the engine is idle and has its first weights."""
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.send, 6), (self.wait, 3), (self.flush, 1), (self.abort, 1), (self.pause, 3), (self.carry_on, 3),
            (self.pin, 2), (self.update, 2), (self.other_weights, 1), (self.release, self.releases), (self.resume, 3),
        ]  # fmt: skip
        functions, weights = zip(*kinds, strict=True)
        self.done = []
        self._call(self.send)
        for call in self.draw.choices(functions, weights, k=calls):
            self._call(call)
        while self.released:
            self._call(self.resume)
        self._call(self.carry_on)
        self._call(self._end)

    def _end(self) -> None:
        self.join()
        if self.weights:
            self.other_weights()

    def _call(self, call: Callable[[], Any]) -> None:
        self.done.append(getattr(call, "__name__", "?"))
        call()


def same_as(expected: Tokens) -> Judge:
    """Accepts the tokens of `expected` only."""

    def judge(which: int, tokens: list[int]) -> None:
        assert tokens == expected[which][0][: len(tokens)]

    return judge


def stock_tokens(stock: Server, requests: Sequence[Request], models: tuple[Path, Path]) -> tuple[Tokens, Tokens]:
    """Tokens of a stock server with either set of weights; it has the first afterwards."""
    first = tokens_of(replay(stock.url, requests))
    stock.flush_cache()
    try:
        update_from_tensors(stock, models[1], flush=True)
        second = tokens_of(replay(stock.url, requests))
    finally:
        stock.flush_cache()
        update_from_disk(stock, models[0], flush=True)
    return first, second
