"""Run by test_arrangements.py in a process of its own: SGLang's processes arranged otherwise than by its launcher.

`python -m tests.pinning.arrangements engine MODEL` asks `sglang.Engine` for a pin; `factory` builds a prefixpack
backend twice where nobody has registered hooks before, as in an actor. Each prints JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "skip_tokenizer_init": True,
    "disable_cuda_graph": True, "grammar_backend": "none", "context_length": 2048, "max_total_tokens": 2048,
    "log_level": "error",
}  # fmt: skip


def engine(model: str) -> dict[str, Any]:
    import sglang

    from sgl_prefix_attn.sglang_plugin.pinning.client import EnginePins, PinningError

    (snippet,) = re.findall(r"```python\n(.*?)```", (DOCS / "pinning.md").read_text(), re.DOTALL)

    started = sglang.Engine(model_path=model, **OPTIONS)
    try:
        pins = EnginePins(started)
        tokens = [20 + position % 900 for position in range(300)]
        (made,) = pins.pin(tokens, label="system")
        started.generate(input_ids=[[*tokens, 11, 12]], sampling_params={"max_new_tokens": 2})
        (listed,) = pins.pins()
        (released,) = pins.release(made["pin"]["id"])
        try:
            again = pins.release(made["pin"]["id"])
        except PinningError as error:
            again = error.kind
        names = {"engine": started}
        exec(snippet, names)
        documented = [names[name] for name in ("listed", "released")]
        (state,) = started.get_server_info()["internal_states"]
        told = {"made": made, "listed": listed, "released": released, "again": again, "documented": documented}
        return {**told, "wrapped": state["prefixpack"]["wrapped"], "packed": state["prefixpack"]["counters"]}
    finally:
        started.shutdown()


def factory() -> dict[str, Any]:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_prefix_attn.settings import Settings
    from sgl_prefix_attn.sglang_plugin.compat import hooks as compat_hooks
    from sgl_prefix_attn.sglang_plugin.pinning.hooks import PinningHooks
    from sgl_prefix_attn.sglang_plugin.scheduling.admission import Admission
    from sgl_prefix_attn.sglang_plugin.startup import hook_table
    from sgl_prefix_attn.sglang_plugin.startup.factory import create_backend
    from tests.sglang_plugin.fixture import Fixture, active_state

    runner = Fixture([[]], [9]).runner
    for _ in range(2):
        create_backend(runner, Settings(metrics=False, pin_budget_percent=10, group_scheduling=True))
    state = active_state()
    ours = (
        *hook_table.OTHER_HOOKS,
        *state.own(Admission).hooks(),
        *state.own(PinningHooks).table(),
    )
    registered = Counter((path, function) for path, held in HookRegistry._hooks.items() for _, function, _ in held)
    return {
        "missing": [hook.target.path for hook in ours if not compat_hooks.is_applied(hook)],
        "several_around": [
            path for path, held in HookRegistry._hooks.items() if [kind.name for kind, *_ in held].count("AROUND") > 1
        ],
        "twice": [path for (path, _), times in registered.items() if times > 1],
    }


if __name__ == "__main__":
    print(json.dumps({"engine": engine, "factory": factory}[sys.argv[1]](*sys.argv[2:])))
