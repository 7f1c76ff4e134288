"""Other kinds of models, and two GPUs: tokens as near to those of transformers as the stock backend's are.

    python -m pytest -v -s -m gpu tests/e2e/test_models_on_gpu.py --results models.json

In 16 bits tokens depend on the batch and the kernels, and experts make small errors large. So transformers judges every
token in fp32, and the stock backend's own tokens say how near is near. The file has failed cases as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.provenance import git_commit, machine_name, package_versions
from sgl_prefix_attn.demo.client import replay
from sgl_prefix_attn.demo.server import Server, ServerOptions, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model
from sgl_prefix_attn.demo.workload import Request, Vocabulary
from tests.e2e import life_cycle
from tests.e2e.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Greedy samples of a prompt part at few places, so a mean over twelve prompts would vary by a tenth.
REQUESTS = [
    dataclasses.replace(request, name=f"{request.name}-{family}", max_new_tokens=48, samples=4)
    for family in range(4)
    for request in life_cycle.prompts(Vocabulary(RESERVED_TOKENS, VOCABULARY), family)
]
USUAL = (
    "--max-total-tokens", "32768", "--context-length", "4096", "--max-running-requests", "64", "--dtype", "bfloat16",
    "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "64", "--mem-fraction-static", "0.5",
)  # fmt: skip
WRAP = {"PREFIXPACK_WRAP": "1", "PREFIXPACK_ROUTE": "packed"}
# For most models with experts on Hopper, not with DP attention, SGLang takes FlashInfer's reductions fused with norms.
# Their memory is mapped for NVLink multicast, where a stock server is thought to have hung.
TP = ("--tp", "2", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PAGED = ("--decode-attention-backend", "trtllm_mha")  # with fa3 for prefill, as SGLang asks before 0.5.19
DP = (*TP, "--dp", "2", "--enable-dp-attention")
ROUNDS = 3
NAMED = {"idle", "compute_bound", "layer_variant"}


@dataclasses.dataclass
class Run:
    """What a server answered and ran packed: tokens by prompt, of every round and sample.

    Attributes:
        alone: tokens of a stock server when each prompt comes alone. Rounds of one server have the same batches, and so
            the same bits; other batches say how far two runs of it agree.
    """

    tokens: dict[str, list[list[int]]]
    steps: dict[str, int]
    alone: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)


def options(variant: str, stock: str, arguments: tuple[str, ...], ours: bool) -> ServerOptions:
    environment = {"HF_HUB_OFFLINE": "1"} | NO_MULTICAST | (WRAP if ours else {})
    return ServerOptions(str(tiny_model(variant)), stock, "cuda", (*USUAL, *arguments), environment, 200.0)


def run(variant: str, stock: str, arguments: tuple[str, ...], ours: bool) -> Run:
    with serve(options(variant, stock, arguments, ours)) as server:
        found = tokens_of(server, [REQUESTS] * ROUNDS)
        state = server.packing_state()
        if not ours:
            assert state is None
            return Run(found, {}, tokens_of(server, [[request] for request in REQUESTS]))
    counters = state["counters"]
    print(f"{variant} {arguments}: layers {state['layers']}, fallbacks {counters['fallbacks']}")
    assert set(counters["fallbacks"]) <= NAMED
    return Run(found, counters["steps_packed"])


def tokens_of(server: Server, rounds: list[list[Request]]) -> dict[str, list[list[int]]]:
    """Tokens by prompt when the requests of each round are sent at once."""
    found: dict[str, list[list[int]]] = {request.name: [] for request in REQUESTS}
    for requests in rounds:
        for answer in replay(server.url, requests):
            found[answer.request.name] += [sample.tokens for sample in answer.samples]
    return found


class Prefills:
    """Logits of the stock backend in a prefill of prompt and tokens, in 16 bits as well."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def deficits(self, request: Request, tokens: list[int]) -> torch.Tensor:
        body = {
            "input_ids": [*request.prompt, *tokens], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True,
            "logprob_start_len": len(request.prompt) - 1, "top_logprobs_num": 1,
        }  # fmt: skip
        meta = json.loads(self._server.post("/generate", body))["meta_info"]
        pairs = zip(meta["input_top_logprobs"][1:], meta["input_token_logprobs"][1:], strict=True)
        return torch.tensor([best[0][0] - own[0] for best, own in pairs])


def deficits(reference: Reference | Prefills, run: Run) -> list[torch.Tensor]:
    """For each sample, how far the logit of each token is below the best one."""
    found = []
    for request in REQUESTS:
        known: dict[tuple[int, ...], torch.Tensor] = {}  # most samples of a prompt have the same tokens
        for tokens in run.tokens[request.name]:
            if (key := tuple(tokens)) not in known:
                known[key] = reference.deficits(request, tokens)
            found.append(known[key])
    return found


