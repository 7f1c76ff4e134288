"""The client of a live A/B test: starts it, keeps its lease, and reports."""

from __future__ import annotations

import html
import json
import time
import urllib.error
import urllib.request
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sgl_prefix_attn.abtest.statistics import Verdict, judge, lines_of, rows_of_copies
from sgl_prefix_attn.routing.live_plan import LivePlan

PATH = "/prefixpack/abtest"
POLL_SECONDS = 0.5


class ServerRefusalError(ValueError):
    """The server refused a command, or does not answer: the message says why."""


class LiveClient:
    """Commands of live tests to one server.

    Args:
        url: of the server, for example http://127.0.0.1:30000.
        api_key: SGLang's admin key, where the server has one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/") + PATH
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def start(self, plan: LivePlan) -> dict[str, Any]:
        return self._ask("POST", self.url, plan.model_dump())

    def read(self) -> dict[str, Any]:
        """The whole test; renews its lease."""
        return self._ask("GET", self.url)

    def stop(self) -> dict[str, Any]:
        return self._ask("DELETE", self.url)

    def _ask(self, method: str, url: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise ServerRefusalError(_refusal(error)) from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ServerRefusalError(f"{self.url}: no answer: {error}") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    if error.code == 404 and "kind" not in text:
        return "the server has no address for live tests: start it with PREFIXPACK_LIVE_TESTS=1"
    if error.code in (401, 403):
        return "the server asks for its admin key: give --api-key"
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}: {text[:300]}"


def run(client: LiveClient, plan: LivePlan, seconds: float) -> dict[str, Any]:
    """Runs a test to its end, or stops it after some seconds. Returns the server's last answer.

    A client that dies leaves the server on its own policy after `lease_steps` decode steps.
    """
    begin = time.monotonic()
    client.start(plan)
    try:
        with tqdm(total=plan.steps, desc="A/B", unit="step") as bar:
            while True:
                time.sleep(POLL_SECONDS)
                answer = client.read()
                (first, *_) = answer["copies"]
                bar.update(first["steps_done"] - bar.n)
                if first["status"] != "running" or time.monotonic() - begin > seconds:
                    break
    finally:
        answer = client.stop()
    return answer


def report(answer: dict[str, Any], effect: float, out: Path | None) -> Verdict:
    """Prints the verdict; writes JSON, PNG (with matplotlib) and an HTML page without outside parts."""
    plan, us, requests, packed = rows_of_copies(answer["copies"])
    verdict = judge(plan, us, requests, packed, effect)
    lines = lines_of(verdict)
    print("\n".join(lines))
    if out is not None:
        values = {"plan": plan.model_dump(), "verdict": verdict.as_json(), "copies": answer["copies"]}
        out.with_suffix(".json").write_text(json.dumps(values, default=str) + "\n", encoding="utf-8")
        picture = _picture(plan, us)
        image = ""
        if picture:
            out.with_suffix(".png").write_bytes(picture)
            image = f'<img alt="step times" src="data:image/png;base64,{b64encode(picture).decode()}">'
        text = html.escape("\n".join(lines))
        page = f"<!doctype html><meta charset=utf-8><title>A/B test</title><h1>A/B test</h1><pre>{text}</pre>{image}\n"
        out.with_suffix(".html").write_text(page, encoding="utf-8")
    return verdict


def _picture(plan: LivePlan, us: np.ndarray[Any, np.dtype[np.float64]]) -> bytes:
    """PNG of the step times in the order of the steps, by arm; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return b""
    arm_of = np.repeat(plan.order(), plan.block_steps)[: len(us)]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    for arm, colour in enumerate(("tab:blue", "tab:orange")):
        rows = np.flatnonzero((arm_of == arm) & ~np.isnan(us))
        axis.scatter(rows, us[rows] / 1e3, s=4, c=colour, label=f"{'AB'[arm]}: {plan.arms[arm]}")
    axis.set(xlabel="decode step", ylabel="ms")
    axis.legend()
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()
