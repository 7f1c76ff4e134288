"""Time of SGLang's queue policy in a server that has this package installed and uses another attention backend.

python -m benchmarks.offline.group_scheduling_cost [--other NAME=CHECKOUT ...] [--repeats 5] [--out FILE]

Each run is a process of its own with 1,000 to 50,000 waiting requests of no offline job. It applies the hooks that the
plug-in registers in a scheduler process, then times `SchedulePolicy.calc_priority` (fcfs, no prefix cache). Packages
take turns. Times are the fastest of 20 rounds by processor time; the table has the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

REPOSITORY = Path(__file__).resolve().parents[2]
WAITING = (1_000, 10_000, 50_000)
ROUNDS = 20


class Waiting:
    """The part of SGLang's Req that a hook may read."""

    def __init__(self) -> None:
        self.sampling_params = SimpleNamespace(custom_params=None, max_new_tokens=100)
        self.origin_input_ids = self.output_ids = ()


def child(hooked: bool) -> dict[str, float]:
    """Microseconds of a round by number of waiting requests, with the package of this process."""
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.plugins.hook_registry import HookRegistry

    if hooked:
        from sgl_prefix_attn.sglang_plugin import entry

        entry.in_scheduler_process = lambda: True
        entry.register()
        HookRegistry.apply_hooks()
    cache = SimpleNamespace(disable=True, supports_fast_match_prefix=lambda: False)
    policy = SchedulePolicy("fcfs", cache, False, False, False)
    found = {}
    for count in WAITING:
        queue = [Waiting() for _ in range(count)]
        times = []
        for _ in range(ROUNDS):
            begin = time.process_time()
            policy.calc_priority(queue)
            times.append(time.process_time() - begin)
        found[str(count)] = round(1e6 * min(times), 2)
    return found


def run(package: Path, variant: str, **variables: str) -> dict[str, float]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PREFIXPACK_")}
    environ |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package), **variables}
    command = [sys.executable, "-P", __file__, "--child", variant]
    done = subprocess.run(command, env=environ, cwd=package, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def commit_of(package: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=CHECKOUT", help="also measure it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    parser.add_argument("--child", choices=("hooked", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child == "hooked")))
        return 0
    others = [(name, Path(folder).resolve()) for name, _, folder in (text.partition("=") for text in args.other)]
    runs: list[tuple[str, Path, str, dict[str, str]]] = [
        ("without this package", REPOSITORY, "plain", {}),
        *((name, folder, "hooked", {}) for name, folder in others),
        ("this checkout", REPOSITORY, "hooked", {}),
        ("this checkout, group_scheduling on", REPOSITORY, "hooked", {"PREFIXPACK_GROUP_SCHEDULING": "1"}),
    ]
    times: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in runs}
    for _ in range(args.repeats):
        for name, package, variant, variables in runs:
            times[name].append(run(package, variant, **variables))
    rows = [
        {
            "name": name,
            "commit": commit_of(package),
            "us_per_round": {
                str(count): statistics.median(found[str(count)] for found in times[name]) for count in WAITING
            },
        }
        for name, package, _, _ in runs
    ]
    for row in rows:
        print(f"{row['name']:36} {row['commit']}  {row['us_per_round']}")
    if args.out:
        from importlib.metadata import version

        record = {"sglang": version("sglang"), "repeats": args.repeats, "rounds": ROUNDS, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
