"""`calibrate --from` for a shipped profile: margins take simulated times where the files have no packed ones.

python -m benchmarks.simulator --out h200.json --from RESULTS.json:fa3,flashinfer_tc ...
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.simulator import SIMULATED_GPUS, figures_of, makespan
from sgl_prefix_attn.calibration import cli
from sgl_prefix_attn.core.gpu import Gpu, planner_model
from sgl_prefix_attn.core.planner import Planner
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.measured import Results
from sgl_prefix_attn.workloads.draw import case_of_name


def simulated_times(results: Results) -> dict[str, float]:
    """Microseconds by key of the native kernels on the steps that have stock times only, from plans made here.

    Steps are made again from their names. Those of `calibrate` cannot be: under their names are other batches, which
    their features tell. Empty for a GPU that the simulator has no figures of.
    """
    if results.machine not in SIMULATED_GPUS:
        return {}
    gpu = Gpu.of_file(SIMULATED_GPUS[results.machine])
    found = {}
    for case in results.cases:
        if "native" in case.packed or not case.stock or case.step.rows > 1:
            continue
        shape = case.shape
        batch = case_of_name(case.key.partition("@")[0], shape)
        if StepFeatures.of(ForestFacts.of(batch.forest()), batch.lengths) != case.step:
            continue
        device = planner_model(gpu, shape, code=90)
        plan = Planner(shape, device).plan(batch.forest(), batch.lengths)
        found[case.key] = 1e6 * makespan(plan, batch.lengths, shape, device, figures_of(gpu.name, shape)).seconds
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator")
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(arguments), simulated_times)


if __name__ == "__main__":
    sys.exit(main())
