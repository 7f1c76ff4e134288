"""A resumed batch is the same job: arguments, configuration and weights are those of the first run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_prefix_attn.offline.identity import job_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "old.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "subfolder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda data: data.replace(b"c", b"d")),
        ("tokenizer.json", lambda data: data + b" "),
        ("generation_config.json", lambda data: data[:-1]),
        ("chat_template.jinja", lambda data: data.upper()),
        ("old.bin", lambda data: data + b"0"),
        ("model.safetensors", lambda data: data.replace(b"F32", b"I32")),
        ("model.safetensors", lambda data: data + bytes(4)),
        ("model.safetensors", lambda data: b""),
    ],
)
def test_another_file_of_the_model_is_another_job(folder, name, change):
    before = job_identity(["--dtype", "half"], str(folder))
    assert job_identity(["--dtype", "half"], str(folder)) == before
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    after = job_identity(["--dtype", "half"], str(folder))
    assert {key for key in before if before[key] != after[key]} == {f"the model's {name}"}


def test_a_file_more_and_other_arguments_are_another_job(folder):
    before = job_identity(["--dtype", "half", "--base-gpu-id", "0"], str(folder))
    assert job_identity(["--dtype", "half"], str(folder)) == before, "another number of engines is the same job"
    assert before["the engine's arguments"] == "--dtype half"
    (folder / "more.safetensors").touch()
    assert set(job_identity(["--dtype", "half"], str(folder))) - set(before) == {"the model's more.safetensors"}
    assert job_identity(["--dtype", "float"], "org/name") == {"the engine's arguments": "--dtype float"}


def test_what_changes_no_token_is_the_same_job(folder):
    before = job_identity(["--model-path", str(folder), "--tp", "2"], str(folder))
    for argument in ("--mem-fraction-static", "--log-level", "--base-gpu-id", "--port"):
        for words in ([argument, "4"], [f"{argument}=4"]):
            again = job_identity([*words, "--model-path", f"{folder}/", "--tp", "2", *words], f"{folder}/")
            assert again == before, words
    for name in ("out.jsonl", "out.jsonl.journal", "README.md", "engine-0.log"):
        (folder / name).write_text("of the batch")
    assert job_identity(["--model-path", str(folder), "--tp", "2"], str(folder)) == before
    assert job_identity(["--model-path", str(folder), "--tp", "4"], str(folder)) != before


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key", "--ssl-keyfile-password", "--api-k", "--admin"])
@pytest.mark.parametrize("joined", [False, True])
def test_secrets_are_not_in_the_journal(option, joined):
    given = [f"{option}=hush"] if joined else [option, "hush"]
    assert job_identity(["--dtype", "half", *given], "m") == job_identity(["--dtype", "half"], "m")
