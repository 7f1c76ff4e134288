"""`python -m sgl_prefix_attn patch`: applies our patch to an installed SGLang, reverts it, or checks for it.

`diffs` reads `patches/VERSION/NAME.patch`, `installation` finds SGLang (without importing it), `change` compares the
two and writes, `cli` is the command.
"""

from sgl_prefix_attn.patching.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
