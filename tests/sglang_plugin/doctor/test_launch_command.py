"""Lines of scripts, as the doctor takes them."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from sgl_prefix_attn.sglang_plugin.doctor.launch_command import launch_command

SERVER = "python3 -m sglang.launch_server"
ARGUMENTS = ["--model-path", "a b", "--port", "1"]
TEXT = "--model-path 'a b' --port 1"
JSON = json.dumps({"a": "x > y | z # w &", "b": [1, 2]})


@pytest.mark.parametrize(
    ("line", "variables"),
    [
        (f"{SERVER} {TEXT} > log 2>&1 &", {}),
        (f"nohup {SERVER} {TEXT} >>log 2>/dev/null < /dev/null & echo $!", {}),
        (f"{SERVER} {TEXT} 2>&1 | tee x", {}),
        (f"{SERVER} {TEXT} |& tee x", {}),
        (f"{SERVER} {TEXT} &>log;", {}),
        (f"exec {SERVER} {TEXT} # comment with 'a quote", {}),
        (f"{TEXT} # comment", {}),
        (f"A=1 B='x y' {TEXT} > log", {"A": "1", "B": "x y"}),
        (f"A=1 CUDA_VISIBLE_DEVICES=0,1 {SERVER} {TEXT}", {"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"}),
        (f"#!/bin/bash\r\nexport A=1\r\ncd x && B=$A {SERVER} \\\r\n {TEXT}\r\nsleep 1\r\n", {"A": "1", "B": "1"}),
        (f"HERE=$(dirname $0)\nM='a b'\n{SERVER} --model-path \"$M\" --port ${{PORT:-1}}", {"M": "a b"}),
        (f"{SERVER} {TEXT} \\\n", {}),
        ("A=1 bash -lc \"B=2 sglang serve 'a b' --port 1 > log\"", {"A": "1", "B": "2"}),
        (f"(cd x && A=1 {SERVER} {TEXT}) > log &", {"A": "1"}),
        (f"( {SERVER} {TEXT} )", {}),
        (f"cd $(dirname $(pwd)); {{ {SERVER} {TEXT}; }}", {}),
        (f"A=$'it\\'s\\n' {SERVER} --model-path $'a\\x20b' --port $\"1\"", {"A": "it's\n"}),
        ("docker run -e A=1 image sh -c 'sglang serve \"a b\" --port 1'", {"A": "1"}),
    ],
)  # fmt: skip
def test_a_line_of_a_script(line: str, variables: dict[str, str]) -> None:
    assert launch_command([line], {}) == (variables, ARGUMENTS)


def test_quoted_arguments_keep_what_a_shell_would_act_on() -> None:
    _, arguments = launch_command([f"{SERVER} --a '{JSON}' --b \"it's \\\"so\\\" & \\$X\" --c '$Y' > log"], {})
    assert arguments == ["--a", JSON, "--b", 'it\'s "so" & $X', "--c", "$Y"]


def test_a_variable_without_quotes_may_hold_several_words() -> None:
    assert launch_command([f"OPTIONS='--tp 2 --port 1'; {SERVER} $OPTIONS"], {})[1] == ["--tp", "2", "--port", "1"]
    assert launch_command([f"{SERVER} --model-path $M/x"], {"M": "/m"})[1] == ["--model-path", "/m/x"]


def test_a_tilde_is_the_home_folder_where_a_shell_takes_it_for_that() -> None:
    line = f"{SERVER} --model-path ~/m --a '~/m' --b x~/m"
    assert launch_command([line], {"HOME": "/h"})[1] == ["--model-path", "/h/m", "--a", "~/m", "--b", "x~/m"]


@pytest.mark.parametrize(
    "more", ["--port $PORT", "--port=$PORT", '--host "$(hostname -i)" --port $((BASE + 1))', "--api-key ${KEY}"]
)
def test_an_unknown_value_without_effect_on_the_answer_is_left_out(more: str) -> None:
    assert launch_command([f"{SERVER} {more} {TEXT}"], {}) == ({}, ARGUMENTS)


def test_operators_among_words_that_a_shell_has_split() -> None:
    words = [*SERVER.split(), *ARGUMENTS]
    for more in (["2>&1", "|", "tee", "x"], [">log", "&"], [">", "log"], ["#", "it's", "$X"]):
        assert launch_command([*words, *more], {}) == ({}, ARGUMENTS)
    assert launch_command([*words, "--a", JSON, "--b", "<image>", "--c", "$Y"], {})[1][4:] == [
        "--a", JSON, "--b", "<image>", "--c", "$Y",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"{SERVER} --model-path $MODEL", "$MODEL: MODEL is not set here"),
        (f"{SERVER} --model-path `cat m`", "`cat: the doctor does not run a shell"),
        (f"{SERVER} --model-path \"$(cat m)\"", '"$(cat m)": the doctor does not run a shell'),
        (f'{SERVER} "$@"', '"$@": the doctor does not run a shell'),
        (f"{SERVER} --a 'b", "a quote is not closed: \"'b\""),
        ("vllm serve m", "'vllm' is no launch argument of SGLang"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        launch_command([line], {})


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {}),
        (["python", "-m", "sglang.launch_server"], {}),
        (["A=1", "B=x=y", "/usr/bin/python3", "-u", "-m", "sglang.launch_server"], {"A": "1", "B": "x=y"}),
        (["env", "A=", "sglang", "serve"], {"A": ""}),
        (["docker", "run", "-e", "A=1", "image", "python", "-m", "sglang.launch_server"], {"A": "1"}),
        (["A=1"], {"A": "1"}),
        (["python", "-m", "sglang.launch_server", " ", "\\", "--"], {}),
    ],
)
def test_a_pasted_command(words: list[str], variables: dict[str, str]) -> None:
    assert launch_command([*words, *ARGUMENTS]) == (variables, ARGUMENTS)
    quoted = " \\\n  ".join(map(shlex.quote, [word for word in words if word.strip() not in ("", "\\")] + ARGUMENTS))
    assert launch_command([quoted.replace("'A=1'", "A=1")]) == (variables, ARGUMENTS)


def test_a_model_without_an_option() -> None:
    found = launch_command(["sglang", "serve", "org/model", "--model-type", "llm", "--port", "1"])
    assert found == ({}, ["--model-path", "org/model", "--port", "1"])
