"""What measures a drawn batch: packed and stock kernels of one machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

import torch

from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.workloads.case import Case, Heads

Note = Callable[[str], object]
Ways = dict[str, dict[str, Any]]  # way of a results file -> {"cold_us": ...} or {"failed": why}


@dataclass(frozen=True)
class Shape:
    """The attention shape to calibrate for.

    Attributes:
        heads: query heads, KV heads of a rank.
        kv_dtype: a key of `routing.measured.KV_BYTES`.
        dtype: of queries.
        page_size: of the server. Shared ranges are whole pages, and fa3 reads pages.
    """

    heads: Heads
    head_dim: int
    kv_dtype: str
    dtype: str
    page_size: int = 1


class DeviceLostError(RuntimeError):
    """A kernel left the device unusable; if the command is started again, it goes on with the next batch."""


class Bench(Protocol):
    """Measures the kernels of one machine.

    Attributes:
        most_unique_bytes: KV of the largest batch that can be measured.
        draw_kv_dtype: KV type under which `workloads.draw` bounds the batches.
        packed_name: of the packed kernels in profiles: native, triton or cpu.
        ways: the ways that `measure` tells of.
    """

    most_unique_bytes: float
    draw_kv_dtype: str
    packed_name: str
    ways: tuple[str, ...]

    def machine(self) -> dict[str, Any]:
        """`machine` of a results file: gpu, capability, date; sm_count of a GPU."""

    def measure(self, case: Case) -> Ways:
        """Times of all kernels on one batch. Results are checked against each other.

        Raises:
            DeviceLostError: the device cannot be used any more.
        """


class CpuBench:
    """The CPU executor against attention request by request, as SGLang's torch_native backend does it, in fp32.

    Times are the best of some rounds in turn: other processes only add to a time.
    """

    most_unique_bytes = 4e6
    draw_kv_dtype = "bf16"
    packed_name = "cpu"
    ways: tuple[str, ...] = ("prefixpack_cpu", "torch_native")
    rounds = 3

    def __init__(self, shape: Shape, threads: int = 1) -> None:
        self.shape = shape
        self.threads = threads
        self._workspace = PartialWorkspace()

    def machine(self) -> dict[str, Any]:
        return {"gpu": "cpu", "capability": "", "date": now(), "threads": self.threads}

    def measure(self, case: Case) -> Ways:
        """Times of both ways."""
        q_heads, kv_heads = case.heads
        shape = ModelShape(q_heads, kv_heads, case.head_dim, kv_bytes=4)
        generator = torch.Generator().manual_seed(0)
        table = torch.from_numpy(case.table(self.shape.page_size))
        lens = torch.from_numpy(case.lengths)
        k, v = (
            torch.randn(case.slots(self.shape.page_size), kv_heads, case.head_dim, generator=generator)
            for _ in range(2)
        )
        q = torch.randn(len(lens), q_heads, case.head_dim, generator=generator)
        plan = Planner(shape, DeviceModel.cpu(self.threads)).plan(case.forest(), case.lengths)
        rows = torch.arange(len(lens))
        out, expected = torch.empty_like(q), torch.empty_like(q)
        scale = case.head_dim**-0.5

        def packed() -> None:
            packed_attention(
                q, k, v, plan, req_to_token=table, seq_lens=lens, req_pool_indices=rows, scale=scale, out=out,
                workspace=self._workspace, threads=self.threads,
            )  # fmt: skip

        def torch_native() -> None:
            for request, length in enumerate(case.seq_lens):
                slots = table[request, :length]
                keys, values = k[slots].movedim(0, 1), v[slots].movedim(0, 1)
                expected[request] = torch.nn.functional.scaled_dot_product_attention(
                    q[request, None, :, None], keys[None], values[None], scale=scale, enable_gqa=q_heads != kv_heads
                )[0, :, 0]

        runs: dict[str, Callable[[], None]] = {"prefixpack_cpu": packed, "torch_native": torch_native}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(1 + self.rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                if turn:
                    times[name].append(1e6 * (time.perf_counter() - begin))
        if not torch.allclose(out, expected, rtol=1e-3, atol=1e-3):
            return {name: {"failed": "the results differ"} for name in runs}
        return {name: {"cold_us": round(min(found), 3)} for name, found in times.items()}


class CudaBench:
    """The GPU kernels, one layer at a time in a CUDA graph, with a cold L2, by CUDA events.

    Args:
        stocks: SGLang backends: fa3, flashinfer, triton. Those that are not installed are left out with a note.
        bytes_of_kv: K and V memory for batches.
        packed_name: the packed kernels, native or triton.
    """

    draw_kv_dtype: str
    replays = 12

    def __init__(
        self, shape: Shape, stocks: list[str], bytes_of_kv: float, packed_name: str, note: Note = print
    ) -> None:
        from sgl_prefix_attn.calibration.kernels.fixture import KV_DTYPES, KvPool
        from sgl_prefix_attn.calibration.kernels.timing import Timer

        self.shape = shape
        self.draw_kv_dtype = shape.kv_dtype
        self.most_unique_bytes = bytes_of_kv
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.timer = Timer(self.device)
        kv_type = KV_DTYPES[shape.kv_dtype]
        self.packed_name = packed_name
        self.kernels = cuda_kernels(self.device, kv_type, stocks, packed_name, note)
        self.ways: tuple[str, ...] = tuple(kernel.name for kernel in self.kernels)
        self.pool = KvPool(int(bytes_of_kv / 2 / kv_type.itemsize), self.device, kv_type)

    def machine(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        capability = f"{properties.major}.{properties.minor}"
        sm_count = properties.multi_processor_count
        return {"gpu": properties.name, "capability": capability, "sm_count": sm_count, "date": now()}

    def measure(self, case: Case) -> Ways:
        """Times of all kernels. Our result is the reference of the others'."""
        from sgl_prefix_attn.calibration.kernels.fixture import Fixture

        fixture = Fixture(case, self.pool, self.device, page_size=self.shape.page_size)
        return measured_ways(self.kernels, fixture, self.timer, self.replays)


