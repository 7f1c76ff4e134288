"""Draws batches, measures them and keeps the rows in a file, so that a stopped run goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sgl_prefix_attn import __version__
from sgl_prefix_attn.calibration.bench import Bench, DeviceLostError, Shape
from sgl_prefix_attn.core.files import read_text, write_whole
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.measured import KV_BYTES
from sgl_prefix_attn.routing.profile import head_shape
from sgl_prefix_attn.routing.versions import KERNELS_VERSION
from sgl_prefix_attn.workloads.case import Case
from sgl_prefix_attn.workloads.draw import ALL_FAMILIES, draw

FIT, CHECK, AGAIN = "fit", "check", "again"
MOST_READ_RATIO = 8.0  # KV read request by request, over the bytes that the largest batch may have
_DRAWS_OF_A_CASE = 20
WRITTEN_SECONDS = 2.0  # most time of measuring that a kill loses


def model_shape(shape: Shape) -> ModelShape:
    """The shape that costs are computed for."""
    return ModelShape(*shape.heads, shape.head_dim, kv_bytes=KV_BYTES[shape.kv_dtype])


def drawn_cases(seed: int, shape: Shape, bench: Bench, count: int, families: Sequence[str]) -> Iterator[Case]:
    """`count` batches of a seed. Families take turns, so that every prefix samples them evenly.

    A batch whose KV does not fit is drawn again, and left out if it never does.
    """
    for index in range(count):
        family = families[index % len(families)]
        for attempt in range(_DRAWS_OF_A_CASE):
            case = draw(
                [seed, index, attempt], family, shape.heads, shape.head_dim, bench.draw_kv_dtype,
                name=f"{family}/{seed}.{index:03}", most_unique_bytes=bench.most_unique_bytes,
                most_read_bytes=MOST_READ_RATIO * bench.most_unique_bytes,
            ).with_pages(shape.page_size)  # fmt: skip
            padding = case.slots(shape.page_size) / case.unique_tokens
            if padding * case.kv_bytes() <= bench.most_unique_bytes:
                yield case
                break


class StepsFile:
    """The measured rows of a run: a results file, as `routing.measured.read_results` reads it.

    Args:
        path: the file. An existing one is continued.
        header: of a new file. Arguments, GPU and kernels have to be those of an existing one.

    Raises:
        ValueError: the file is of other arguments, another machine or other kernels, or cannot be read or written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = header
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}  # by set and key
        if path.exists():
            self._continue()
        self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def _continue(self) -> None:
        try:
            before = json.loads(read_text(self.path))
            same = all(before[name] == self.header[name] for name in ("arguments", "kernels_version")) and (
                before["machine"]["gpu"] == self.header["machine"]["gpu"]
            )
            self._rows = {
                (row["set"], row["key"]): {**row, "baselines": dict(row["baselines"])} for row in before["rows"]
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: not the steps of a calibration: {error}; remove it") from error
        if not same:
            raise ValueError(
                f"{self.path} has steps of other arguments, another machine or other kernels; --fresh drops them"
            )
        self.header = {key: value for key, value in before.items() if key != "rows"}

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row. Of an earlier row of the batch the kernels stay that this one has not, or has no times of."""
        before = self._rows.get((row["set"], row["key"]), {"baselines": {}})["baselines"]
        new = {way: found for way, found in row["baselines"].items() if "failed" not in found or way not in before}
        self._rows[row["set"], row["key"]] = {**row, "baselines": {**before, **new}}

    def lacks(self, kind: str, case: Case, ways: Sequence[str], retry_failed: bool = False) -> bool:
        """Whether a batch has to be measured: it has no row, or its row is from before one of the ways was there.

        Args:
            retry_failed: also if one of the ways failed.
        """
        row = self._rows.get((kind, case.key))
        if row is None:
            return True
        return any(way not in row["baselines"] or (retry_failed and "failed" in row["baselines"][way]) for way in ways)

    def has(self, kind: str, case: Case) -> bool:
        return (kind, case.key) in self._rows

    def write(self) -> None:
        """Replaces the file as a whole, so that a kill never leaves half of one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot make the folder: {error.strerror}") from error
        write_whole(self.path, json.dumps({**self.header, "rows": self.rows}).encode())

    def select(self, kind: str, path: Path) -> Path:
        """Writes the rows of a set to a results file of their own."""
        rows = [row for row in self.rows if row["set"] == kind]
        path.write_text(json.dumps({**self.header, "rows": rows}), encoding="utf-8")
        return path


def header_of(bench: Bench, shape: Shape, arguments: dict[str, Any]) -> dict[str, Any]:
    """The header of a steps file."""
    return {
        "machine": bench.machine(),
        "commit": __version__,
        "kernels_version": KERNELS_VERSION,
        "kv_dtype": shape.kv_dtype,
        "dtype": shape.dtype,
        "head_shapes": [head_shape(model_shape(shape))],
        "page_size": shape.page_size,
        "arguments": arguments,
    }


def measure(
    bench: Bench,
    shape: Shape,
    steps: StepsFile,
    plan: Sequence[tuple[str, Case]],
    seconds: float,
    title: str,
    retry_failed: bool = False,
) -> bool:
    """Measures what the file does not have yet, with a progress bar.

    That is, batches without a row, and those of a run that had not all of the kernels.

    Args:
        plan: set and batch, in the order of measurement.
        seconds: no batch is begun after this time. Those measured before count for nothing.
        retry_failed: measures again the batches on which a kernel failed.

    Returns:
        Whether all were measured.

    Raises:
        DeviceLostError: the device cannot be used any more. The rows are in the file. That of the last batch has no
            times: a batch that always loses the device would stop every run.
    """
    left = [(kind, case) for kind, case in plan if steps.lacks(kind, case, bench.ways, retry_failed)]
    if again := sum(steps.has(kind, case) for kind, case in left):
        why = "a kernel was not there or failed" if retry_failed else "a kernel was not there"
        print(f"{title}: {again} batches are measured again, on which {why}")
    elif plan and not left:
        print(f"{title}: all {len(plan)} batches are in {steps.path} already; --fresh measures them again")
    begin = time.monotonic()
    written = begin
    try:
        with tqdm(left, desc=title, unit="batch", initial=len(plan) - len(left), total=len(plan)) as bar:
            for kind, case in bar:
                if time.monotonic() - begin > seconds:
                    return False
                row = {**row_of(case, shape), "set": kind}
                try:
                    steps.add({**row, "baselines": bench.measure(case)})
                except DeviceLostError as error:
                    failed = {"failed": f"the device was lost: {error}"}
                    steps.add({**row, "baselines": dict.fromkeys(bench.ways, failed)})
                    raise
                if time.monotonic() - written > WRITTEN_SECONDS:
                    steps.write()
                    written = time.monotonic()
    finally:
        steps.write()
    return True


def row_of(case: Case, shape: Shape) -> dict[str, Any]:
    """The row of a batch, without times."""
    return {
        "key": case.key,
        "case": case.name,
        "q_heads": case.heads[0],
        "kv_heads": case.heads[1],
        "head_dim": case.head_dim,
        "kv_dtype": shape.kv_dtype,
        "detail": case.detail,
        "step": asdict(StepFeatures.of(ForestFacts.of(case.forest()), case.lengths)),
    }


def families_of(text: list[str] | None) -> tuple[str, ...]:
    """The families to draw from.

    Raises:
        ValueError: an unknown family.
    """
    for family in text or ():
        if family not in ALL_FAMILIES:
            raise ValueError(f"--families {family}: expected some of {', '.join(ALL_FAMILIES)}")
    return tuple(text or ALL_FAMILIES)
