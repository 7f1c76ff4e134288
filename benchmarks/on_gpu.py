"""What only a GPU can show, in one command that goes on where it was interrupted.

    python -m benchmarks.on_gpu --model MODEL --minutes 9 --out build/on_gpu
    python -m benchmarks.on_gpu --list

Each job has a log and its results in --out/COMMIT. With several GPUs as many jobs run side by side, each on GPUs of its
own; jobs.json says on how many. A job is started only if its usual time is left, and cut off after three times that.
The next call runs what is missing: jobs that were not started, were cut off, or failed. Exit status: 0 if all jobs are
done, 1 if one failed, 2 if the arguments are wrong, 3 if jobs are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import git_commit, machine_name, package_versions

DRAFT = "draft_model"
OVERTIME = 3  # times a job's usual minutes, after which it hangs
_MIXED = "-m benchmarks.kernel.mixed_steps"
_POD = "prefixpack fa3 fa3_split flashinfer_batch_attention flashinfer_pod"  # compiles POD at first use
_PYTEST = "-m pytest -v -s -m gpu"  # so that the log of a job that is cut off says how far it came
_SERVER = '--server-args "--disable-prefill-cuda-graph --cuda-graph-max-bs-decode 256"'
_ROLLOUT = (
    f"-m benchmarks.serving.rollout --model {{model}} --load-format dummy --groups 96 --running 256 --window 12 "
    f"--context-length 20480 {_SERVER}"
)
_DRAFTS = (
    f"{_ROLLOUT[:-1]} --speculative-algorithm STANDALONE --speculative-draft-model-path {{draft}} "
    '--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" --backends prefixpack,fa3 '
    "--prompt-tokens 4096 --out {out}.json --resume"
)
_ACCEPTANCE = (("SGLANG_SIMULATE_ACC_LEN", "2.5"),)  # random weights accept nothing
_SHARED = "--backends 'prefixpack,prefixpack[shared_prefill=0],fa3,flashinfer'"


@dataclass(frozen=True)
class Job:
    """A command of this Python.

    Attributes:
        name: of its log and results.
        minutes: that it usually takes.
        command: arguments; {out} is the path of its results without suffix, {model} the model's folder, {draft} one
            with the same model of one layer.
        environment: variables to add.
        gpus: that it needs.
    """

    name: str
    minutes: float
    command: str
    environment: tuple[tuple[str, str], ...] = ()
    gpus: int = 1

    def arguments(self, out: Path, model: Path | None) -> list[str]:
        names = {"out": out / self.name, "model": model, "draft": out / DRAFT}
        return shlex.split(self.command.format(**{name: shlex.quote(str(path)) for name, path in names.items()}))

    @property
    def needs_model(self) -> bool:
        return "{model}" in self.command


JOBS = (
    Job("drafts_by_default", 3, f"{_PYTEST} tests/e2e/test_one_token.py -k default"),
    Job("models", 8, f"{_PYTEST} tests/e2e/test_models_on_gpu.py -k 'not tp and not dp' --results {{out}}.json"),
    Job("models_tp", 7, f"{_PYTEST} tests/e2e/test_models_on_gpu.py -k 'tp or dp' --results {{out}}.json", gpus=2),
    Job("speculation", 6, _DRAFTS, _ACCEPTANCE),
    Job("speculation_unshared", 6, f"{_DRAFTS} --samples 1 --running 64", _ACCEPTANCE),
    Job("fifty_schedules", 5, f"{_PYTEST} tests/e2e/test_one_token.py -k 'not default'"),
    Job("drawn", 4, "-m benchmarks.kernel.gpu_drawn --set acceptance --out {out}.json --resume"),
    Job("tests_of_kernels", 8, f"{_PYTEST} tests/cuda tests/core"),
    Job("verify_4", 2, "-m benchmarks.kernel.mixed_steps --verify 4 --cases 150 --out {out}.json --resume"),
    Job("verify_8", 2, "-m benchmarks.kernel.mixed_steps --verify 8 --cases 150 --out {out}.json --resume"),
    Job("mixed_steps", 4, f"{_MIXED} --seconds 210 --cases 120 --out {{out}}.json --resume"),
    Job("mixed_steps_pod", 8, f"{_MIXED} --seconds 450 --cases 60 --ways {_POD} --out {{out}}.json --resume"),
    Job(
        "rollout_16k",
        12,
        f"{_ROLLOUT} {_SHARED} --prompt-tokens 16384 --context-length 65536 --limit 300 --seconds 1200 "
        "--out {out}.json --resume",
    ),
    Job(
        "rollout_mixed_4k",
        6,
        f'{_ROLLOUT[:-1]} --enable-mixed-chunk" --prompt-tokens 4096 --out {{out}}.json --resume',
    ),
    Job("rollout_4k", 8, f"{_ROLLOUT} {_SHARED} --prompt-tokens 4096 --out {{out}}.json --resume"),
    Job("rollout_1k", 6, f"{_ROLLOUT} --prompt-tokens 1024 --out {{out}}.json --resume"),
    Job(
        "offline",
        9,
        "-m benchmarks.offline.throughput --device cuda --model {model} --settings 2000/200x4 2000/200x16 --repeats 3 "
        "--pool 0.1 1 --out {out}.json --resume",
    ),
    Job("tests_of_servers", 8, f"{_PYTEST} tests/sglang_plugin tests/e2e"),
    Job(
        "tp2",
        7,
        "-m benchmarks.serving --model {model} --load-format dummy --tp 2 --backends prefixpack,fa3 "
        "--workload rl:16 no-sharing:8 --output-tokens 160 --server-args "
        '"--cuda-graph-bs-decode 1 8 32 64 256 --disable-prefill-cuda-graph --disable-custom-all-reduce" '
        "--out {out}.json",
        (("NCCL_NVLS_ENABLE", "0"),),
        gpus=2,
    ),
    Job("life_cycle", 8, "-m pytest -v -s -m gpu tests/e2e/test_life_cycle_on_gpu.py --results {out}.json"),
    Job("tests_of_verify", 3, f"{_PYTEST} tests/cuda/test_draft_tables.py tests/sglang_plugin/execution"),
    Job(
        "commands_of_pages",
        10,
        f"{_PYTEST} tests/benchmarks/test_commands.py tests/e2e/test_documented_launches.py",
    ),
)


class State:
    """What has run, in jobs.json of a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "jobs.json"
        self.entries: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self.entries = json.loads(self._path.read_text())["jobs"]

    def status(self, name: str) -> str:
        return str(self.entries.get(name, {}).get("status", "not started"))

    def note(self, name: str, status: str, seconds: float, beside: int) -> None:
        """beside: GPUs of the machine that jobs could have used at the same time."""
        self.entries[name] = {"status": status, "seconds": round(seconds, 1), "gpus_in_use": beside}
        origin = {"machine": machine_name(), "versions": package_versions()}
        self._path.write_text(json.dumps({**origin, "jobs": self.entries}, indent=1) + "\n")


