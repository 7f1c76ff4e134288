"""Run by test_engine.py in a process of its own: pins through `Engine`, and prints what happened as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "context_length": 2048,
    "max_total_tokens": 2048,
    "log_level": "error",
}


def main(model: str) -> None:
    import sglang

    from sgl_prefix_attn.sglang_plugin.pinning.client import EnginePins, PinningError

    engine = sglang.Engine(model_path=model, **OPTIONS)
    try:
        pins = EnginePins(engine)
        tokens = [20 + position % 900 for position in range(300)]
        (made,) = pins.pin(tokens, label="system")
        engine.generate(input_ids=[[*tokens, 11, 12]], sampling_params={"max_new_tokens": 2})
        (listed,) = pins.pins()
        (released,) = pins.release(made["pin"]["id"])
        try:
            pins.release(made["pin"]["id"])
        except PinningError as error:
            again = error.kind
        else:
            again = "released twice"
        print(json.dumps({"made": made, "listed": listed, "released": released, "again": again}))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
