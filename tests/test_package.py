"""The source distribution holds what a build needs, and a wheel built from it runs a packed step."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

from sgl_prefix_attn import _native

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder), "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_source_distribution_is_complete(sdist: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "csrc", "patches", "sgl_prefix_attn"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    wanted = set(listed.stdout.split())
    assert len(wanted) > 200
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert wanted - held == set()
    assert {"setup.py", "pyproject.toml", "CHANGELOG.md", "LICENSE", "README.md"} <= held
    assert {name for name in held if name.startswith(("tests", "benchmarks"))} == set()


# Preprocesses what it should compile, so that a header missing from the archive is an error, and links by copying the
# module of this checkout: compiling takes two minutes.
QUICK_COMPILER = """#!/bin/sh
for word in "$@"; do
  test "$last" = -o && out=$word
  test "$word" = -c && compile=1
  last=$word
done
test "$compile" || exec cp "{module}" "$out"
/usr/bin/c++ "$@" -M -MF /dev/null && : > "$out"
"""


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "compiled"])
def test_a_wheel_of_the_source_distribution_runs_a_packed_step(sdist: Path, tmp_path: Path, compiled: bool) -> None:
    """The environment sees this one's torch and numpy, but not this checkout."""
    environment = tmp_path / "empty"
    venv.create(environment)
    python = str(environment / "bin" / "python")
    (site,) = (environment / "lib").glob("python*/site-packages")
    host = str(Path(torch.__file__).parents[1])
    (site / "host.pth").write_text(f"{host}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(sdist)]
    # The setuptools that Python 3.11 brings is older than pyproject.toml needs; the host's comes first.
    variables = {"PREFIXPACK_CUDA": "0", "PATH": "/usr/bin:/bin", "PYTHONPATH": host}
    if not compiled:
        compiler = tmp_path / "c++"
        compiler.write_text(QUICK_COMPILER.format(module=_native.__file__))
        compiler.chmod(0o755)
        variables |= {"CC": str(compiler), "CXX": str(compiler)}
    subprocess.run(command, check=True, capture_output=True, env=variables)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--force-reinstall", str(wheel)], check=True)
    example = (ROOT / "docs" / "how-it-works.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "packed_attention" in example
    done = subprocess.run([python, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = [python, "-m", "sgl_prefix_attn", "explain", "--tree", "1,8/2048,64", "--device", "h200"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Route over stock fa3: packed; sharing saves 56.0 of 66.0 MiB of KV a layer" in done.stdout, done.stderr