def best_share(far: list[torch.Tensor]) -> float:
    """Mean share of a sample's tokens before the first that is not the best one."""
    shares = []
    for sample in far:
        worse = (sample > 0).nonzero()
        shares.append(int(worse[0]) / len(sample) if len(worse) else 1.0)
    return sum(shares) / len(shares)


def agreement(one: Run, other: Run) -> float:
    """Mean share of a sample's tokens before its first difference from another sample of the prompt."""
    shares = []
    for name, samples in one.tokens.items():
        for first, second in itertools.product(samples, other.tokens[name]):
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=True))
            shares.append(sum(1 for _ in equal) / len(first))
    return sum(shares) / len(shares)


def rounds(run: Run) -> list[Run]:
    """The first and the last round of a run."""
    of_one = {name: len(samples) // ROUNDS for name, samples in run.tokens.items()}
    return [
        Run({name: samples[part][: of_one[name]] for name, samples in run.tokens.items()}, {})
        for part in (slice(None), slice(-next(iter(of_one.values())), None))
    ]


def too_far(far: torch.Tensor, usually_far: torch.Tensor) -> bool:
    """Whether tokens with deficits `far` are worse than those of the stock backend with `usually_far`."""
    often, usually = ((deficits > 0.5).float().mean() for deficits in (far, usually_far))
    return not (far.mean() < 1.5 * usually_far.mean() + 0.01 and often < 1.5 * usually + 0.01)  # NaN is too far


def note(path: str | None, case: str, found: dict[str, Any]) -> None:
    """Adds a case to the file of results."""
    print(f"{case}: {json.dumps(found)}")
    if path is not None:
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        origin = {"commit": git_commit(), "machine": machine_name(), "versions": package_versions()}
        file.write_text(json.dumps({**known, case: {**origin, **found}}, indent=1) + "\n")


@pytest.mark.parametrize(
    ("variant", "stock", "arguments"),
    [
        pytest.param("llama_gpu", "fa3", (), id="llama"),
        pytest.param("gpt_oss_gpu", "triton", (), id="gpt_oss"),
        pytest.param("llama4_gpu", "fa3", (), id="llama4"),
        pytest.param("qwen3_next_gpu", "triton", (), id="qwen3_next"),
        pytest.param("llama_gpu", "fa3", PAGED, id="trtllm_mha"),
        pytest.param("llama_gpu", "fa3", (*PAGED, "--kv-cache-dtype", "fp8_e4m3"), id="trtllm_mha, fp8"),
        pytest.param("llama_gpu", "fa3", TP, id="tp"),
        pytest.param("qwen3_moe_gpu", "fa3", TP, id="experts, tp"),
        pytest.param("qwen3_moe_gpu", "fa3", DP, id="experts, dp attention"),
    ],
)
def test_tokens_are_as_near_as_the_stock_backends(
    request: pytest.FixtureRequest, variant: str, stock: str, arguments: tuple[str, ...]
) -> None:
    if "--tp" in arguments and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    theirs, ours = (run(variant, stock, arguments, packed) for packed in (False, True))
    # SGLang reads these weights in another order than transformers (`tiny_model`): prefills of the stock backend judge.
    if variant == "llama4_gpu":
        with serve(options(variant, stock, arguments, False)) as server:
            judged = [deficits(Prefills(server), tokens) for tokens in (ours, theirs)]
    else:
        reference = Reference(tiny_model(variant), "cuda")
        judged = [deficits(reference, tokens) for tokens in (ours, theirs)]
    far, usually_far = map(torch.cat, judged)
    best, usually_best = map(best_share, judged)
    alike, usually_alike = agreement(ours, theirs), agreement(*rounds(theirs))
    kernels = usually_alike
    if arguments[: len(PAGED)] == PAGED:  # and how often two stock backends agree
        kernels = agreement(theirs, run(variant, stock, arguments[len(PAGED) :], False))
    measures = {
        "steps_packed": ours.steps, "agreement_with_stock": alike, "agreement_of_stocks_rounds": usually_alike,
        "agreement_of_stock_with_prompts_alone": agreement(theirs, Run(theirs.alone, {})),
        "agreement_of_stock_backends": kernels,
        "best_tokens_before_others": best, "stock_best_tokens_before_others": usually_best,
        **{
            f"{name}_deficits": {"mean": found.mean().item(), "above_0.5": (found > 0.5).float().mean().item()}
            for name, found in (("stock", usually_far), ("our", far))
        },
        "distinct_tokens": len({token for samples in ours.tokens.values() for tokens in samples for token in tokens}),
    }  # fmt: skip
    note(request.config.getoption("results"), request.node.callspec.id, measures)
    assert ours.steps["decode"] > 10 * ROUNDS, ours.steps
    assert not too_far(far, usually_far)
    # bf16 logits tie, so kernels part sooner than two runs of one do.
    assert alike > usually_alike / 2
    assert measures["distinct_tokens"] > 50
