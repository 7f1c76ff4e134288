"""The client of a live A/B test: starts it, keeps its lease, and reports."""

from __future__ import annotations

import html
import json
import time
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sgl_prefix_attn.abtest.client import Client, ServerRefusalError, StepBar
from sgl_prefix_attn.abtest.statistics import CopySteps, Verdict, judge, lines_of, steps_of_copies
from sgl_prefix_attn.core.files import write_whole
from sgl_prefix_attn.routing.live_plan import LivePlan

POLL_SECONDS = 0.5
ENDINGS = (".json", ".png", ".html")  # of a report's files


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
    return copies


def report(copies: list[dict[str, Any]], effect: float, out: Path | None) -> Verdict:
    """Prints the verdict; writes JSON, PNG (with matplotlib) and an HTML page without outside parts.

    Args:
        copies: the data-parallel copies' last states. Each has switched its arms by its own steps.

    Raises:
        ValueError: a file cannot be written.
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
        write_report(out, "A/B test", lines, values, _picture(plan, steps))
    return verdict


def file_of(out: Path, ending: str) -> Path:
    """A file of the report NAME or NAME.json. The ending is added: a name as llama-3.1 keeps its dot.

    Raises:
        ValueError: there is no name.
    """
    if not out.name:
        raise ValueError(f"--out {out}: expected a name")
    return out.with_name(out.name.removesuffix(".json") + ending)


def write_report(out: Path, title: str, lines: list[str], values: dict[str, Any], picture: bytes) -> None:
    """Writes NAME.json, NAME.html, and NAME.png if there is a picture.

    Raises:
        ValueError: a file cannot be written.
    """
    write_whole(file_of(out, ".json"), (json.dumps(values, default=str) + "\n").encode())
    image = ""
    if picture:
        write_whole(file_of(out, ".png"), picture)
        image = f'<img alt="{title}" src="data:image/png;base64,{b64encode(picture).decode()}">'
    text = html.escape("\n".join(lines))
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title><h1>{title}</h1><pre>{text}</pre>{image}\n"
    write_whole(file_of(out, ".html"), page.encode())


def _picture(plan: LivePlan, copies: Sequence[CopySteps]) -> bytes:
    """PNG of the step times in the order of the steps, by arm and copy; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return b""
    figure = Figure(figsize=(10, 4 * len(copies)), layout="constrained")
    for steps, axis in zip(copies, figure.subplots(len(copies), squeeze=False)[:, 0], strict=True):
        arm_of = np.repeat(plan.order(), plan.block_steps)[: len(steps.us)]
        for arm, colour in enumerate(("tab:blue", "tab:orange")):
            rows = np.flatnonzero((arm_of == arm) & ~np.isnan(steps.us))
            axis.scatter(rows, steps.us[rows] / 1e3, s=4, c=colour, label=f"{'AB'[arm]}: {plan.arms[arm]}")
        axis.set(xlabel="decode step", ylabel="ms")
        axis.legend()
    return as_png(figure)


def as_png(figure: Any) -> bytes:
    """A figure of matplotlib as PNG."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
