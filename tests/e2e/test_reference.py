"""What the other end-to-end tests compare with is right itself, and far enough from a tie to be compared with.

Greedy tokens of two correct backends may differ where the two best logits are as near to each other as fp32 rounding
moves them. For the tiny model that is about 4e-6 (root mean square), so these workloads must keep a distance from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import workloads
from tests.e2e.conftest import Tokens

pytestmark = pytest.mark.e2e

SMALLEST_MARGIN = 4e-5


@pytest.fixture(scope="module")
def logits(model: Path) -> Callable[[Request, list[int]], torch.Tensor]:
    """logits(request, tokens): [tokens, vocabulary], what transformers computes before each of the tokens."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def compute(request: Request, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            scores = reference(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
        for token, bias in request.logit_bias:
            scores[:, token] += bias
        return scores

    return compute


@pytest.mark.parametrize("name", workloads.ALL)
def test_stock_tokens_are_those_of_transformers_with_room_to_spare(
    expected: Callable[[Sequence[Request]], Tokens],
    logits: Callable[[Request, list[int]], torch.Tensor],
    vocabulary: Vocabulary,
    name: str,
) -> None:
    requests = workloads.ALL[name](vocabulary)
    for request, samples in zip(requests, expected(requests), strict=True):
        best = logits(request, samples[0]).topk(2)
        assert samples == [best.indices[:, 0].tolist()] * request.samples
        assert (best.values[:, 0] - best.values[:, 1]).min() > SMALLEST_MARGIN, request.name
