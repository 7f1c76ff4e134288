"""The client of a live A/B test: starts it, keeps its lease, and reports."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sgl_prefix_attn.abtest.client import Client, ServerRefusalError, StepBar
from sgl_prefix_attn.abtest.statistics import Verdict, judge, lines_of, steps_of_copies
from sgl_prefix_attn.core.files import write_whole
from sgl_prefix_attn.routing.live_plan import LivePlan

POLL_SECONDS = 0.5


def run(client: Client, plan: LivePlan, seconds: float) -> list[dict[str, Any]]:
    """Runs a test until each data-parallel copy has ended it, or some seconds. Returns the last state of each copy.

    Ctrl-C, or a server that does not answer for some tries, stops the test: the steps until then are returned.

    A client that dies leaves the server on its own policy after `lease_steps` steps of any kind.
    """
    begin = time.monotonic()
    client.start(plan.model_dump())
    try:
        with StepBar(plan.steps, "A/B") as bar:
            while True:
                time.sleep(POLL_SECONDS)
                copies = client.read(first=plan.steps)
                bar.reach(min(copy["steps_done"] for copy in copies))
                ended = all(copy["status"] != "running" for copy in copies)
                if ended or time.monotonic() - begin > seconds:
                    break
    except (KeyboardInterrupt, ServerRefusalError) as error:
        tqdm.write(f"The test was stopped early, by {f'an error: {error}' if str(error) else 'Ctrl-C'}")
    finally:
        copies = client.stop()
    client.complete(copies, ("us", "requests", "packed"))
    return copies


def report(copies: list[dict[str, Any]], effect: float, out: Path | None) -> Verdict:
    """Prints the verdict, and writes it and the steps as JSON.

    Args:
        copies: the data-parallel copies' last states. Each has switched its arms by its own steps.

    Raises:
        ValueError: the file cannot be written.
    """
    plan, steps = steps_of_copies(copies)
    verdict = judge(plan, steps, effect)
    lines = lines_of(verdict)
    if len(copies) > 1:
        counts = ", ".join(str(copy["steps_done"]) for copy in copies)
        lines.append(f"{len(copies)} data-parallel copies, each with its own blocks; decode steps: {counts}.")
    print("\n".join(lines))
    if out is not None:
        values = {"plan": plan.model_dump(), "verdict": verdict.as_json(), "copies": copies}
        write_whole(out, (json.dumps(values, default=str) + "\n").encode())
    return verdict
