"""Decode batches to measure, simulate and fit with: listed ones, and families drawn from a seed."""

from benchmarks.workloads.case import KV_BYTES, Case, Heads, make_case
from benchmarks.workloads.draw import ALL_FAMILIES, ALL_HEADS, draw, draw_set

__all__ = ["ALL_FAMILIES", "ALL_HEADS", "KV_BYTES", "Case", "Heads", "draw", "draw_set", "make_case"]
