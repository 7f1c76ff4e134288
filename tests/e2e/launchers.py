"""Starts an engine as other programs do, serves prompts, and prints what came out. Run as a program by `test_wrap.py`.

    python -m tests.e2e.launchers WAY FILE

FILE is JSON: {"arguments": of ServerArgs, "prompts": token ids, "max_new_tokens": count}. The last output line is
JSON: {"tokens": of each prompt, "states": of each scheduler, as in GET /server_info}.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Result = tuple[list[list[int]], list[dict[str, Any]]]


def engine(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As a user of SGLang's offline engine."""
    import sglang

    made = sglang.Engine(**arguments)
    try:
        made.generate(input_ids=prompts[0], sampling_params={**sampling, "max_new_tokens": 1})
        answers = made.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
        return [answer["output_ids"] for answer in answers], made.get_server_info()["internal_states"]
    finally:
        made.shutdown()


def slime(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As slime: arguments in a process without plug-ins, then `launch_server` in a spawned child."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    from sgl_prefix_attn.demo.server import free_port

    port = free_port()
    server_args = ServerArgs(**arguments, host="127.0.0.1", port=port)
    process = multiprocessing.get_context("spawn").Process(target=launch_server, args=(server_args,))
    return _over_http(process, port, prompts, sampling)


def serve(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As `sglang serve`."""
    from sgl_prefix_attn.demo.server import free_port

    port = free_port()
    options = {**arguments, "host": "127.0.0.1", "port": port}
    words = ["sglang", "serve"]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return _over_http(multiprocessing.Process(target=_command, args=(words,)), port, prompts, sampling)


def _command(words: list[str]) -> None:
    from sglang.cli.main import main

    sys.argv = words
    main()


def _over_http(process: Any, port: int, prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """Starts a server's process, and asks it."""
    process.start()
    try:
        while process.is_alive():
            try:
                _call(port, "/health")
                break
            except OSError:
                time.sleep(0.25)
        _call(port, "/generate", {"input_ids": prompts[0], "sampling_params": {**sampling, "max_new_tokens": 1}})
        answers = _call(port, "/generate", {"input_ids": prompts, "sampling_params": sampling})
        states = _call(port, "/server_info")["internal_states"]
    finally:
        process.terminate()
    return [answer["output_ids"] for answer in answers], states


def verl(
    arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any], scheduler: Any = None
) -> Result:
    """As verl: `Engine._launch_subprocesses` on arguments that were made without plug-ins."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.server_args import ServerArgs

    manager, *_ = Engine._launch_subprocesses(
        server_args=ServerArgs(**arguments),
        init_tokenizer_manager_func=Engine.init_tokenizer_manager_func,
        run_scheduler_process_func=scheduler or Engine.run_scheduler_process_func,
        run_detokenizer_process_func=Engine.run_detokenizer_process_func,
    )

    async def ask(prompt: list[int], **more: Any) -> list[int]:
        request = GenerateReqInput(input_ids=prompt, sampling_params={**sampling, **more})
        async for answer in manager.generate_request(request, None):
            last = answer
        return last["output_ids"]

    async def serve() -> Result:
        await ask(prompts[0], max_new_tokens=1)
        tokens = await asyncio.gather(*map(ask, prompts))
        return tokens, await manager.get_internal_state()

    return asyncio.run(serve())


def areal(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As AReaL: as verl, with a scheduler function of the launcher's own."""
    return verl(arguments, prompts, sampling, scheduler_without_plugins)


def scheduler_without_plugins(*arguments: Any) -> None:
    """A scheduler process as of a launcher that knows nothing of plug-ins."""
    from sglang.srt.managers import scheduler

    scheduler.load_plugins = lambda: None
    scheduler.run_scheduler_process(*arguments)


def _call(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    return json.loads(text) if text else None


WAYS = {"engine": engine, "serve": serve, "slime": slime, "verl": verl, "areal": areal}


def main() -> None:
    import psutil

    task = json.loads(Path(sys.argv[2]).read_text())
    sampling = {"temperature": 0, "max_new_tokens": task["max_new_tokens"], "ignore_eos": True}
    try:
        tokens, states = WAYS[sys.argv[1]](task["arguments"], task["prompts"], sampling)
        print(json.dumps({"tokens": tokens, "states": states}, default=str), flush=True)
    finally:
        for child in psutil.Process().children(recursive=True):
            child.kill()


if __name__ == "__main__":
    main()
