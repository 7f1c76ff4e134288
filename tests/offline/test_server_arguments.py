"""Each argument for SGLang is applied, or refused by its name before anything loads."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.offline import cli, engine_process

pytest.importorskip("sglang")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--no-such-option 1", "--server-args: unrecognized arguments: --no-such-option 1"),
        ("--tp-size two", "--server-args: argument --t"),
        ("--speculative-eagle", "--server-args: "),
        ("--help", "--server-args: "),
        ("surplus", "--server-args: unrecognized arguments: surplus"),
        ("--host 0.0.0.0", "--host: of SGLang's HTTP server, which a batch does not run; leave it away"),
        ("--host=127.0.0.1", "--host: of SGLang's HTTP server"),  # also where it is the default
        ("--api-key k --warmups a", "--api-key, --warmups: of SGLang's HTTP server"),
        ("--tokenizer-worker-n 2", "--tokenizer-worker-num: of SGLang's HTTP server"),
        ("--is-embedding", "--is-embedding: of SGLang's HTTP server"),
        ("--nnodes 2 --node-rank 1", "--node-rank: of SGLang's HTTP server"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(text, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011 - the message is looked at below
        engine_process._server_args(["--model-path", "m", *text.split()])
    assert message in str(told.value)


@pytest.mark.parametrize("option", ["--attention-backend", "--attention-b"])
def test_the_users_arguments_win_over_ours(option, monkeypatch):
    from sglang.srt.plugins import load_plugins

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    load_plugins()  # `prefixpack` has to be known
    given = cli._server_arguments(str(tiny_model()), f"{option} torch_native --max-total-tokens 512", "cpu")
    assert given.index("prefixpack") < given.index("torch_native")
    args = engine_process._server_args(given)
    assert (args.attention_backend, args.max_total_tokens, args.device) == ("torch_native", 512, "cpu")
