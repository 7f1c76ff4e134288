"""Random rollouts with refills on a real server."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from sgl_prefix_attn.demo.client import Sample, replay
from sgl_prefix_attn.demo.server import Server
from sgl_prefix_attn.demo.workload import Request

# KV tokens that hold the prompts and a few outputs, so SGLang retracts requests.
SMALL_POOL = 700
# 0.5.23 admits so few that none has to be retracted. Then, one is at every 30th step.
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "30"}


@dataclasses.dataclass
class Rollout:
    """Requests for few prompts, which arrive while others decode; some are aborted.

    Attributes:
        retractions: of all requests of all runs.
    """

    server: Server
    stock: dict[tuple[int, ...], list[int]]
    prompts: list[Request]
    retractions: int = 0

    def run_until_retracted(self, seeds: int, count: int = 48, seconds: float = 1.0) -> None:
        """Runs some seeds, and up to three more if no request was retracted: a fast machine has fewer at once."""
        for seed in range(seeds + 3):
            if seed < seeds or self.retractions == 0:
                self.run(seed, count, seconds)
        assert self.retractions > 0

    def run(self, seed: int, count: int, seconds: float) -> None:
        """Runs the schedule of a seed on an empty cache and compares all tokens. All arrive within `seconds`."""
        self.server.flush_cache()
        draw = np.random.default_rng(seed)
        requests = [
            dataclasses.replace(
                self.prompts[int(draw.integers(len(self.prompts)))],
                name=f"{seed}-{number}",
                max_new_tokens=int(draw.integers(1, 61)),
                arrival_seconds=float(draw.uniform(0, seconds)),
            )
            for number in range(count)
        ]
        victims = {request.name for request in requests if request.max_new_tokens > 30 and draw.random() < 0.15}
        told: set[str] = set()

        def abort(request: Request, sample: Sample) -> None:
            if request.name in victims - told and len(sample.tokens) >= 5:
                told.add(request.name)
                threading.Thread(target=self.server.post, args=("/abort_request", {"rid": sample.request_id})).start()

        for answer in replay(self.server.url, requests, on_token=abort):
            (sample,) = answer.samples
            stock = self.stock[answer.request.prompt]
            if sample.finish == "abort":
                assert answer.request.name in victims
                # With speculation, SGLang also returns the tokens that its last step accepted beyond the limit.
                assert sample.tokens[: len(stock)] == stock[: len(sample.tokens)]
            else:
                assert sample.tokens == stock[: answer.request.max_new_tokens]
            self.retractions += sample.retractions
