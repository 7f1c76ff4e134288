"""The command line as a user types it: each command in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_prefix_attn import __version__
from sgl_prefix_attn.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
RESULTS = str(ROOT / "benchmarks" / "results" / "gpu_attention.json")


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXPACK_")}
    environ |= {"COLUMNS": "120"} | variables
    words = [sys.executable, "-m", "sgl_prefix_attn", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environ, check=False)


def test_version() -> None:
    assert command("--version").stdout.strip() == __version__


def test_server_arguments_may_be_one_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--server-args", "--tp-size=x"], ["--server-args=--tp-size=x"], ["--server-args", "--tp-size x"]):
        source = tmp_path / "in.jsonl"
        source.touch()
        files = [str(source), str(tmp_path / "out"), "--model", "m", "--device", "cpu"]
        assert main(["batch", *files, *words]) == 2
        assert "--server-args: argument --tp-size" in capsys.readouterr().err


def test_settings_need_neither_torch_nor_the_native_module() -> None:
    code = (
        "import sys; from sgl_prefix_attn.__main__ import main; main(['settings']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang', 'sgl_prefix_attn._native')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_settings_table_shows_value_and_source(tmp_path: Path) -> None:
    config = tmp_path / "my.toml"
    config.write_text("max_tile_rows = 64\n", encoding="utf-8")
    result = command("settings", PREFIXPACK_CONFIG=str(config), PREFIXPACK_WORKERS="12")
    assert result.returncode == 0
    rows = {line.split()[0]: line.split()[1:3] for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert rows["max_tile_rows"] == ["64", f"{config}:1"]
    assert rows["workers"] == ["12", "PREFIXPACK_WORKERS"]
    assert rows["metrics"] == ["true", "default"]


def test_settings_with_a_mistake() -> None:
    result = command("settings", PREFIXPACK_METRICS="perhaps")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "PREFIXPACK_METRICS='perhaps' is not usable: accepted is true or false\n"


def test_a_variable_that_is_not_read_is_told_once(monkeypatch, capsys):
    monkeypatch.setenv("PREFIX_PACK_WRAP", "1")
    assert main(["settings"]) == 0
    assert capsys.readouterr().err == "the variable PREFIX_PACK_WRAP is not read; did you mean PREFIXPACK_WRAP?\n"


def test_an_unknown_command_names_the_nearest(capsys):
    for word, says in (("explian", "'explian', did you mean explain?"), ("xyz", "'xyz'. There are abtest, batch, ")):
        with pytest.raises(SystemExit) as left:
            main([word, "--tree", "1,2/3,4"])
        assert left.value.code == 2
        assert f"there is no command {says}" in capsys.readouterr().err


def test_explain_as_json_with_every_machine_option() -> None:
    options = "--heads 16/4 --head-dim 64 --kv-dtype fp8 --device a100"
    result = command("explain", "--tree", "1,4/512,64", "--json", *options.split())
    numbers = json.loads(result.stdout)
    assert numbers["shape"] == {"q_heads": 16, "kv_heads": 4, "head_dim": 64, "kv_bytes": 1, "partial_bytes": 4}
    assert numbers["device"]["bandwidth"] == pytest.approx(0.9 * 2.04e12, rel=0.01)  # a share of the data sheet's


MISTAKES = [
    ("explain --tree 1,2/3", "explain: tree '1,2/3': 2 levels of nodes but 1 of tokens"),
    ("explain --batch x.json --query-len 4", "explain: --query-len belongs to --tree"),
    ("explain --tree 1,2/64,16 --rank 0", "explain: --rank belongs to --server"),
    ("explain --tree 1,2/64,16 --heads 32", "explain: --heads 32: expected query heads / KV heads, for example 32/8"),
    ("explain --tree 1,2/64,16 --heads 32/0 --device h200", "explain: 32/0 heads: expected at least one KV head"),
    ("explain --tree 1,2/64,16 --heads 99999999999999999999/1", "99999999999999999999/1 heads: expected at most 65536"),
    ("explain --tree 1,2/64,16 --head-dim 100000000000", "--head-dim 100000000000: expected 1 to 65536"),
    ("explain --tree=", "explain: tree '': expected NODES/TOKENS"),
    ("explain --server http://[::1", "explain: server 'http://[::1': expected http://HOST:PORT"),
    ("explain --tree 1,2/64,16 --device tpu", "argument --device: invalid choice: 'tpu'"),
    ("explain --tree 1,2/64,16 --server http://x", "not allowed with argument"),
    ("tiny-model .", ".: exists; remove it, or name another folder"),
    ("explain", "one of the arguments --tree --batch --server is required"),
    ("explain --tree 4/8 --head-dim 0", "explain: --head-dim 0: expected 1 to 65536"),
    ("explain --tree 1,2/64,16 --heads 33/8", "explain: 33/8 heads: the query heads have to be a multiple"),
    ("demo --requests 0", "--requests 0: at least 1"),
    ("demo --model /nowhere --device cpu", "--model /nowhere: "),
    ("demo --speed 0", "speed"),
    ("demo --trace /nowhere", "/nowhere"),
    ("demo --json no/where", "demo: --json no/where: there is no folder no"),
    ("demo --json .", "demo: --json .: is a folder"),
    ("demo --server-args '", "demo: --server-args ': No closing quotation"),
    (f"demo --logs {RESULTS}", f"demo: --logs {RESULTS}: cannot make the folder: File exists"),
    ("abtest steps RESULTS batch>=many", "'batch>=many': the N of batch>=N has to be a whole number"),
    ("abtest steps RESULTS shipped", "'shipped' is not a routing policy; expected auto, conservative"),
    ("abtest steps RESULTS batch>64", "'batch>64' is not a routing policy; expected auto, conservative"),
    ("abtest steps auto", "no measured step has both times"),
    ("abtest steps nowhere.json packed", "nowhere.json: cannot read the results"),
    ("abtest steps RESULTS packed --packed cpu", "argument --packed: invalid choice: 'cpu'"),
    ("abtest servers http://a http://a/ --block 1 --requests THREE", "http://a and http://a lead to one server: "),
    ("abtest servers a http://b --requests THREE", "server 'a': expected http://HOST:PORT"),
    ("abtest servers http://a http://b --block 2 --requests THREE", "3 requests are fewer than two blocks of 2"),
    ("abtest servers http://a http://b --block 0 --requests THREE", "--block 0: expected 1 to 4096 requests"),
    ("abtest servers http://127.0.0.1:9 http://b --block 1 --seed 5 --requests THREE", "Cannot connect to host"),
    ("abtest servers http://a http://b --out no/where --requests THREE", "there is no folder no"),
    ("abtest live http://127.0.0.1:abc packed stock", "no answer: nonnumeric port: 'abc'"),
    ("abtest live http://a packed stock --out .", ".: is a folder"),
    ("abtest live nowhere packed stock", "server 'nowhere': expected http://HOST:PORT"),
    ("abtest live http://a packed stock --seconds nan", "--seconds nan: expected more than 0"),
    ("abtest live http://a packed stock --effect 0", "--effect 0.0: expected 0.01 to 100 percent"),
    ("abtest live http://a packed stock --block 1", "--block 1: Input should be greater than or equal to 4"),
    ("abtest live http://a packed stock --lease 9", "--lease 9: Input should be greater than or equal to 16"),
    ("abtest servers http://a http://b --requests THREE --seconds 0", "--seconds 0: expected more than 0"),
    ("abtest servers http://a http://b --requests nowhere", "nowhere: cannot read the requests"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "THREE" in words:
        Path("THREE").write_text(3 * '{"input_ids": [5, 6], "max_new_tokens": 4}\n')
    try:
        status = main(words.replace("RESULTS", RESULTS).split())
    except SystemExit as left:  # how argparse reports
        status = left.code  # type: ignore[assignment]
    assert status == 2
    assert message in capsys.readouterr().err
    assert not Path("x").exists()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = f"{sys.executable} -m sgl_prefix_attn explain --tree 64,4096/10,10 --json | head -c 9"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert result.stdout == '{"title":'
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [("&-", 0, ""), ("/dev/full", 1, "cannot write: No space left on device\n")],
)
@pytest.mark.parametrize("words", ["settings", "settings --markdown"])
def test_output_that_goes_nowhere(words: str, target: str, status: int, message: str) -> None:
    code = f"{sys.executable} -m sgl_prefix_attn {words} >{target}"
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (status, message)


def test_an_interrupted_import_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["explain", "--tree", "1,2/64,16"]) == 130
