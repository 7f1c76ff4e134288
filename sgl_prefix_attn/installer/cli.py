"""`python -m sgl_prefix_attn setup-cpu`: SGLang for CPUs in the environment that runs the command."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from sgl_prefix_attn import __version__
from sgl_prefix_attn.installer.setup_env import (
    DEFAULT_SGLANG,
    Installer,
    SetupError,
    Stage,
    check_python,
    check_sglang,
    only_one,
)


class HereInstaller(Installer):
    """Adds to the running environment, which has this package and no SGLang yet."""

    def stages(self) -> list[Stage]:
        ours = f"sgl-prefix-attn=={__version__}"
        package = Stage("package", "what sgl-prefix-attn imports", (ours,), lambda: self._pip(ours))
        return [*self.cpu_stages(), package, self.check_stage()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Install the CPU builds of torch and SGLang into this virtual environment (about 1 GB), to try the plug-in "
        "without a GPU. The same call goes on with an interrupted installation."
    )
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, help="version to install (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    installer = HereInstaller(Path(sys.prefix), args.sglang, gpu=False)
    try:
        check_sglang(args.sglang)
        check_python(args.sglang, "make the environment with ")
        check_environment(installer)
        with only_one(installer.venv):
            installer.run()
    except SetupError as error:
        print(f"setup-cpu: {error}", file=sys.stderr)
        return 1
    return 0


def check_environment(installer: Installer) -> None:
    """Raises SetupError outside a virtual environment, and in one whose torch or SGLang others installed."""
    advice = "make one of its own: python3 -m venv FOLDER"
    if sys.prefix == sys.base_prefix:
        raise SetupError(f"{sys.executable} is not in a virtual environment; {advice}")
    for name in () if installer.finished.exists() else ("sglang", "torch"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise SetupError(
            f"{sys.prefix} has {name} {version}, which the CPU build would replace; {advice}, "
            "and install the wheel there with pip install --no-deps"
        )
