"""Kernel times by name of some steps of a running server, from SGLang's own profiler."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from sgl_prefix_attn.demo.server import Server

# The first pattern that a kernel's name contains is its group.
GROUPS = (
    ("packed attention", r"prefixpack|packed_(blocks|ctas|warps)"),
    ("stock attention", r"flash|fmha|attn|attention|BatchDecode|BatchPrefill|decode_grouped|VariableLength"),
    ("matrix products", r"gemm|cutlass|nvjet|sm90_xmma|cublas|gemv"),
    ("other", r""),
)
SHOWN = 12


def start(server: Server, folder: Path, steps: int) -> None:
    """Asks the server to trace its next `steps` steps into `folder`.

    Raises:
        ServerError: the server refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server.post("/start_profile", {"output_dir": str(folder.resolve()), "num_steps": steps, "activities": ["GPU"]})


def wait_for_trace(folder: Path, seconds: float) -> Path | None:
    """The trace once it can be read as a whole, or None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in sorted(folder.glob("*.trace.json.gz")):
            try:
                json.loads(gzip.decompress(path.read_bytes()))
            except (EOFError, ValueError, OSError):  # still being written
                continue
            return path
        time.sleep(0.5)
    return None


def read_trace(path: Path, steps: int) -> dict[str, Any]:
    """Microseconds per step of the GPU's kernels, by group and for the longest names."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    names: dict[str, float] = defaultdict(float)
    groups: dict[str, float] = defaultdict(float)
    for event in kernels:
        names[event["name"]] += event["dur"]
        groups[next(group for group, pattern in GROUPS if re.search(pattern, event["name"], re.I))] += event["dur"]
    longest = sorted(names.items(), key=lambda item: -item[1])[:SHOWN]
    return {
        "steps": steps,
        "us_per_step": {group: round(total / steps, 1) for group, total in groups.items()},
        "longest_us_per_step": {name[:120]: round(total / steps, 1) for name, total in longest},
    }
