"""The launch lines of the pages start servers that pack: on a CPU with its options added, on a GPU as they stand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn.demo.server import serve, start_process
from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.support import forked_server
from tests.support.launch_line import launch_line
from tests.support.pages import ROOT, documented

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.e2e, pytest.mark.gpu if GPU else pytest.mark.slow]
SIZES = ("--max-total-tokens", "20000", "--skip-tokenizer-init", "--enable-metrics")
OF_GPU = (
    "--dtype", "bfloat16", "--mem-fraction-static", "0.5", "--cuda-graph-max-bs-decode", "16",
    "--disable-prefill-cuda-graph",
)  # fmt: skip
OF_CPU = ("--device", "cpu", "--dtype", "float32", "--grammar-backend", "none", "--sleep-on-idle")
# SGLang calls it on a CPU too, in the actors of Ray.
NO_DEVICE = "import torch\ntorch.cuda.set_device = lambda device: None\n"
LINES = [
    documented("python -m sglang.launch_server --model-path MODEL"),
    documented("python -m sglang.launch_server --attention-backend prefixpack --enable-mixed-chunk"),
    documented("PREFIXPACK_WRAP=1 python -m sglang.launch_server --model-path MODEL"),
    documented("PREFIXPACK_WRAP=1 python -m sglang.launch_server --model-path ..."),
    documented("PREFIXPACK_WRAP=1 python -m sglang.launch_server --use-ray"),
    documented("PREFIXPACK_WRAP=fa3,triton python -m sglang.launch_server"),
    documented("PREFIXPACK_SHARED_PREFILL=0 PREFIXPACK_WRAP=1 python -m sglang.launch_server"),
    documented("PREFIXPACK_CONFIG=prefixpack.toml PREFIXPACK_WORKERS=16 python -m sglang.launch_server"),
    documented("PREFIXPACK_LIVE_TESTS=1 python -m sglang.launch_server"),
    documented("PREFIXPACK_PIN_BUDGET_PERCENT=30 PREFIXPACK_RETENTION=reuse python -m sglang.launch_server"),
]


@pytest.fixture
def ray_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a local cluster; without a GPU, it is told that it has one."""
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    if not GPU:
        (tmp_path / "sitecustomize.py").write_text(NO_DEVICE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    context = ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.mark.parametrize("line", LINES)
def test_the_launch_line_of_a_page(line: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = f"--model-path {tiny_model('llama_gpu' if GPU else 'llama')}"
    line = re.sub(r" --model-path( MODEL)?|$", f" {model}", line, count=1)
    if "PREFIXPACK_WRAP" not in line and "--attention-backend" not in line:
        line = f"{line} --attention-backend prefixpack"  # among what the dots stand for
    config = tmp_path / "prefixpack.toml"
    config.write_text((ROOT / "docs" / "settings.md").read_text().partition("```toml\n")[2].partition("```")[0])
    line = line.replace("=prefixpack.toml", f"={config}")
    variables = {"PREFIXPACK_ROUTE": "packed"} if GPU else {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    start = start_process if GPU else forked_server.start
    if "--use-ray" in line:
        start = start_process
        variables["RAY_ADDRESS"] = request.getfixturevalue("ray_with_a_gpu")
    if not GPU:
        line = line.replace("fa3", "torch_native")
    options = launch_line(line, tmp_path, *SIZES, *(OF_GPU if GPU else OF_CPU), starter=start, **variables)
    with serve(options) as server:
        sampling = {"n": 8, "max_new_tokens": 16, "ignore_eos": True}
        body = {"input_ids": list(range(10, 410)), "sampling_params": sampling}
        assert len(json.loads(server.post("/generate", body))) == 8
        state = server.packing_state()
        assert state is not None, server.log_text()[-3000:]
        assert state["counters"]["steps_packed"]["decode"] > 4
        if "--use-ray" not in line:  # metrics of its actors do not reach the server, SGLang's neither
            (steps,) = re.findall(r'prefixpack_packed_steps_total{mode="decode".*} (\S+)', server.get("/metrics"))
            assert float(steps) > 0
        if "PIN_BUDGET" in line:
            assert json.loads(server.get("/prefixpack/pins"))["schedulers"][0]["budget_tokens"] == 6000
        if "PREFIXPACK_CONFIG" in line:
            assert state["counters"]["steps_packed"]["extend"] == 0
