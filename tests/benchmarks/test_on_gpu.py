"""The list of GPU jobs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.on_gpu import JOBS


def test_jobs_name_modules_and_files_that_exist() -> None:
    for job in JOBS:
        arguments = job.arguments(Path("out"), Path("a model"))
        assert arguments[0] == "-m"
        assert find_spec(arguments[1]), job.name
        assert all(Path(word).exists() for word in arguments if word.startswith("tests/")), job.name
        assert job.needs_model == ("a model" in arguments)