def run(
    job: Job, out: Path, model: Path | None, seconds: float, gpus: Sequence[str], processes: dict[str, Any]
) -> tuple[str, float]:
    """Runs a job on GPUs for at most `seconds`: ("done", "failed" or "cut off", seconds).

    Its process stands in `processes` meanwhile.
    """
    started = time.monotonic()
    with (out / f"{job.name}.log").open("ab") as log, contextlib.ExitStack() as ended:
        process = subprocess.Popen(
            [sys.executable, *job.arguments(out, model)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **dict(job.environment)},
            start_new_session=True,
        )
        processes[job.name] = process
        ended.callback(processes.pop, job.name)
        ended.callback(end_group, process)
        try:
            status = "done" if process.wait(timeout=seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "cut off"
    return status, time.monotonic() - started


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a job's process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


@contextlib.contextmanager
def ended_on_interrupt(processes: dict[str, Any]) -> Iterator[None]:
    """Ends processes if Ctrl-C leaves the block: they have sessions of their own and do not see it."""
    try:
        yield
    except KeyboardInterrupt:
        for process in [*processes.values()]:
            end_group(process)
        raise


def run_all(
    jobs: Sequence[Job], out: Path, model: Path | None, minutes: float, state: State, gpus: Sequence[str]
) -> int:
    """Runs what is missing and fits, in order: nothing overtakes a job that waits for GPUs. Returns the exit status."""
    deadline = time.monotonic() + 60 * minutes
    waiting = [job for job in jobs if state.status(job.name) != "done"]
    free, running = list(gpus), dict[Future[tuple[str, float]], tuple[Job, list[str]]]()
    processes: dict[str, Any] = {}
    with ThreadPoolExecutor(len(free)) as pool, ended_on_interrupt(processes):
        while True:
            left = deadline - time.monotonic()
            waiting = [job for job in waiting if 60 * job.minutes <= left]
            for job in [*waiting]:
                if job.gpus > len(free):
                    break
                own, free = free[: job.gpus], free[job.gpus :]
                limit = min(left, OVERTIME * 60 * job.minutes)
                print(f"{job.name}: up to {limit / 60:.1f} min on GPU {','.join(own)}", flush=True)
                running[pool.submit(run, job, out, model, limit, own, processes)] = job, own
                waiting.remove(job)
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                job, own = running.pop(ended)
                free += own
                try:
                    status, seconds = ended.result()
                except OSError as error:  # its log or its process
                    print(f"{job.name}: {error}", flush=True)
                    status, seconds = "failed", 0.0
                state.note(job.name, status, seconds, len(gpus))
                print(f"{job.name}: {status} after {seconds:.0f} s, {out / job.name}.log", flush=True)
    left_over = [job for job in jobs if state.status(job.name) != "done"]
    for job in left_over:
        print(f"left: {job.name}, {state.status(job.name)}, {job.minutes:g} min")
    if any(state.status(job.name) == "failed" for job in left_over):
        return 1
    return 3 if left_over else 0


def make_draft(model: Path, folder: Path) -> None:
    """A folder with the model's configuration and tokenizer, and with one layer."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        left_out = file.name == "config.json" or "index" in file.name
        if file.is_file() and file.suffix in (".json", ".model", ".jinja") and not left_out:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def visible_gpus() -> list[str]:
    """Names by which CUDA_VISIBLE_DEVICES knows the GPUs of this process; one without a GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = max(1, torch.cuda.device_count())
    return [str(number) for number in range(count)] if named is None else named.split(",")[:count]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with the config.json of a Llama; jobs with servers need it")
    parser.add_argument("--minutes", type=float, default=30, help="end then (30)")
    parser.add_argument("--out", type=Path, default=Path("build/on_gpu"), help="folder (build/on_gpu)")
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=[job.name for job in JOBS], help="these jobs")
    parser.add_argument("--list", action="store_true", help="print the jobs and their minutes")
    args = parser.parse_args()
    jobs = [job for job in JOBS if args.only is None or job.name in args.only]
    if args.list:
        for job in jobs:
            print(f"{job.name:<20} {job.minutes:>3g} min  {job.gpus} GPU  python {job.command}")
        return 0
    if args.model is None:
        for job in (job for job in jobs if job.needs_model):
            print(f"skipped without --model: {job.name}", file=sys.stderr)
        jobs = [job for job in jobs if not job.needs_model]
    elif not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} has no config.json")
    gpus = visible_gpus()
    for job in (job for job in jobs if job.gpus > len(gpus)):
        print(f"skipped with one GPU: {job.name} needs {job.gpus}", file=sys.stderr)
    jobs = [job for job in jobs if job.gpus <= len(gpus)]
    out = args.out / (git_commit() or "unknown")[:10]
    out.mkdir(parents=True, exist_ok=True)
    if any("{draft}" in job.command for job in jobs):
        make_draft(args.model, out / DRAFT)
    return run_all(jobs, out, args.model, args.minutes, State(out), gpus)


if __name__ == "__main__":
    sys.exit(main())
