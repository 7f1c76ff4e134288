"""Wrong attention shows in the tokens of the tiny models, also beside the rounding of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.e2e.test_models_on_gpu import REQUESTS, too_far


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].float().argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("usual", "far", "expected"),
    [
        ([0.1, 0.1], [0.15, 0.15], False), ([0.1, 0.1], [0.17, 0.17], True),  # the mean
        ([0.1, 0.1], [0.1, float("nan")], True),
        ([0.4] * 4, [0.1, 0.1, 0.1, 0.6], True), ([0.4, 0.4, 0.4, 0.6], [0.1, 0.1, 0.1, 0.6], False),  # large ones
    ],
)  # fmt: skip
def test_tokens_are_too_far_in_the_mean_or_too_often(usual: list[float], far: list[float], expected: bool) -> None:
    assert too_far(torch.tensor(far), torch.tensor(usual)) is expected


@pytest.mark.slow
def test_a_gpt_oss_that_ignores_its_sinks_is_farther_off_than_16_bits() -> None:
    """In the full layers, which are the ones that run packed."""
    reference = pytest.importorskip("tests.e2e.reference").Reference(tiny_model("gpt_oss_gpu"))
    rounded, wrong = (type(reference)(tiny_model("gpt_oss_gpu")) for _ in range(2))
    rounded._model.bfloat16()
    for layer, kind in zip(wrong._model.model.layers, wrong._model.config.layer_types, strict=True):
        if kind == "full_attention":
            layer.self_attn.sinks.data.fill_(-1e4)
    usual, far = (
        torch.cat([reference.deficits(it, greedy(other._model, it.prompt, 16)) for it in REQUESTS[:5]])
        for other in (rounded, wrong)
    )
    assert too_far(far, usual)
    assert not too_far(usual, usual)
