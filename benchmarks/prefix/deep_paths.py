"""Host time of reading and planning deep and wide radix trees, on one core.

    python -m benchmarks.prefix.deep_paths --out benchmarks/results/radix_paths.json

Trees are of plain nodes; SGLang is not needed. Cases:

    chain       a request at the end of a chain of n radix nodes, which no request has used before
    along       n requests on a chain of n nodes, each one node further down
    known       256 requests along a known chain of n nodes; one more request joins in the middle
    children    n requests, each on a child of the root, which no request has used before
    split       256 of n known children of the root run; another child is split and its upper part joins
    plan chain  the planner on a forest of n nested nodes (n + 1 requests); at most 4,096 are supported
    plan root   the planner on a forest of n nodes without parents (2 n requests)

`--before FILE` adds the rows of another commit's run, made with the same cases.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import sgl_prefix_attn
from benchmarks.provenance import cpu_name
from sgl_prefix_attn.core.forest import PrefixForest, RadixMirror, int64_array
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape, Planner
from sgl_prefix_attn.sglang_plugin.prefix.tree_mirror import TreeMirror
from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import ObjectReader
from tests.support.fake_tree import FakeTree, Node

SIZES = (1000, 4000, 16_000, 100_000)
# The planner's partial results grow with the square of the depth; it refuses more than 4,096 levels.
CHAIN_PLAN_SIZES = (250, 1000, 2000, 4000)
RUNNING = 256
FAR = 1 << 30


def forest_of(mirror: TreeMirror, nodes: list[Node]) -> PrefixForest:
    return mirror.forest(nodes, np.full(len(nodes), FAR, dtype=np.int64), None)[0]


def chain(size: int) -> Callable[[], Any]:
    tree = FakeTree()
    last = tree.chain(size)[-1]
    return lambda: forest_of(TreeMirror(ObjectReader(tree)), [last])


def along(size: int) -> Callable[[], Any]:
    tree = FakeTree()
    nodes = tree.chain(size)
    return lambda: forest_of(TreeMirror(ObjectReader(tree)), nodes)


def known(size: int) -> Callable[[], Any]:
    tree = FakeTree()
    nodes = tree.chain(size)
    running = nodes[:: max(1, size // RUNNING)][:RUNNING]
    mirror = TreeMirror(ObjectReader(tree))
    forest_of(mirror, [*running, nodes[-1]])
    newcomer = tree.add(nodes[size // 2])
    return lambda: forest_of(mirror, [*running, newcomer])


def children(size: int) -> Callable[[], Any]:
    tree = FakeTree()
    nodes = [tree.add(tokens=8) for _ in range(size)]
    return lambda: forest_of(TreeMirror(ObjectReader(tree)), nodes)


def split(size: int) -> Callable[[], Any]:
    tree = FakeTree()
    nodes = [tree.add(tokens=8) for _ in range(size)]
    mirror = TreeMirror(ObjectReader(tree))
    forest_of(mirror, nodes)
    newcomer = tree.add(tree.split(nodes[-1], tokens=4))
    return lambda: forest_of(mirror, [*nodes[:RUNNING], newcomer])


def planned(last_nodes: list[int], mirror: RadixMirror, ends: list[int]) -> Callable[[], Any]:
    forest = mirror.forest(int64_array(last_nodes), int64_array(ends))
    seq_lens = int64_array(ends) + 40
    shape = ModelShape(32, 8, 128)
    return lambda: Planner(shape, DeviceModel.gpu(132, group=4)).plan(forest, seq_lens)


def plan_chain(size: int) -> Callable[[], Any]:
    mirror = RadixMirror()
    ends = [16 * (node + 1) for node in range(size)]
    mirror.put(-1, 0, list(range(size)), ends, leaf=True)
    return planned([*range(size), size - 1], mirror, [*ends, ends[-1]])


def plan_root(size: int) -> Callable[[], Any]:
    mirror = RadixMirror()
    for node in range(size):
        mirror.put(-1, 0, [node], [512], leaf=True)
    return planned([node for node in range(size) for _ in range(2)], mirror, [512] * 2 * size)


CASES = {
    "chain": chain,
    "along": along,
    "known": known,
    "children": children,
    "split": split,
    "plan chain": plan_chain,
    "plan root": plan_root,
}


def measure(case: str, size: int, repeats: int) -> dict[str, object]:
    seconds = []
    for _ in range(repeats):
        work = CASES[case](size)
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return {"case": case, "nodes": size, "cpu_ms": round(1e3 * statistics.median(seconds), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of a case; the median is reported (default 5)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds from which larger sizes are left out")
    parser.add_argument("--before", type=Path, help="rows of another commit to be stored beside these")
    parser.add_argument("--out", type=Path, help="write the rows and the machine as JSON")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for case in tqdm(CASES, unit="case", file=sys.stderr):
        for size in CHAIN_PLAN_SIZES if case == "plan chain" else SIZES:
            rows.append(measure(case, size, args.repeats))
            print(f"{case:>11} {size:>7} nodes {rows[-1]['cpu_ms']:>12} ms", flush=True)
            if 1e-3 * float(str(rows[-1]["cpu_ms"])) * 16 > args.limit:
                break
    if args.out:
        machine = {"cpu": cpu_name(), "package": sgl_prefix_attn.__version__}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        result: dict[str, object] = {"machine": machine, "peak_mib": peak, "rows": rows}
        if args.before:
            before = json.loads(args.before.read_text())
            result["before"] = {"peak_mib": before["peak_mib"], "rows": before["rows"]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
