"""What the doctor says at once: before torch or SGLang are imported, and without what their imports print."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.sglang_plugin.doctor import model_path

_RUN = """
import sys
from sgl_prefix_attn.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
sys.exit(99 if {"torch", "sglang"} & sys.modules.keys() else status)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--help"], 0, "--gpu NAME"),
        ([], 2, "no --model-path"),
        (["--gpu", "h2000"], 2, "did you mean h200?"),
        (["--modle-path", "m"], 2, "--modle-path: did you mean --model-path?"),
        (["sglang serve m --gpu h100"], 2, "--gpu is an option of the doctor"),
        (["--model-path", ".", "--speculative-draft-model-path", "./nope"], 2, "the folder . has no config.json"),
        (["--config", "c", "--speculative-draft-model-path=./nope"], 2, "no such folder: ./nope"),
        (["--model-path", "nope"], 2, "no such folder: nope; no such model in the hub's cache "),
        (["bash", "run.sh"], 2, "'bash' is no launch argument"),
    ],
)
def test_answers_that_need_neither_torch_nor_sglang(arguments: list[str], status: int, told: str) -> None:
    command = [sys.executable, "-c", _RUN, "doctor", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, told in found.stdout + found.stderr) == (status, True), found


def test_nothing_but_the_answer_is_printed() -> None:
    command = [sys.executable, "-m", "sgl_prefix_attn", "doctor", "--gpu", "h200", "--model-path", str(tiny_model())]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert found.stderr == ""
    assert found.stdout.startswith("SGLang ")
    assert "\nAttention backend: fa3; " in found.stdout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URLs that the hub is asked for; nothing answers."""
    urls: list[str] = []

    def ask(url: str, **options: object) -> None:
        urls.append(url)
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    return urls


def problem(name: str, **environ: str) -> str | None:
    return model_path.problem(["--model-path", name, "--revision=r"], environ)


def test_only_a_name_with_an_owner_is_asked_of_the_hub(tmp_path: Path, asked: list[str]) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert problem("./nope", **environ) == "no such folder: ./nope (and no name of a hub model, which is owner/model)"
    assert str(problem("nope", **environ)).endswith(f"cache {tmp_path}; a name for the hub is owner/model")
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        assert "the hub is not asked" in str(problem("owner/nope", **environ, **{variable: "1"}))
    assert asked == []
    found = problem("owner/nope", **environ, HF_ENDPOINT="http://mirror")
    assert str(found).endswith("; the hub: OSError: no route to host")
    assert asked == ["http://mirror/owner/nope/resolve/r/config.json"]


def test_a_hub_that_does_not_answer_is_waited_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, **options: never.wait(60))
    monkeypatch.setattr(model_path, "_WAIT", 0.05)
    assert str(problem("owner/nope", HF_HOME="/nowhere")).endswith("; the hub: no answer within 0 s")
    never.set()


def test_a_cached_model_and_a_folder_need_no_hub(tmp_path: Path, asked: list[str]) -> None:
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "r").write_text("abc")
    assert problem("owner/model", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") is None
    assert problem(str(snapshot)) is None
    assert problem("s3://bucket/model") is None
    assert problem(str(tmp_path)) == f"the folder {tmp_path} has no config.json"
    assert asked == []


def test_sglangs_notes_are_printed_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--verbose", "--gpu", "h200", "--model-path", str(tiny_model())]) == 1
    assert "Attention backend not specified. Use fa3 backend by default." in capsys.readouterr().err
