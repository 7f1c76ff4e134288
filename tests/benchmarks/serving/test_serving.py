"""The serving benchmark: what is computed from answers, what a failing server does, and one run of the real thing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import git_commit
from benchmarks.serving import __main__ as command
from benchmarks.serving.backends import Backend, parse_backends
from benchmarks.serving.measure import Agreement, Progress, Run, common_length, growth, steady_times
from benchmarks.serving.ranks import METRICS_OF_ALL_RANKS
from benchmarks.serving.report import Report
from sgl_prefix_attn.demo.client import Answer, Sample
from sgl_prefix_attn.demo.comparison import KVReads
from sgl_prefix_attn.demo.server import ServerError, ServerOptions
from sgl_prefix_attn.demo.workload import Request

REQUEST = Request("one", (1, 2, 3, 4), 3, samples=2)


def run_of(label: str, *tokens: list[int], kv: KVReads | None = None, workload: str = "rl") -> Run:
    samples = tuple(
        Sample("id", list(row), 0, 0, "length", first=0.5, last=0.5 + 0.01 * (len(row) - 1)) for row in tokens
    )
    return Run(workload, label, (Answer(REQUEST, samples),), 2.0, (0.008, 0.012), kv, {})


def test_latencies_and_throughput() -> None:
    figures = run_of("a", [5, 6, 7], [5, 6, 7]).as_json()
    assert figures["ttft_ms"] == {"p50": 500.0, "p99": 500.0, "mean": 500.0}
    assert figures["tpot_ms"]["p50"] == pytest.approx(10.0)
    assert figures["steady_tpot_ms"]["mean"] == pytest.approx(10.0)
    assert figures["output_tokens_per_second"] == 3.0
    assert figures["all_tokens_per_second"] == (6 + 8) / 2
    assert figures["distinct_tokens"] == 3


def test_host_time_of_a_packed_step() -> None:
    counters = {"host_seconds": 0.003, "steps_packed": {"decode": 25, "extend": 5}}
    run = dataclasses.replace(run_of("a", [5]), counters=counters)
    assert run.as_json()["host_us_per_step"] == pytest.approx(100.0)
    routed = dataclasses.replace(run, counters={**counters, "routed_steps": {"packed": 25, "stock": 30}})
    assert routed.host_us_per_step == pytest.approx(50.0)
    report = Report(None, {})
    report.add(routed, "a", {})
    assert "25/55" in report.table(), "steps routed packed"
    assert run_of("a", [5]).host_us_per_step is None


def test_agreement_counts_samples_and_common_beginnings() -> None:
    one, other = run_of("a", [5, 6, 7], [5, 6, 7]), run_of("b", [5, 6, 7], [5, 9, 7])
    assert Agreement.between(one, other) == Agreement(samples=2, identical=1, tokens=6, common_prefix=4)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        Agreement.between(one, run_of("c", [5]))


@pytest.mark.parametrize(
    ("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_common_length(one: list[int], other: list[int], length: int) -> None:
    assert common_length(one, other) == length


def test_steady_times_begin_when_all_samples_have_begun() -> None:
    early = [Progress(1.0, 1), Progress(2.0, 2), Progress(5.0, 4), Progress(7.0, 8)]
    late = [Progress(4.0, 1), Progress(6.0, 5)]
    done_before = [Progress(1.0, 1), Progress(3.0, 9)]
    assert steady_times([early, late, done_before]) == [2.0 / 4, 2.0 / 4]
    assert steady_times([]) == []


def test_growth_of_nested_counters() -> None:
    before = {"plans_made": 2, "steps": {"decode": 1, "extend": 4}}
    after = {"plans_made": 5, "steps": {"decode": 4, "extend": 4, "mixed": 1}, "stock": "fa3"}
    assert growth(before, after) == {"plans_made": 3, "steps": {"decode": 3, "mixed": 1}}


def test_report_of_runs_and_failures(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json", {"machine": "m"})
    report.add(run_of("prefixpack", [5, 6, 7], [5, 6, 7], kv=KVReads(25, 100, 20)), "prefixpack", {"at": 1.0})
    report.add(run_of("fa3", [5, 6, 7], [5, 6, 8]), "fa3", {"start_seconds": 2.0})
    report.add(run_of("fa3", [5], [5], workload="mooncake"), "fa3", {})
    report.fail("triton", "ServerError: did not start\nlong log")
    content = json.loads((tmp_path / "r.json").read_text())
    assert [run["label"] for run in content["runs"]] == ["prefixpack", "fa3", "fa3"]
    assert len(content["agreement"]) == 1
    assert content["runs"][0]["kv_tokens"]["saved"] == 0.75
    assert content["agreement"][0]["identical"] == 1
    assert content["agreement"][0]["common_prefix_share"] == pytest.approx(5 / 6)
    lines = report.table().splitlines()
    assert "75.0%" in lines[1]
    assert lines[2].split()[-2:] == ["1/2", "0.833"]
    assert lines[3].split()[:2] == ["mooncake", "fa3"]
    assert lines[4:] == ["mooncake, fa3: 2 samples ended early", "failed: triton: ServerError: did not start"]


def test_medians_of_backends_that_ran_a_workload_several_times(tmp_path: Path) -> None:
    report = Report(tmp_path / "r.json", {})
    for run, seconds in enumerate((1.0, 4.0, 2.0)):
        report.add(dataclasses.replace(run_of(f"fa3 {run}", [5, 6]), seconds=seconds), "fa3", {})
    report.add(run_of("prefixpack", [5, 6]), "prefixpack", {})
    report.add(run_of("prefixpack again", [5, 6]), "prefixpack", {})
    content = json.loads((tmp_path / "r.json").read_text())
    assert [(pair["of"], pair["with"]) for pair in content["agreement"]] == [
        ("fa3 0", "fa3 1"), ("fa3 0", "fa3 2"), ("fa3 0", "prefixpack"), ("prefixpack", "prefixpack again"),
    ]  # fmt: skip
    medians = content["medians"][0]
    assert (medians["workload"], medians["backend"], medians["runs"]) == ("rl", "fa3", 3)
    assert medians["output_tokens_per_second"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    assert "rl, fa3, median of 3 runs (least to most): TTFT ms" in report.table()
    assert "output tok/s 1 (0 to 2)" in report.table()


class FakeServers:
    """Replaces servers, warm-ups and replays of the command. `clock` moves on by 100 s with each server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.broken = ""
        self.clock: list[float] = []
        replacements = {"serve": self.serve, "run_once": self.run_once}
        for name in ("warm_up", "read_ranks"):
            replacements[name] = lambda *_: None
        for name, replacement in replacements.items():
            monkeypatch.setattr(command, name, replacement)

    @contextlib.contextmanager
    def serve(self, options: ServerOptions) -> Iterator[Any]:
        self.started.append(str(options.backend))
        self.clock[:] = [seconds + 100.0 for seconds in self.clock]
        if options.backend == self.broken:
            raise ServerError("it did not start")
        yield type("Server", (), {"log": Path("x.log"), "options": options})()

    @staticmethod
    def run_once(server: Any, workload: str, label: str, requests: Any, timeout_seconds: float) -> Run:
        return run_of(label, [1, 2, 3], [1, 2, 3], workload=workload)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def run_command(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and written results of the command."""
    out = tmp_path / "out.json"
    status = command.main([*arguments, "--out", str(out), "--logs", str(tmp_path / "logs")])
    return status, json.loads(out.read_text())


def test_a_backend_that_fails_does_not_keep_the_others_from_running(servers: FakeServers, tmp_path: Path) -> None:
    servers.broken = "fa3"
    options = ("--repeat", "triton", "--times", "3", "--workload", "rl", "mooncake")
    status, content = run_command(tmp_path, "--backends", "prefixpack,fa3,triton", *options)
    assert status == 1
    assert servers.started == ["prefixpack", "fa3", "triton"]
    assert [(run["workload"], run["label"]) for run in content["runs"]] == [
        ("rl", "prefixpack"), ("mooncake", "prefixpack"), ("rl", "triton"), ("rl", "triton again"),
        ("rl", "triton again 2"), ("mooncake", "triton"), ("mooncake", "triton again"), ("mooncake", "triton again 2"),
    ]  # fmt: skip
    assert content["failures"] == {"fa3": "ServerError: it did not start"}


def test_no_server_is_started_that_would_not_be_done_in_time(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers.clock = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: servers.clock[0])
    status, content = run_command(tmp_path, "--backends", "a,b,c", "--seconds", "250")
    assert status == 1
    assert servers.started == ["a", "b"]
    assert "not started: 50 s are left" in content["failures"]["c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backends", "fa3,fa3"], "different backends"),
        (["--backends", "prefixpack[route=packed"], "different backends"),
        (["--backends", "fa3[route=packed]"], "only prefixpack has settings"),
        (["--backends", "prefixpack[route]"], "'route' is not of the form key=value"),
        (["--backends", "prefixpack[root=packed]"], "did you mean PREFIXPACK_ROUTE"),
        (["--backends", "prefixpack[route=fast]"], "PREFIXPACK_ROUTE='fast' is not usable"),
        (["--repeat", "fa3", "--times", "1"], "--times 1: expected 2 or more"),
        (["--workload", "rl:many"], "--workload rl:many: expected one of rl, no-sharing"),
        (["--workload", "chat"], "--workload chat: expected one of rl, no-sharing"),
        (["--backends", "fa3", "--repeat", "triton"], "not among"),
        (["--device", "cuda"], "needs --model"),
        (["--groups", "0"], "groups is 0"),
        (["--tp", "0"], "--tp 0: expected a number of ranks"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_settings_of_prefixpack_make_another_backend() -> None:
    text = "prefixpack[route=packed], prefixpack[route=auto,route_margin=5],flashinfer"
    assert parse_backends(text, "--backends") == {
        "prefixpack[route=packed]": Backend("prefixpack", {"PREFIXPACK_ROUTE": "packed"}),
        "prefixpack[route=auto,route_margin=5]": Backend(
            "prefixpack", {"PREFIXPACK_ROUTE": "auto", "PREFIXPACK_ROUTE_MARGIN": "5"}
        ),
        "flashinfer": Backend("flashinfer"),
    }


def test_servers_of_an_ab_test_and_workloads_of_several_sizes(servers: FakeServers, tmp_path: Path) -> None:
    a, b = "prefixpack[route=packed]", "prefixpack[route=auto]"
    workloads = ["no-sharing:1", "no-sharing:8", "rl:2"]
    status, content = run_command(tmp_path, "--backends", f"{a},{b}", "--workload", *workloads)
    assert status == 0
    assert servers.started == ["prefixpack", "prefixpack"]
    runs = [(run["label"], run["workload"]) for run in content["runs"]]
    assert runs == [(name, workload) for name in (a, b) for workload in workloads]
    assert [content["workloads"][name]["requests"] for name in workloads] == [1, 8, 2]
    assert content["environments"] == {a: {"PREFIXPACK_ROUTE": "packed"}, b: {"PREFIXPACK_ROUTE": "auto"}}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_commit_and_environment_are_recorded(
    servers: FakeServers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    options = ["--tp", "2", "--commit", "1234abc"] if ranks == 2 else []
    status, content = run_command(tmp_path, "--backends", "prefixpack,fa3", *options)
    assert status == 0
    assert (content["tp"], content["commit"]) == (ranks, "1234abc" if options else git_commit())
    for server in content["servers"].values():  # metrics cost time, so all backends have them or none
        multi_rank = {"--tp-size", *METRICS_OF_ALL_RANKS}
        assert multi_rank & set(server) == (multi_rank if ranks == 2 else set())
        assert ranks == 1 or server[server.index("--tp-size") + 1] == "2"
    assert content["inherited_environment"]["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.e2e
def test_two_backends_of_the_real_server_agree(tmp_path: Path) -> None:
    sizes = ("--groups", "3", "--samples", "4", "--prompt-tokens", "96", "--output-tokens", "12")
    status, content = run_command(tmp_path, "--backends", "prefixpack,torch_native", "--workload", "rl", *sizes)
    assert status == 0
    packed, stock = content["runs"]
    assert content["agreement"][0]["identical"] == content["agreement"][0]["samples"] == 12
    assert packed["output_tokens"] == stock["output_tokens"] == 3 * 4 * 12
    assert packed["distinct_tokens"] > 5
    assert packed["kv_tokens"]["saved"] > 0.5
    assert packed["prefixpack"]["steps_packed"]["decode"] > 5
    assert stock["kv_tokens"] is None
    assert len(list((tmp_path / "logs").iterdir())) == 2
