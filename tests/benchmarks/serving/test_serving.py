"""The serving benchmark: what is computed from answers."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

import sgl_prefix_attn
from benchmarks.provenance import package_versions, without_folders
from benchmarks.serving import __main__ as command
from benchmarks.serving.measure import Agreement, Progress, Run, steady_times
from sgl_prefix_attn.demo.client import Answer, Sample
from sgl_prefix_attn.demo.workload import Request

REQUEST = Request("one", (1, 2, 3, 4), 3, samples=2)


def run_of(label: str, *tokens: list[int]) -> Run:
    samples = tuple(
        Sample("id", list(row), 0, 0, "length", first=0.5, last=0.5 + 0.01 * (len(row) - 1)) for row in tokens
    )
    return Run("rl", label, (Answer(REQUEST, samples),), 2.0, (0.008, 0.012), None, {})


def test_our_version_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgl_prefix_attn, "__version__", "1.2.3")
    assert package_versions()["sgl-prefix-attn"] == "1.2.3"


def test_results_hold_no_path_of_a_machine() -> None:
    text = "--model /srv/models/llama --logs=/var/x/logs org/model http://127.0.0.1:30000/v1 ['rl:16', '/srv/trace']"
    stripped = "--model llama --logs=logs org/model http://127.0.0.1:30000/v1 ['rl:16', 'trace']"
    assert without_folders(text) == stripped
    for path in (Path(command.__file__).parents[1] / "results").glob("*.json"):
        found = re.search(r"(?<![\w./])/(root|work|tmp|home)/", path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: a path at {found.start()}"


def test_results_are_few_and_named() -> None:
    root = Path(command.__file__).parents[2]
    files = sorted((root / "benchmarks" / "results").iterdir())
    assert sum(file.stat().st_size for file in files) <= 3_000_000
    places = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").rglob("*.py")]
    places += (root / "tests").rglob("*.py")
    names = set(re.findall(r"[\w*]+(?=\.json)|(?<=\")\w+(?=\")", "\n".join(map(Path.read_text, places)))) - {"*"}
    unnamed = [file.name for file in files if not any(fnmatch.fnmatch(file.stem, name) for name in names)]
    assert not unnamed, "no page, test or benchmark names them"


def test_agreement_counts_samples_and_common_beginnings() -> None:
    one, other = run_of("a", [5, 6, 7], [5, 6, 7]), run_of("b", [5, 6, 7], [5, 9, 7])
    assert Agreement.between(one, other) == Agreement(samples=2, identical=1, tokens=6, common_prefix=4)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        Agreement.between(one, run_of("c", [5]))


def test_steady_times_begin_when_all_samples_have_begun() -> None:
    early = [Progress(1.0, 1), Progress(2.0, 2), Progress(5.0, 4), Progress(7.0, 8)]
    late = [Progress(4.0, 1), Progress(6.0, 5)]
    done_before = [Progress(1.0, 1), Progress(3.0, 9)]
    assert steady_times([early, late, done_before]) == [2.0 / 4, 2.0 / 4]
    assert steady_times([]) == []
