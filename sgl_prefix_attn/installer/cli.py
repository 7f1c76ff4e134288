"""`python -m sgl_prefix_attn setup-cpu`: SGLang for CPUs in the environment that runs the command."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from sgl_prefix_attn import __version__
from sgl_prefix_attn.installer.setup_env import DEFAULT_SGLANG, check_python, check_sglang, only_one
from sgl_prefix_attn.installer.stages import Installer, Settings, SetupError, Stage


class HereInstaller(Installer):
    """Adds to the running environment, which has this package and no SGLang yet."""

    def _stages(self) -> list[Stage]:
        ours = f"sgl-prefix-attn=={__version__}"
        package = Stage("package", "what sgl-prefix-attn imports", (ours,), lambda: self._pip(ours))
        return [*self._cpu_stages(), package, self._check_stage()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Install the CPU builds of torch and SGLang into this virtual environment (about 1 GB), to try the plug-in "
        "without a GPU. The same call goes on with an interrupted installation."
    )
    parser.add_argument("--sglang", default=DEFAULT_SGLANG, help="version to install (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    settings = Settings(venv=Path(sys.prefix), sglang=args.sglang, gpu=False)
    try:
        check_sglang(settings)
        check_python(settings, "make the environment with ")
        check_environment(settings)
        with only_one(settings.venv):
            HereInstaller(settings).run()
    except SetupError as error:
        print(f"setup-cpu: {error}", file=sys.stderr)
        return 1
    return 0


def check_environment(settings: Settings) -> None:
    """Raises SetupError outside a virtual environment, and in one whose torch or SGLang others installed."""
    advice = "make one of its own: python3 -m venv FOLDER"
    if sys.prefix == sys.base_prefix:
        raise SetupError(f"{sys.executable} is not in a virtual environment; {advice}")
    if Installer(settings).stamp_file.exists():
        return
    for name in ("sglang", "torch"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise SetupError(
            f"{sys.prefix} has {name} {version}, which the CPU build would replace; {advice}, "
            "and install the wheel there with pip install --no-deps"
        )
