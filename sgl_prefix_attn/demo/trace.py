"""The trace that comes with the package: a slice of Mooncake's conversation trace."""

from __future__ import annotations

from pathlib import Path

from sgl_prefix_attn.trace import TraceError as TraceError
from sgl_prefix_attn.trace import read_trace as read_trace

TRACE_SLICE = Path(__file__).parent / "data" / "mooncake_conversation_slice.jsonl"
