"""Device times of a launch: in a CUDA graph with a cold or a warm L2, and as a step pays it, planning included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

FLUSH_BYTES = 256 << 20
WARM_CALLS = 4  # launches in the warm graph, as of layers that follow each other
LONG_US = 5e3  # beyond, fewer replays do
FEW = 8

Run = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How often each time is taken."""

    cold_replays: int = 20
    warm_replays: int = 10
    launches: int = 7


@dataclass(frozen=True)
class Times:
    """Medians in microseconds.

    Attributes:
        cold_us: one CUDA graph replay, L2 full of something else before.
        warm_us: one launch of several in a graph that was replayed just before.
        plan_launch_us: wall time of planning for this batch anew, an eager launch and the wait for it.
        replays: behind cold_us.
        cold_spread: (90th - 10th percentile) / median of the cold replays.
    """

    cold_us: float
    warm_us: float
    plan_launch_us: float
    replays: int
    cold_spread: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


class Timer:
    """Measures on the current stream of `device`.

    The L2 is made cold by writing one buffer and then reading another, each several times its size: what it then
    holds is clean, as it is after the weights of a layer were read, so no write-backs are charged to what follows.
    """

    def __init__(self, device: torch.device, flush_bytes: int = FLUSH_BYTES, effort: Effort | None = None) -> None:
        self.device = device
        self.effort = effort or Effort()
        self._written = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device)
        self._read = torch.zeros(flush_bytes // 4, dtype=torch.int32, device=device)
        self._sink = torch.empty((), dtype=torch.int32, device=device)
        self._capture_stream = torch.cuda.Stream(device)

    def flush(self) -> None:
        self._written.fill_(1)
        torch.amax(self._read, dim=0, out=self._sink)

    def measure(self, plan: Run, run: Run) -> Times:
        """All three times of a launch `run` that is planned and was run once already."""
        graph = self.capture(run)
        first = statistics.median(self.cold(graph, 3))
        cold = sorted(self.cold(graph, self.effort.cold_replays if first < LONG_US else FEW))
        del graph
        spread = (cold[int(0.9 * (len(cold) - 1))] - cold[int(0.1 * (len(cold) - 1))]) / statistics.median(cold)
        warm = self.warm(run, self.effort.warm_replays if first < LONG_US else 2)
        launches = [self.plan_and_launch(plan, run) for _ in range(self.effort.launches)]
        return Times(statistics.median(cold), warm, statistics.median(launches[1:]), len(cold), spread)

    def quick(self, run: Run) -> float:
        """Cold time of few replays, to choose by."""
        return statistics.median(self.cold(self.capture(run), 5))

    def capture(self, run: Run, calls: int = 1) -> torch.cuda.CUDAGraph:
        """A graph of `calls` launches, without the garbage collection of torch.cuda.graph, which outlasts all else."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(calls):
                    run()
            finally:
                graph.capture_end()
        return graph

    def cold(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        pairs = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush()
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def warm(self, run: Run, replays: int) -> float:
        graph = self.capture(run, WARM_CALLS)
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in times) * 1e3 / WARM_CALLS

    def plan_and_launch(self, plan: Run, run: Run) -> float:
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        plan()
        run()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) * 1e6

    def device_is_lost(self) -> bool:
        """Whether an earlier kernel left the CUDA context unusable, as an illegal access does."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def graph_floor_us(self) -> float:
        """Cold time of a graph that holds one kernel of one word: what every cold time contains besides work."""
        word = torch.zeros(1, device=self.device)
        return statistics.median(self.cold(self.capture(lambda: word.fill_(1.0)), self.effort.cold_replays))


def copy_bandwidth(device: torch.device, size: int = 4 << 30) -> float:
    """Bytes per second, read and written ones together, of the best of several device-to-device copies of `size`."""
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * size / statistics.median(seconds)
