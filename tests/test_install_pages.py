"""The pages' commands around the package: clone, pip, apt, make, docker, Ray, a router, Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn import _native
from sgl_prefix_attn.demo.server import free_port, serve
from tests.support import forked_server
from tests.support.pages import ROOT, documented, run
from tests.support.word_model import WordServer, prompts_file, word_model
from tests.test_package import QUICK_COMPILER


@pytest.mark.skipif(not list(Path("/var/lib/apt/lists").glob("*_Packages*")), reason="apt has no package lists")
def test_apt_has_the_packages() -> None:
    assert " newly installed, " in run(documented("apt install", more="--simulate"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    line = documented("git clone", {"URL": ROOT})
    assert run(f"{line}\n{documented('cd sgl-prefix-attn')}\npwd", folder) == f"{folder}/sgl-prefix-attn\n"
    return folder / "sgl-prefix-attn"


@pytest.mark.slow
def test_pip_installs_the_clone_beside_sglang(clone: Path, tmp_path: Path) -> None:
    """In an environment that sees SGLang and torch of this one. See tests/test_package.py for the compiler."""
    compiler = tmp_path / "c++"
    compiler.write_text(QUICK_COMPILER.format(module=_native.__file__))
    compiler.chmod(0o755)
    run(f"{sys.executable} -m venv {tmp_path / 'venv'}")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "host.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    variables = {"PREFIXPACK_CUDA": "0", "CC": str(compiler), "CXX": str(compiler)}
    begin = f". {tmp_path / 'venv' / 'bin' / 'activate'}\n"
    run(begin + documented("pip install ."), clone, **variables)
    assert "replan_growth" in run(f"{begin}cd /; sgl-prefix-attn settings", clone)
    run(begin + documented("pip install 'sgl-prefix-attn[ray]'"), tmp_path)
    assert run(f"{begin}python -c 'import ray, sgl_prefix_attn; print(sgl_prefix_attn.__file__)'", tmp_path).startswith(
        str(site)
    )
    assert "Would install sglang-0.5.16" in run(
        documented("pip install sglang==", more=f"--dry-run --no-deps --ignore-installed --target {tmp_path / 'x'}")
    )


@pytest.mark.slow
@pytest.mark.parametrize("line", [documented("make figures"), documented("make bench"), documented("make demo")])
def test_make_in_the_clone(clone: Path, line: str) -> None:
    """With this environment instead of one that `make setup` would make."""
    shutil.copy(_native.__file__, clone / "sgl_prefix_attn")
    run(f"{line} PYTHON=true VENV={sys.prefix} DEMO_ARGS='--requests 20 --samples 4'", clone)
    assert run("git diff --stat -- '*.md'", clone) == "", "the tables are those of the results"


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment() -> None:
    """`make wheel`, then the trial of docs/install.md in at most ten minutes, and a demo."""
    words = {"make wheel": "make wheel-trial", "python3.12": sys.executable}
    done = run(documented("make wheel PYTHON=", words), ROOT, PREFIXPACK_CUDA="0")
    assert "in all; the request was answered, with packed steps in the metrics" in done


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0,
    reason="no docker",
)
def test_the_image_is_built() -> None:
    run(documented("docker build"), ROOT)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on PATH")
def test_the_picture_of_the_dashboard(tmp_path: Path) -> None:
    picture = {"docs/img/dashboard.png": tmp_path / "dashboard.png"}
    run(documented("python -m examples.grafana.render", picture, "--seconds 20"))
    assert (tmp_path / "dashboard.png").stat().st_size > 20_000


@pytest.mark.slow
def test_a_job_of_ray_sees_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    pytest.importorskip("ray.dashboard.modules.job.sdk", reason="ray[default] is not installed")
    (tmp_path / "train.py").write_text("import os\nprint('wrap is', os.environ['PREFIXPACK_WRAP'])\n")
    monkeypatch.chdir(tmp_path)  # jobs start in the folder of the cluster
    context = ray.init(include_dashboard=True, num_cpus=1, dashboard_port=free_port())
    try:
        job = documented("ray job submit")
        printed = run(job, tmp_path, RAY_ADDRESS=f"http://{context.dashboard_url}")
    finally:
        ray.shutdown()
    assert "wrap is 1" in printed


@pytest.mark.slow
@pytest.mark.e2e
def test_the_router_keeps_the_samples_of_a_prompt_together(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")
    options = WordServer(
        str(word_model(tmp_path / "model")), "prefixpack", log_folder=tmp_path,
        extra=("--max-total-tokens", "16384", "--enable-metrics"), starter=forked_server.start_without_warm_up,
    )  # fmt: skip
    prompts, port = prompts_file(tmp_path / "prompts.txt", 4), free_port()
    url = f"http://127.0.0.1:{port}"
    with serve(options) as a, serve(options) as b:
        hosts = {"http://host-a:30000": a.url, "http://host-b:30000": b.url}
        line = documented(
            "python -m sglang_router.launch_router", hosts, f"--port {port} --prometheus-port {free_port()}"
        )
        router = subprocess.Popen(["bash", "-c", f"exec {line.replace('python', sys.executable, 1)}"])
        try:
            run(f"curl -sf --retry 60 --retry-all-errors --retry-delay 1 {url}/health")
            files = {"http://host-r:30000": url, "prompts.txt": prompts}
            groups = run(documented("python examples/sglang_router.py", files, "--max-new-tokens 4")).splitlines()
        finally:
            router.terminate()
            router.wait(20)
        served = [requests_of(server.get("/metrics")) for server in (a, b)]
    assert [len(json.loads(group)) for group in groups] == [16] * 4
    assert sorted(served) == [32, 32]


def requests_of(metrics: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith("sglang:num_requests_total{")]
    return float(line.split()[-1])


@pytest.mark.slow
@pytest.mark.e2e
def test_the_batch_commands(tmp_path: Path) -> None:
    model, answers = word_model(tmp_path / "model"), tmp_path / "answers.jsonl"
    cpu = "--server-args '--max-total-tokens 4096 --context-length 1024' --quiet"
    run(documented("python -m sgl_prefix_attn batch examples/", {"MODEL": model, "answers.jsonl": answers}, cpu))
    assert len(answers.read_text().splitlines()) == 5
    files = {"MODEL": model, "in.jsonl": "examples/batch.jsonl", "out.jsonl": tmp_path / "out.jsonl"}
    options = {"[--ordered]": "--ordered", "[--engines N]": "--engines 2", '[--server-args "..."]': cpu}
    try:
        import ray  # noqa: F401

        ways = ["", "--ray"]
    except ImportError:
        ways = [""]
    for way in ways:
        line = documented("python -m sgl_prefix_attn batch in.jsonl", {**files, **options, "[--ray [ADDRESS]]": way})
        run(f"{line} --overwrite")
        ordered = [json.loads(line)["custom_id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert ordered == ["city-1", "city-2", "city-3", "chat-1", "chat-2"]
