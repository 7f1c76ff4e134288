"""`python -m sgl_prefix_attn demo` without servers: what it prints, writes and refuses."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import aiohttp
import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.demo import cli
from sgl_prefix_attn.demo.client import Answer, Sample
from sgl_prefix_attn.demo.comparison import KVReads, Measurement
from sgl_prefix_attn.demo.server import ServerError, ServerOptions
from sgl_prefix_attn.demo.workload import Request


def serve(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """Answers in the place of servers; `same`: those of both backends are."""

    def served(options: ServerOptions, workloads: list[tuple[str, list[Request]]]) -> list[Measurement]:
        ours = options.backend == "prefixpack"
        sample = Sample("id", [1, 2 if same or not ours else 3], 0, 0, "length", first=0.1, last=0.2)
        kv, fallbacks = (KVReads(3, 4, 2), {"idle": 2}) if ours else (None, {})
        return [
            Measurement(str(options.backend), tuple(Answer(one, (sample,)) for one in requests), 1.0, kv, fallbacks)
            for _, requests in workloads
        ]

    monkeypatch.setattr(cli, "_serve_all", served)


@pytest.mark.parametrize("same", [True, False])
def test_the_status_says_whether_all_tokens_are_identical(same, tmp_path, monkeypatch, capsys):
    serve(monkeypatch, same)
    out = tmp_path / "demo.json"
    assert main(["demo", "--requests", "5", "--samples", "3", "--json", str(out)]) == (0 if same else 1)
    printed = capsys.readouterr().out
    assert "steps that fell back to torch_native: idle 8" in printed
    assert "Packed steps read 25.0% (" in printed
    assert "sgl_prefix_attn doctor YOUR LAUNCH COMMAND" in printed
    rows = json.loads(out.read_text())["comparisons"]
    assert [row["tokens_identical"] == row["tokens"] for row in rows] == [same] * 4


def test_a_full_disk_is_told_and_leaves_the_earlier_results(tmp_path, monkeypatch, capsys):
    serve(monkeypatch, True)
    out = tmp_path / "demo.json"
    out.write_text("earlier")

    def fail(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert main(["demo", "--requests", "5", "--samples", "3", "--json", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"demo: {out}: cannot write ")
    assert "Every token is identical." in captured.out
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ServerError("still starting"), "demo: still starting\ndemo: environment and model are kept"),
        (TimeoutError(), "demo: a server answers no more"),
        (aiohttp.ClientConnectionError("reset"), "demo: reset"),
    ],
)
def test_a_server_that_fails_is_told_with_what_to_do(error, says, monkeypatch, capsys):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_serve_all", fail)
    assert main(["demo", "--requests", "5", "--samples", "3"]) == 2
    assert capsys.readouterr().err.startswith(says)


def test_a_start_may_take_as_long_as_the_option_says(monkeypatch):
    given: list[float] = []
    monkeypatch.setattr(cli, "_serve_all", lambda options, workloads: given.append(options.start_seconds) or [])
    with pytest.raises(ValueError, match="zip"):  # no measurements
        main(["demo", "--requests", "5", "--samples", "3", "--start-seconds", "7"])
    assert given == [7.0, 7.0]
