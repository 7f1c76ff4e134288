"""A server on an SGLang that carries our diff: the backend takes the paths from the seam, not from hooks."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.workload import Vocabulary
from sgl_prefix_attn.patching.installation import find_installation
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.e2e import workloads
from tests.e2e.conftest import BACKEND, STOCK, Expected, Launch, replay_cached, state_of, tokens_of

pytestmark = pytest.mark.e2e


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


@pytest.mark.parametrize(
    ("arguments", "modes"),
    [
        pytest.param((), ("decode", "extend"), id="alone"),
        pytest.param(("--prefill-attention-backend", STOCK), ("decode",), id="decode half", marks=pytest.mark.slow),
    ],
)
def test_paths_come_through_the_seam_and_tokens_are_those_of_the_stock_backend(
    patched_sglang: Path,
    launch: Launch,
    expected: Expected,
    vocabulary: Vocabulary,
    arguments: tuple[str, ...],
    modes: tuple[str, ...],
) -> None:
    search_path = os.pathsep.join(filter(None, [str(patched_sglang), os.environ.get("PYTHONPATH")]))
    requests = workloads.three_levels(vocabulary)
    with launch(BACKEND, *arguments, environment={"PYTHONPATH": search_path}) as server:
        answers, _ = replay_cached(server, requests, *modes)
        assert state_of(server)["handover"] == "patch"
    assert tokens_of(answers) == expected(requests)
