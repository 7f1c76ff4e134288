"""Whether the ranks of a tensor-parallel server planned alike: their own totals, from GET /metrics.

SGLang's server answers for rank 0 alone. But each rank keeps prefixpack's counters for itself, and with
`METRICS_OF_ALL_RANKS` each exports them with a label of its own. Ranks that planned other steps or read other KV
positions have other totals; time is left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sgl_prefix_attn.demo.server import Server

METRICS_OF_ALL_RANKS = ("--enable-metrics", "--enable-metrics-for-all-schedulers")
WAIT_SECONDS = 5.0
_PREFIX, _SUFFIX = "sglang:prefixpack_", "_total"
_ALIKE_EVERYWHERE = ("model_name", "tp_rank", "pp_rank")
Totals = dict[str, float]


@dataclass(frozen=True)
class Ranks:
    """What the ranks of a server counted since it started.

    Attributes:
        totals: by rank and counter; a counter with labels is written as `name/label value`.
        expected: ranks there have to be.
    """

    totals: dict[int, Totals]
    expected: int

    @property
    def alike(self) -> bool:
        """All ranks are there, counted something and counted the same."""
        first = self.totals.get(0)
        return (
            bool(first)
            and sorted(self.totals) == list(range(self.expected))
            and all(totals == first for totals in self.totals.values())
        )

    @property
    def differing(self) -> list[str]:
        """Counters that are not the same on all ranks."""
        names = sorted({name for totals in self.totals.values() for name in totals})
        return [name for name in names if len({totals.get(name) for totals in self.totals.values()}) > 1]

    def as_json(self) -> dict[str, Any]:
        return {"alike": self.alike, "expected": self.expected, "differing": self.differing, "totals": self.totals}


def ranks_in(metrics: str, expected: int) -> Ranks:
    """What the text of GET /metrics says of prefixpack's ranks."""
    totals: dict[int, Totals] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not (sample.name.startswith(_PREFIX) and sample.name.endswith(_SUFFIX) and "tp_rank" in sample.labels):
                continue
            name = sample.name[len(_PREFIX) : -len(_SUFFIX)]
            if not name.endswith("_seconds"):
                labels = [value for label, value in sample.labels.items() if label not in _ALIKE_EVERYWHERE]
                totals.setdefault(int(sample.labels["tp_rank"]), {})["/".join([name, *labels])] = sample.value
    return Ranks(totals, expected)


def read_ranks(server: Server) -> Ranks | None:
    """The ranks' totals now; None for one rank or without prefixpack.

    Rank 0 answers and others may be some steps behind, so they are given a few seconds.

    Raises:
        ServerError: the server is gone or exports no metrics.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        info = server.info()  # has each rank bring its metrics up to date
        if info["tp_size"] == 1 or not any("prefixpack" in state for state in info["internal_states"]):
            return None
        ranks = ranks_in(server.get("/metrics"), info["tp_size"])
        if ranks.alike or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)
