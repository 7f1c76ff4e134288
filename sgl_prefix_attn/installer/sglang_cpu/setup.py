"""Adds the .pth file that installs the torchvision import hook when the interpreter starts."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HOOK_MODULE = "torchvision_without_operators"


class BuildWithStartupHook(build_py):
    def run(self) -> None:
        super().run()
        Path(self.build_lib, f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}; {HOOK_MODULE}.install()\n")


setup(cmdclass={"build_py": BuildWithStartupHook})