def cuda_kernels(
    device: torch.device, kv_type: torch.dtype, stocks: list[str], packed_name: str, note: Note
) -> list[Any]:
    """Our kernels of this name, then those of the stock backends that are installed and take this KV type.

    Raises:
        ValueError: our kernels, or all stock kernels, cannot run here.
    """
    from sgl_prefix_attn.calibration.kernels import packed, stock

    made: list[Any] = []
    ours = packed.PrefixPack if packed_name == "native" else packed.PrefixPackTriton
    makers: list[tuple[str, Callable[[], Any]]] = [(ours.name, lambda: ours(device))]
    if "fa3" in stocks:
        makers.append(("fa3", lambda: stock.Fa3(device)))
    if "flashinfer" in stocks:
        makers.append(("flashinfer with tensor cores", lambda: stock.Decode(device, tensor_cores=True)))
        makers.append(("flashinfer with CUDA cores", lambda: stock.Decode(device, tensor_cores=False)))
    if "triton" in stocks:
        makers.append(("triton", lambda: stock.TritonDecode(device)))
    for name, make in makers:
        try:
            kernel = make()
        except Exception as error:  # an import of another project's package may raise anything
            note(f"{name} is left out: {type(error).__name__}: {error}")
            continue
        if kv_type in kernel.kv_dtypes:
            made.append(kernel)
        else:
            note(f"{name} is left out: it takes no KV in {kv_type} with queries in bf16")
    if not made or made[0].name != ours.name:
        raise ValueError("the packed kernels cannot run here: see the note above")
    if len(made) == 1:
        raise ValueError(f"none of the stock kernels {', '.join(stocks)} can run here: see the notes above")
    return made


TOLERANCE = 1.5e-2  # of the norm; bf16 outputs and weights round to about 3e-3


def measured_ways(kernels: list[Any], fixture: Any, timer: Any, replays: int) -> Ways:
    """Cold times of kernels on one batch; of a kernel with options the fastest.

    Args:
        kernels: ours first.
        fixture: the batch's tensors.
        timer: captures and replays, see `kernels.timing.Timer`.

    Raises:
        DeviceLostError: the device cannot be used any more.
    """
    from sgl_prefix_attn.calibration.kernels.fixture import relative_error

    found: Ways = {}
    expected: torch.Tensor | None = None
    for kernel in kernels:
        best: float | None = None
        failure = "the kernel does not take this batch"
        options: list[Any] = []
        try:
            options = kernel.bind(fixture)
        except Exception as error:  # a kernel that fails on one batch must not end the run; the row says why
            failure = _failure(kernel, error, timer)
        for option in options:
            try:
                kernel.use(option)
                kernel.plan()
                fixture.out.fill_(torch.nan)
                result = kernel.run()
                if expected is None:
                    expected = result.clone()
                elif not relative_error(result, expected) <= TOLERANCE:
                    failure = "the result differs from ours"
                    continue
                us = statistics.median(timer.cold(timer.capture(kernel.run), replays))
                best = us if best is None else min(best, us)
            except Exception as error:  # other options may run: fa3 without its metadata, for example
                failure = _failure(kernel, error, timer)
        kernel.release()
        found[kernel.name] = {"failed": failure} if best is None else {"cold_us": round(best, 3)}
    return found


def _failure(kernel: Any, error: Exception, timer: Any) -> str:
    """The error in words. Raises DeviceLostError if the device cannot be used any more."""
    failure = f"{type(error).__name__}: {error}"[:200]
    if timer.device_is_lost():
        kernel.release()
        raise DeviceLostError(f"{kernel.name}: {failure}") from error
    return failure


def now() -> str:
    """UTC, to the minute."""
    return datetime.now(timezone.utc).isoformat(timespec="minutes")
