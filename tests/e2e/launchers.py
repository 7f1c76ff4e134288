"""Starts an engine as other programs do, serves prompts, and prints what came out. Run as a program by `test_wrap.py`.

    python -m tests.e2e.launchers WAY FILE

FILE is JSON: {"arguments": of ServerArgs, "prompts": token ids, "max_new_tokens": count}. The last output line is
JSON: {"tokens": of each prompt, "states": of each scheduler, as in GET /server_info}.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

INTERRUPTED_AFTER_SECONDS = 0.5
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


def server_args_first(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As ms-swift 4.6.0: an engine of arguments that were made before plug-ins were loaded."""
    from sglang.srt.server_args import ServerArgs

    return engine({"server_args": ServerArgs(**arguments | {"log_level": "error"})}, prompts, sampling)


def slime(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As slime, miles and NeMo RL: arguments in a process without plug-ins, then `launch_server` in a spawned child."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    from sgl_prefix_attn.demo.server import free_port

    port = free_port()
    server_args = ServerArgs(
        **arguments, host="127.0.0.1", port=port, nccl_port=free_port(), dist_init_addr=f"127.0.0.1:{free_port()}",
        nnodes=1, node_rank=0, gpu_id_step=1, base_gpu_id=0, enable_draft_weights_cpu_backup=True, enable_metrics=True,
    )  # fmt: skip
    server_args.host = server_args.host.strip("[]")
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
    """As verl 0.9.1: a running event loop starts the schedulers, of arguments that were made without plug-ins.

    Samples are interrupted and sent again, as in partial rollouts.
    """
    from sglang.srt.entrypoints import engine as module
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, GenerateReqInput, PauseGenerationReqInput
    from sglang.srt.server_args import ServerArgs

    def set_envs_and_config(server_args: Any) -> None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "4"

    async def serve() -> Result:
        module._set_envs_and_config = set_envs_and_config  # verl's own, without signal handlers
        os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        manager, *_ = module.Engine._launch_subprocesses(
            server_args=ServerArgs(**arguments | {"log_level": "error"}),
            init_tokenizer_manager_func=module.init_tokenizer_manager,
            run_scheduler_process_func=scheduler or module.run_scheduler_process,
            run_detokenizer_process_func=module.run_detokenizer_process,
        )

        async def ask(prompt: list[int], **more: Any) -> list[int]:
            request = GenerateReqInput(input_ids=prompt, sampling_params={**sampling, **more})
            return (await manager.generate_request(request, None).__anext__()).get("output_ids", [])

        await ask(prompts[0], max_new_tokens=1)
        interrupted = [asyncio.create_task(ask(prompt, max_new_tokens=500)) for prompt in prompts]
        await asyncio.sleep(INTERRUPTED_AFTER_SECONDS)
        await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        await manager.continue_generation(ContinueGenerationReqInput())
        parts = await asyncio.gather(*interrupted)
        tokens = await asyncio.gather(*map(ask, prompts))
        assert all(part[: len(whole)] == whole[: len(part)] for part, whole in zip(parts, tokens, strict=True))
        return tokens, await manager.get_internal_state()

    return asyncio.run(serve())


def areal(arguments: dict[str, Any], prompts: list[list[int]], sampling: dict[str, Any]) -> Result:
    """As AReaL: with a scheduler function of the launcher's own, which loads no plug-ins."""
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


WAYS = {
    "engine": engine, "server_args": server_args_first, "serve": serve, "slime": slime, "verl": verl, "areal": areal,
}  # fmt: skip


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
