"""Notes what SGLang sends to its scheduler: of each request its id, prompt tokens and sampling parameters.

`python -m tests.offline.recorded ARGUMENTS` is `sglang.launch_server` with that, or the batch command, if the first of
them is `batch`. The file is named by the variable RECORD.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sgl_prefix_attn import __main__ as commands
from sgl_prefix_attn.offline import engine_process
from sgl_prefix_attn.offline.engines import EngineArguments
from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER

RECORD = "PYTEST_RECORD"


engine_main = engine_process.main


def main(connection: Connection, arguments: EngineArguments) -> None:
    """The engine of a batch."""
    install()
    engine_main(connection, arguments)


def install() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    def noting(send: Any) -> Any:
        def noted(self: Any, sent: Any, *arguments: Any) -> Any:
            with open(os.environ[RECORD], "a") as file:
                for one in sent if isinstance(sent, list) else [sent]:
                    file.write(json.dumps([one.rid, list(one.input_ids), _values(one.sampling_params)]) + "\n")
            return send(self, sent, *arguments)

        return noted

    for name in ("_send_one_request", "_send_batch_request"):
        setattr(TokenizerManager, name, noting(getattr(TokenizerManager, name)))


def _values(sampling: Any) -> dict[str, str]:
    names = getattr(sampling, "__struct_fields__", None) or vars(sampling)
    values = {name: getattr(sampling, name) for name in names}
    own = {key: value for key, value in (values.get("custom_params") or {}).items() if key != CUSTOM_PARAMETER}
    return {name: repr(sorted(v) if isinstance(v, set) else v) for name, v in (values | {"custom_params": own}).items()}


def read(path: Path) -> dict[str, tuple[list[int], dict[str, str]]]:
    """By the request's id."""
    return {rid: (tokens, values) for rid, tokens, values in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    if sys.argv[1] == "batch":
        engine_process.main = main
        sys.exit(commands.main(sys.argv[1:]))
    install()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
