"""README, docs and examples: snippets run, commands parse, tables are those of the result files."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import pytest

from benchmarks import doc_tables, install_trial
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.offline.batch_file import BatchRequest, parse_line
from sgl_prefix_attn.settings import OTHER_VARIABLES, PREFIX, Settings, SettingsError, load_settings
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from sgl_prefix_attn.sglang_plugin.doctor import advice
from tests.benchmarks.test_commands import FAST, GPU, LISTED, SLOW
from tests.benchmarks.test_commands_on_cpu import COMMANDS as ON_A_CPU
from tests.support.pages import ROOT, blocks, commands_of, shell_commands

# What placeholders of the pages stand for.
PLACEHOLDERS = {
    "LAUNCH ARGUMENTS": "--model-path m",
    "HOST:PORT": "127.0.0.1:30000",
    '[--ordered] [--engines N] [--ray [ADDRESS]] [--server-args "..."]': "--ordered --engines 2 --ray auto",
    "0.5.x": SUPPORTED_VERSIONS[-1],
    " ... ": " ",
}
# What marks a snippet that needs an engine or a server.
RUN_ELSEWHERE = {"(engine)": "tests/pinning/test_arrangements.py", "http://127.0.0.1": "tests/e2e/test_trial.py"}
# Commands that take well under a second: they are run, not only parsed.
CHEAP = ("explain --tree", "explain --batch", "settings", "doctor --reasons", "abtest steps benchmarks/")
# What no test runs, by beginnings of commands.
NOT_RUN = {
    "pip install dist/cuda/": "`make wheel-trial` installs that wheel where nvcc is",
    "pytest -m gpu": "`benchmarks.on_gpu` runs these tests",
}


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_snippets_run(page: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    for part, place in RUN_ELSEWHERE.items():
        if part in code:
            pytest.skip(f"runs in {place}")
    exec(compile(code, str(page), "exec"), {})
    assert "print(" not in code or capsys.readouterr().out


@pytest.mark.parametrize("command", shell_commands())
def test_commands_are_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for placeholder, value in PLACEHOLDERS.items():
        command = f"{command} ".replace(placeholder, value)
    words = shlex.split(command, comments=True)
    while words and words[0] == "export":
        words.pop(0)
    variables = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    check_variables(variables)
    monkeypatch.chdir(ROOT)
    check_words([word for word in words if word != "..."], monkeypatch)


def test_every_command_is_run() -> None:
    """Cheap ones above, others by the test that asks for them by their beginning, by CI, or by the trial."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    calls = (node for text in files if "documented(" in text for node in ast.walk(ast.parse(text)))
    begins = [
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "documented"
        if isinstance(node.args[0], ast.Constant)
    ]
    begins += [f"python {begin}" for begin in (*FAST, *SLOW, *GPU, *LISTED)]
    jobs = "".join(
        (ROOT / name).read_text() for name in (".ci/run", ".github/workflows/ci.yml", ".github/workflows/slow.yml")
    )
    begins += re.findall(r"\bmake [a-z-]+", jobs)
    begins += [
        line.partition("  #")[0].strip() for block in install_trial.blocks("bash") for line in commands_of(block)
    ]
    begins += [f"python -m sgl_prefix_attn {command}" for command in CHEAP]
    begins += [*ON_A_CPU, *NOT_RUN]
    found = {case.values[0].partition("  #")[0].strip() for case in shell_commands()}
    names = {command for command in found if any(other.startswith(f"{command} ") for other in found)}
    variables = {command for command in found if re.fullmatch(r"(export )?[A-Z_]+=\S+", command)}
    left = {command for command in found - names - variables if not command.startswith(tuple(begins))}
    assert sorted(left) == []
    assert [begin for begin in begins if not any(command.startswith(begin.strip()) for command in found)] == []


def check_variables(variables: dict[str, str]) -> None:
    ours = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    files = {name for name in ours if name.endswith("_CONFIG")}
    assert all(name in OTHER_VARIABLES or name.removeprefix(PREFIX).lower() in Settings.model_fields for name in files)
    load_settings({name: value for name, value in ours.items() if name not in files})


def check_words(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "|" in words:
        at = words.index("|")
        check_words(words[:at], monkeypatch)
        return check_words(words[at + 1 :], monkeypatch)
    match words:
        case ["ray", "job", "submit", "--runtime-env-json", environment, "--", *inner]:
            check_variables(json.loads(environment)["env_vars"])
            check_words(inner, monkeypatch)
        case ["curl", *_]:
            for body in words[words.index("-d") + 1 :] if "-d" in words else []:
                assert json.loads(body)
        case ["python", "-c", code]:
            compile(code, "-c", "exec")
        case ["python", "-m", module, *arguments] if module != "sglang_router.launch_router":  # not installed here
            check_program(module, arguments, monkeypatch)
        case ["sgl-prefix-attn", *arguments]:
            check_program("sgl_prefix_attn", arguments, monkeypatch)
        case ["python", script, *arguments] if script.endswith(".py") and script != "train.py":
            check_program(script, arguments, monkeypatch)


class ParsedError(Exception):
    """A program's arguments have been parsed."""


def check_program(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a cheap command of ours; of other programs, parses the arguments."""
    if program == "sglang.launch_server":
        return parse_launch(arguments)
    if program == "sgl_prefix_attn" and " ".join(arguments).startswith(CHEAP):
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(arguments) == 0
        return None

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        known, more = parse(self, args, namespace)
        assert not more or (program, arguments[0]) == ("sgl_prefix_attn", "doctor"), more
        raise ParsedError(known)

    parse = argparse.ArgumentParser.parse_known_args
    if program == "sgl_prefix_attn" and not arguments:
        return None
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        if program == "sgl_prefix_attn":
            patch.setattr(argparse.ArgumentParser, "parse_known_args", without_subparsers(stop))
        patch.setattr(sys, "argv", [program, *arguments])
        run, name = (runpy.run_path, str(ROOT / program)) if program.endswith(".py") else (runpy.run_module, program)
        with pytest.raises(ParsedError):
            run(name, run_name="__main__")
    return None


def without_subparsers(stop: Any) -> Any:
    """`parse_known_args` of the main parser stops; those of its commands, which it calls, do not."""
    parse, inside = argparse.ArgumentParser.parse_known_args, []

    def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        if inside:
            return parse(self, args, namespace)
        inside.append(self)
        return stop(self, args, namespace)

    return parse_known_args


@functools.cache
def launch_parser() -> argparse.ArgumentParser:
    """SGLang's parser of `launch_server`, with our name among the attention backends."""
    server_args = pytest.importorskip("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        if "--attention-backend" in action.option_strings:
            action.choices = [*(action.choices or ()), "prefixpack"]
    return parser


def parse_launch(arguments: list[str]) -> None:
    values = arguments if "--model-path" in arguments else ["--model-path", "m", *arguments]
    at = values.index("--model-path")
    if at + 1 == len(values) or values[at + 1].startswith("--"):
        values = [*values[: at + 1], "m", *values[at + 1 :]]
    launch_parser().parse_args(values)


def test_tables_are_those_of_the_result_files() -> None:
    """`make figures` writes them."""
    for page in doc_tables.pages():
        text = page.read_text(encoding="utf-8")
        assert doc_tables.refreshed(text) == text, page
    shown = {name for page in doc_tables.pages() for _, name, _ in doc_tables.MARKED.findall(page.read_text())}
    assert shown == set(doc_tables.TABLES)


def test_the_headline_is_that_of_its_file() -> None:
    whole, steady = doc_tables.whole_gains()
    gain, span, steady_gain = f"{median(whole):.2f}", f"{min(whole):.2f} to {max(whole):.2f}", f"{median(steady):.2f}"
    for page, said in (
        ("README.md", f"Its steady state gains {steady_gain}."),
        ("docs/rollouts.md", f"**{gain} times the tokens/s of `fa3` ({span}).**"),
        ("docs/rollouts.md", f"The median gain of the steady state is {steady_gain} "),
        ("patches/README.md", f"{gain} times the tokens/s of fa3"),
    ):
        assert said in " ".join((ROOT / page).read_text(encoding="utf-8").replace("\n> ", " ").split()), page


def test_the_output_that_explain_shows() -> None:
    """Numbers may change with the planner; words may not."""
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    command, output = re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(shlex.split(command)[3:]) == 0

    def words(text: str) -> list[str]:
        return re.sub(r"[\d,.]+( [um]s)?", "N", re.sub(r" +", " ", text)).splitlines()

    assert words(printed.getvalue().strip()) == words(output.strip())


def test_the_example_of_how_it_works_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"explain (--tree .*)", page)
    assert main(["explain", "--json", *command.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"| all | | | {found['kv_tokens']['packed']:,} | {found['kv_tokens']['per_request']:,} |" in page
    assert f"are cut into {found['work_items']} work items" in page.replace("\n", " ")


def test_the_file_and_the_errors_of_the_settings_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (errors,) = re.findall(r"```text\n(prefixpack.toml:.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    variables = {"PREFIXPACK_CONFIG": "prefixpack.toml"}
    Path("prefixpack.toml").write_text(file)
    assert load_settings(variables).max_tile_rows == 64
    Path("prefixpack.toml").write_text(file.replace("64", "48"))
    with pytest.raises(SettingsError) as raised:
        load_settings(variables | {"PREFIXPACK_WORKER": "3"})
    for line in errors.splitlines():
        assert line.removesuffix(" ...") in str(raised.value)


def test_the_requests_of_the_offline_page_and_of_the_example_are_accepted() -> None:
    page = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    example = (ROOT / "examples" / "batch.jsonl").read_text(encoding="utf-8")
    assert len(example.splitlines()) == 5
    for line in (lines.replace("\n ", "") + example).splitlines():
        assert isinstance(parse_line(1, line.encode()), BatchRequest)


def test_what_to_change_where_names_what_there_is() -> None:
    """A file without a folder is beside the one before it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    of_plugin, elsewhere = page.partition("## Where to change what")[2].partition("\n## ")[0].split("Elsewhere.")
    for part, base in ((of_plugin, ROOT / "sgl_prefix_attn" / "sglang_plugin"), (elsewhere, ROOT)):
        for row in re.findall(r"^\|[^|]*\|(.*`.*)\|$", part, re.MULTILINE):
            folder = base
            for name in re.findall(r"`([\w*/]+\.\w+)`", row):
                folder = folder if "/" not in name else (base / name).parent
                assert list(folder.glob(Path(name).name)), name
            for symbol, owner, file in re.findall(r"`(\w+)`(?: of `(\w+)`)? in `([^`]+)`", row):
                assert {symbol, owner} - {""} <= set(re.findall(r"\w+", (base / file).read_text())), row


def test_troubleshooting_has_every_reason() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    to_do = "replace all from '### Steps' on by the output of `python -m sgl_prefix_attn doctor --reasons`"
    assert page.endswith(f"\n\n{advice.markdown()}\n"), to_do
