"""The committed decode batches, chosen by name for `gpu_attention`."""

from __future__ import annotations

from fnmatch import fnmatch

from benchmarks.workloads.case import Case, Heads, make_case
from benchmarks.workloads.committed import catalogue

# Trees of every kind of difficulty, for a run of a minute.
QUICK = ("pat/01", "pat/03", "pat/09", "pat/12", "pat/18", "pat/19", "random/b64_*", "rl/p4096", "none/b32_l2048")


def select(patterns: list[str], heads: list[Heads] | None, quick: bool = False) -> list[Case]:
    """Cases whose names match one of the globs, in the order of the catalogue, grouped by head setting.

    Args:
        patterns: none: every case.
        heads: none: the head settings a family is published or usual with; else exactly these, for every case.
        quick: only the few cases of `QUICK`, at 32/8.
    """
    wanted = patterns or (list(QUICK) if quick else ["*"])
    chosen: list[Case] = []
    for name, usual, build in catalogue():
        if any(fnmatch(name, pattern) for pattern in wanted):
            paths, seq_lens = build()
            settings = heads or ([(32, 8)] if quick else list(usual))
            chosen.extend(make_case(name, setting, paths, seq_lens) for setting in settings)
    order = list(dict.fromkeys(case.heads for case in chosen))
    return sorted(chosen, key=lambda case: order.index(case.heads))
