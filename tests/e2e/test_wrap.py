"""Wrap mode on real servers: stock names, stock tokens, packed steps, however they start. And what the doctor says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence

import pytest

from sgl_prefix_attn.demo.server import Server, ServerOptions, log_tail, start_process, stop
from sgl_prefix_attn.demo.workload import Vocabulary
from sgl_prefix_attn.sglang_plugin.doctor.advice import Change, arguments_without
from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import Diagnosis, diagnose
from tests.e2e import workloads
from tests.e2e.conftest import POOL_TOKENS, STOCK, WRAP, Launch, replay_cached, state_of, tokens_of
from tests.support import forked_server
from tests.support.pages import documented, run

pytestmark = pytest.mark.e2e

TIMEOUT_SECONDS = 300


@pytest.fixture(scope="module")
def wrapped(launch: Launch) -> Iterator[Server]:
    """A server under the stock backend's name with wrap mode on."""
    with launch(STOCK, environment=WRAP) as server:
        yield server


def test_launch_server_with_the_stock_backends_name(wrapped, expected, vocabulary):
    requests = workloads.three_levels(vocabulary)
    answers, _ = replay_cached(wrapped, requests, "decode", "extend")
    assert tokens_of(answers) == expected(requests)
    assert wrapped.info()["attention_backend"] == STOCK
    state = state_of(wrapped)
    assert state["wrapped"] == [STOCK]
    metrics = run(documented("curl -s http://HOST:PORT/metrics", {"http://HOST:PORT": wrapped.url})).splitlines()
    assert f'stock_backend="{STOCK}"' in next(line for line in metrics if line.startswith("sglang:prefixpack_wrapped{"))
    assert wrapped.log_text().count(f"prefixpack: {STOCK} runs wrapped") == 1
    assert {"Scheduler.on_idle", "ForwardBatch.init_new", "ModelRunner.forward"} <= hooked(wrapped)


def hooked(server: Server) -> set[str]:
    """The names of SGLang that have a hook in the server's scheduler, by its log."""
    targets = re.findall(r"Applied \d+ hook\(s\) to (\S+)", server.log_text())
    return {".".join(target.split(".")[-2:]) for target in targets}


def launch_arguments(options: ServerOptions) -> list[str]:
    """What a user passes to `sglang.launch_server`, ports left out."""
    return arguments_without(options.command(1)[3:], ["--port"])


def doctor(options: ServerOptions) -> Diagnosis:
    return diagnose(launch_arguments(options), {**options.full_environment()})


def follow(changes: Sequence[Change], options: ServerOptions) -> tuple[list[str], dict[str, str]]:
    """Launch arguments and our variables of a server after the doctor's changes."""
    arguments, environment = launch_arguments(options), dict(options.environment)
    for change in changes:
        arguments, environment = change.followed(arguments, environment)
    return arguments, environment


def check_packed(server: Server, found: Diagnosis, vocabulary: Vocabulary) -> None:
    """The server packs the kinds of steps that the doctor names, and no others."""
    server.flush_cache()
    _, done = replay_cached(server, workloads.three_levels(vocabulary))
    for mode in ("decode", "extend"):
        assert (done.steps[mode] > 0) == (found.steps[mode].reason is None), mode


def test_doctor_on_a_server_without_us(stock_server: Server, wrapped: Server, vocabulary: Vocabulary) -> None:
    found = doctor(stock_server.options)
    assert not found.packs
    assert stock_server.packing_state() is None
    assert follow(found.changes, stock_server.options) == (launch_arguments(wrapped.options), WRAP)
    assert found.after is not None
    check_packed(wrapped, found.after, vocabulary)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [(("--disable-radix-cache",), {}), ((), {"PREFIXPACK_ROUTE": "stock", "PREFIXPACK_PACK_EXTEND": "0"})],
)
def test_doctor_on_a_refused_server(launch, wrapped, vocabulary, arguments, settings):
    with launch(STOCK, *arguments, environment=WRAP | settings) as refused:
        found = doctor(refused.options)
        assert refused.packing_state() is None
        reason = found.steps["decode"].reason
        assert reason is not None
        assert f"{STOCK} is not wrapped, and runs as it is: {reason.text}" in refused.log_text()
        assert hooked(refused) <= {"Engine._launch_scheduler_processes"}
    assert not found.packs
    assert found.after is not None
    followed, environment = follow(found.changes, refused.options)
    assert followed == launch_arguments(wrapped.options)
    if environment == WRAP:
        check_packed(wrapped, found.after, vocabulary)
        return
    with launch(STOCK, environment=environment) as after:
        check_packed(after, found.after, vocabulary)


@pytest.mark.parametrize(
    ("way", "backend", "start"),
    [
        # Forks start in a fraction of the time. In CI, tests/pinning/test_ranks.py has fresh processes.
        pytest.param("engine", None, start_process, marks=pytest.mark.slow),
        ("engine", None, forked_server.start),
        *((way, STOCK, forked_server.start) for way in ("server_args", "serve", "slime", "verl", "areal")),
    ],
)
def test_other_launchers(way, backend, start, model, expected, vocabulary, tmp_path):
    requests = workloads.three_levels(vocabulary)[:6]
    (length,) = {request.max_new_tokens for request in requests}
    arguments = {
        "model_path": str(model), "device": "cpu", "dtype": "float32", "disable_cuda_graph": True,
        "grammar_backend": "none", "skip_tokenizer_init": True, "skip_server_warmup": True,
        "max_total_tokens": POOL_TOKENS, "sleep_on_idle": True, "log_level": "warning",
        **({"attention_backend": backend} if backend else {}),
    }  # fmt: skip
    task = tmp_path / "task.json"
    prompts = [list(request.prompt) for request in requests]
    task.write_text(json.dumps({"arguments": arguments, "prompts": prompts, "max_new_tokens": length}))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tests.e2e.launchers", way, str(task)]
    environment = {**ServerOptions("", None).full_environment(), **WRAP, **forked_server.HEALTHY}
    with log.open("wb") as output:
        process = start(command, environment, output)
    try:
        process.wait(TIMEOUT_SECONDS)
    finally:
        stop(process)
    results = [line for line in log.read_text().splitlines() if line.startswith('{"tokens"')]
    assert results, log_tail(log)
    result, _ = json.JSONDecoder().raw_decode(results[-1])  # another process may write before the end of the line
    assert [[tokens] for tokens in result["tokens"]] == expected(requests)
    (state,) = result["states"]
    assert state["attention_backend"] == STOCK
    assert state["prefixpack"]["wrapped"] == [STOCK]
    assert state["prefixpack"]["counters"]["steps_packed"]["decode"] > 0
