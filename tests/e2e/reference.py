"""What transformers computes for the same model and prompts: a reference that shares no code with SGLang."""

from __future__ import annotations

from pathlib import Path

import torch

from sgl_prefix_attn.demo.workload import Request

# Greedy tokens of two correct backends may differ where the two best logits are as near to each other as fp32 rounding
# moves them. For the tiny models that is about 4e-6 (root mean square), so the prompts must keep a distance from it.
SMALLEST_MARGIN = 4e-5


class Reference:
    """The model in `folder`, run by transformers in fp32 without a KV cache."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)

    def check(self, request: Request, tokens: list[int]) -> None:
        """Asserts that `tokens` is the greedy continuation of the request, with no near tie on the way."""
        best = self._scores(request, tokens).topk(2)
        assert tokens == best.indices[:, 0].tolist(), request.name
        assert (best.values[:, 0] - best.values[:, 1]).min() > SMALLEST_MARGIN, request.name

    def deficits(self, request: Request, tokens: list[int]) -> torch.Tensor:
        """[tokens] fp32: how far the logit of each token is below the best one's."""
        scores = self._scores(request, tokens)
        return scores.max(dim=1).values - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def _scores(self, request: Request, tokens: list[int]) -> torch.Tensor:
        whole = torch.tensor([[*request.prompt, *tokens]], device=self._model.device)
        with torch.no_grad():
            scores = self._model(whole).logits[0, len(request.prompt) - 1 : -1].cpu()
            for token, bias in request.logit_bias:
                scores[:, token] += bias
        return scores
