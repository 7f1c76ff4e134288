"""The trial without a GPU, by the words of docs/install.md: model, launch, request, metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo.server import ServerOptions, serve
from tests.support import forked_server

PAGE = Path(__file__).parents[2] / "docs" / "install.md"


@dataclasses.dataclass(frozen=True)
class Documented(ServerOptions):
    """A server with the page's own launch line."""

    words: tuple[str, ...] = ()

    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        return [sys.executable, *self.words, "--port", str(port), "--nccl-port", str(nccl_port)]

    def full_environment(self) -> Mapping[str, str]:
        return {**os.environ, **self.environment}


@pytest.mark.e2e
def test_the_trial_of_the_install_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Try it")[2].partition("\n## ")[0]
    prepare, launch, explain = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ((command, folder),) = re.findall(r"sgl_prefix_attn (tiny-model) (\S+)", prepare)
    assert main([command, str(tmp_path / folder)]) == 0
    assert main([command, str(tmp_path / folder)]) == 2  # the folder exists
    assert "File exists" in capsys.readouterr().err
    line = launch.replace("\\\n", " ").replace(f"--model-path {folder}", f"--model-path {tmp_path / folder}")
    variable, python, *words = shlex.split(line)
    assert python == "python"
    environment = dict([variable.split("=")])
    options = Documented(
        "", None, environment=environment, log_folder=tmp_path, starter=forked_server.start, words=tuple(words)
    )
    printed = io.StringIO()
    with serve(options) as server, contextlib.redirect_stdout(printed):
        exec(snippet.replace("http://127.0.0.1:30000", server.url), {})
        assert main(shlex.split(explain.replace("http://127.0.0.1:30000", server.url))[3:]) == 0
    text = printed.getvalue()
    assert text.startswith("8 samples, the first is [")
    steps = re.findall(r'prefixpack_packed_steps_total{mode="decode".*} (\S+)', text)
    assert [float(count) > 10 for count in steps] == [True]
    (ratio,) = re.findall(r"prefixpack_kv_read_ratio.* (\S+)", text)
    assert float(ratio) < 0.25  # the page has 0.19; how requests join the batch varies
    assert "8 requests; each 1 new token" in text
