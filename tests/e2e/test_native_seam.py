"""A server on an SGLang that carries our diff: the backend takes the paths from the seam, not from hooks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.server import Server, ServerOptions, serve
from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.patching.installation import find_installation
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS

pytestmark = [pytest.mark.e2e]

NEW_TOKENS = 24
SYSTEM = [10 + (7 * position) % 1000 for position in range(160)]
GROUPS = [[10 + (11 * position + 13 * group) % 1000 for position in range(60)] for group in range(2)]
PROMPTS = [[*SYSTEM, *GROUPS[request % 2], 700 + request, 701 + request] for request in range(8)]


@pytest.fixture(scope="module")
def patched_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to put first on PYTHONPATH: the installed SGLang with the diff; the installed one stays as it is.

    Made of links to the installed files; a patched file is a new file in the place of its link.
    """
    installed = find_installation()
    if installed.version not in SUPPORTED_VERSIONS:
        pytest.skip(f"there is no diff for the installed sglang {installed.version}")
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(installed.root / "sglang", root / "sglang", copy_function=os.symlink)
    metadata = (
        Path(str(importlib.metadata.distribution("sglang").locate_file(""))) / f"sglang-{installed.version}.dist-info"
    )
    shutil.copytree(metadata, root / metadata.name)
    assert main(["patch", "apply", "--sglang-path", str(root)]) == 0
    return root


def generate(server: Server) -> list[list[int]]:
    """Greedy continuations of PROMPTS, sent together after the system prompt is in the cache."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    server.post("/generate", {"input_ids": [*SYSTEM, 9], "sampling_params": sampling})
    answers = json.loads(server.post("/generate", {"input_ids": PROMPTS, "sampling_params": sampling}))
    return [answer["output_ids"] for answer in answers]


def tiny_server(*backend: str, **environment: str) -> ServerOptions:
    limits = ("--max-total-tokens", "16384", "--max-running-requests", "16", "--context-length", "4096")
    extra = (*backend, *limits, "--skip-server-warmup")
    return ServerOptions(model=str(tiny_model()), backend=None, extra=extra, environment=environment)


@pytest.fixture(scope="module")
def stock_tokens(stock: Server) -> list[list[int]]:
    return generate(stock)


@pytest.mark.parametrize(
    ("backend", "packs_extend"),
    [
        pytest.param(("--attention-backend", "prefixpack"), True, id="alone"),
        pytest.param(
            ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "prefixpack"),
            False,
            id="decode half of a hybrid backend",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_paths_come_through_the_seam_and_tokens_are_those_of_the_stock_backend(
    patched_sglang: Path, stock_tokens: list[list[int]], backend: tuple[str, ...], packs_extend: bool
) -> None:
    search_path = os.pathsep.join(filter(None, [str(patched_sglang), os.environ.get("PYTHONPATH")]))
    with serve(tiny_server(*backend, PYTHONPATH=search_path)) as server:
        tokens = generate(server)
        state = server.packing_state()
    assert tokens == stock_tokens
    assert state is not None
    assert state["handover"] == "patch"
    counters = state["counters"]
    assert counters["steps_packed"]["decode"] >= NEW_TOKENS - 2
    assert (counters["steps_packed"]["extend"] > 0) == packs_extend
    assert counters["kv_tokens_read"] < counters["kv_tokens_per_request"]
