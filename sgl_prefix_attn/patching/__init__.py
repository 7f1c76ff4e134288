"""`python -m sgl_prefix_attn patch`: put a seam of ours into an installed SGLang, take it out again, or look.

`diffs` reads `patches/VERSION/NAME.patch`, `installation` finds SGLang (without importing it), `change` compares the
two and writes, `cli` is the command.
"""

from sgl_prefix_attn.patching.cli import add_arguments, run

__all__ = ["add_arguments", "run"]
