"""The trial without a GPU, by the words of docs/install.md: model, launch, request, metrics."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import install_trial
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.server import serve
from tests.support.launch_line import launch_line
from tests.support.pages import documented, run

# On a busy machine a sample may come too late for the others' steps.
ATTEMPTS = 3


@pytest.mark.e2e
def test_the_trial_of_the_install_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, launch, explain = install_trial.blocks("bash")
    (snippet,) = install_trial.blocks("python")
    ((command, folder),) = re.findall(r"sgl_prefix_attn (tiny-model) (\S+)", prepare)
    assert main([command, str(tmp_path / folder)]) == 0
    assert main([command, str(tmp_path / folder)]) == 2  # the folder exists
    assert "exists; remove it" in capsys.readouterr().err
    options = launch_line(launch.replace(f"--model-path {folder}", f"--model-path {tmp_path / folder}"), tmp_path)
    with serve(options) as server:
        for left in reversed(range(ATTEMPTS)):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(snippet.replace("http://127.0.0.1:30000", server.url), {})
                assert main(shlex.split(explain.replace("http://127.0.0.1:30000", server.url))[3:]) == 0
            try:
                install_trial.check_output(printed.getvalue())
                break
            except AssertionError:
                if not left:
                    raise
        curl = documented("curl -s http://127.0.0.1:30000/metrics", {"http://127.0.0.1:30000": server.url})
        assert run(curl).count("sglang:prefixpack_") > 20
        check = documented("curl -s http://HOST:PORT/server_info", {"http://HOST:PORT": server.url})
        assert run(check) == "[[]]\n"  # a name of its own: nothing is wrapped
