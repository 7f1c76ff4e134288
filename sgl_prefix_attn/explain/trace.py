"""Requests of a trace window as one batch. Requests share a prefix as far as their block hashes agree."""

from __future__ import annotations

from pathlib import Path

from sgl_prefix_attn.explain.batch import BatchDescription, InputError, Segment, describe
from sgl_prefix_attn.trace import BLOCK_TOKENS, TraceError, TraceRow, read_trace


def read_window(name: str, window: str, progress: float) -> BatchDescription:
    """Batch of the requests of `window`, "START:COUNT" by their order in the file, decoding at the same time.

    progress: share of its output that each request has generated, 0 to 1.
    """
    if not 0 <= progress <= 1:
        raise InputError(f"progress {progress}: expected a share from 0 to 1")
    start, count = _parse_window(window)
    try:
        rows = read_trace(Path(name), start + count)
    except TraceError as error:
        raise InputError(str(error)) from error
    if len(rows) < start + count:
        raise InputError(f"{name}: window {window} ends at request {start + count}; the file has {len(rows)}")
    rows = rows[start:]
    nodes: dict[tuple[int, int, int], int] = {}
    paths = [_path(row, nodes) for row in rows]
    # A decode step has at least its own token beyond the prompt.
    seq_lens = [row.input_length + max(1, round(row.output_length * progress)) for row in rows]
    return describe(f"{name} requests {start} to {start + count - 1}", paths, seq_lens)


def _parse_window(text: str) -> tuple[int, int]:
    start, colon, count = text.partition(":")
    if not colon or not start.isdecimal() or not count.isdecimal() or int(count) == 0:
        raise InputError(f"window {text!r}: expected START:COUNT, for example 0:64 for the first 64 requests")
    return int(start), int(count)


def _path(row: TraceRow, nodes: dict[tuple[int, int, int], int]) -> list[Segment]:
    """Segments of a prompt. A node is known by its parent, its hash id and, for a last and partial block, its end."""
    path: list[Segment] = []
    parent = -1
    for block, hash_id in enumerate(row.hash_ids):
        begin = block * BLOCK_TOKENS
        end = min(begin + BLOCK_TOKENS, row.input_length)
        parent = nodes.setdefault((parent, hash_id, end), len(nodes))
        path.append((parent, begin, end))
    return path
