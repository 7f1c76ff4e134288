"""Draws the dashboard without Grafana: its own queries, answered by Prometheus, from a demo server under load.

    python -m examples.grafana.render --out docs/img/dashboard.png

Needs `prometheus` on the PATH, matplotlib, and SGLang. Starts a CPU server with a tiny model for about two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.figure import Figure

from examples.pins import ask
from examples.rollout_client import rollout
from sgl_prefix_attn.demo.server import ServerOptions, free_port, serve
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model

DASHBOARD = Path(__file__).with_name("prefixpack.json")
SCRAPE = "2s"
RATE_INTERVAL = "12s"
COLUMNS = 3
UNITS = {"ops": "1/s", "percentunit": "share", "short": "number"}  # Grafana's name: ours
# A CPU server routes by a condition only. By this one, steps of requests that share nothing run stock.
ROUTE = "reuse>=1.2"


def load(url: str, seconds: float) -> None:
    """Rollouts with drawn lengths, then requests that share nothing, in turns; a pin in the middle."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(RESERVED_TOKENS, VOCABULARY) for _ in range(count)]

    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        shared = int(passed / 20) % 2 == 0
        prompts = [tokens(rng.randrange(200, 600)) for _ in range(4 if shared else 8)]
        sampling = {"max_new_tokens": rng.randrange(20, 120), "ignore_eos": True}
        list(rollout(url, prompts, 8 if shared else 1, 24, sampling))
        if passed > seconds / 2 and not any(scheduler["pins"] for scheduler in ask(url, "GET")):
            ask(url, "POST", {"token_ids": prompts[0], "label": "system prompt"})


def series(prometheus: str, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
    """The answer of Prometheus to one query of the dashboard."""
    query = expression.replace("$__rate_interval", RATE_INTERVAL).replace("$model", ".*").replace("$server", ".*")
    fields = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": "1"})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{fields}") as answer:
        return list(json.load(answer)["data"]["result"])


def draw(prometheus: str, begin: float, end: float) -> Figure:
    """All panels in Grafana's grid."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 10 / 3 * rows), layout="constrained")
    grid = list(figure.subplots(rows, COLUMNS).flat)
    for axes in grid[len(panels) :]:
        axes.remove()
    for panel, axes in zip(panels, grid, strict=False):
        for target in panel["targets"]:
            for found in series(prometheus, target["expr"], begin, end):
                label = target["legendFormat"]
                for name, value in found["metric"].items():
                    label = label.replace(f"{{{{{name}}}}}", value)
                places = [(float(when) - begin, float(value)) for when, value in found["values"]]
                axes.plot(*zip(*places, strict=True), label=label, linewidth=1.2)
        axes.set_title(panel["title"], fontsize=9, loc="left")
        axes.set_xlabel("s", fontsize=8)
        axes.set_ylabel(UNITS[panel["fieldConfig"]["defaults"]["unit"]], fontsize=8)
        axes.set_xlim(0, end - begin)
        values = [value for line in axes.lines for value in line.get_ydata()]
        axes.set_ylim(0, 1.1 * max(values, default=0.0) or 1)
        if not values:
            axes.text(0.5, 0.5, "none counted", transform=axes.transAxes, ha="center", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if axes.lines:
            axes.legend(fontsize=7, frameon=False)
    if not any(axes.lines for axes in figure.axes):
        with urllib.request.urlopen(f"{prometheus}/api/v1/targets") as answer:
            raise SystemExit(f"no metrics: {answer.read().decode()}")
    figure.suptitle(
        f"{dashboard['title']}: a demo server on a CPU, route {ROUTE}; seconds since the start of the load", fontsize=10
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"))
    parser.add_argument("--seconds", type=float, default=80.0)
    arguments = parser.parse_args()
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("no prometheus on the PATH")
    environment = {
        "PREFIXPACK_PIN_BUDGET_PERCENT": "50",
        "PREFIXPACK_METRICS_FLUSH_STEPS": "1",
        "PREFIXPACK_ROUTE": ROUTE,
    }
    sizes = ("--context-length", "2048", "--max-total-tokens", "32768", "--enable-metrics")
    options = ServerOptions(str(tiny_model()), "prefixpack", extra=sizes, environment=environment)
    with tempfile.TemporaryDirectory() as folder, serve(options) as server:
        target = server.url.removeprefix("http://")
        jobs = [{"job_name": "sglang", "scrape_interval": SCRAPE, "static_configs": [{"targets": [target]}]}]
        config = Path(folder, "prometheus.yml")
        config.write_text(json.dumps({"scrape_configs": jobs}))  # JSON is YAML
        port = free_port()
        places = [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen([program, f"--config.file={config}", *places], stderr=subprocess.DEVNULL)
        try:
            time.sleep(5)
            begin = time.time()
            load(server.url, arguments.seconds)
            draw(f"http://127.0.0.1:{port}", begin, time.time()).savefig(arguments.out, dpi=80)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
