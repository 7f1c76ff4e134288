"""Which reads of global memory the machine code waits for soon after it asks for them. Needs nvcc, no GPU.

The source does not show where a warp waits for a read: compilers take uses ahead of loops and branches, and make one
addition of a warp's, which all lanes wait for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FUNCTION = re.compile(r"^\s*Function : (\w+)")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;")
_READ = re.compile(r"^(?:@!?U?P\d+\s+)?(?:LDG|LD|ATOMG|ATOM)\.([\w.]+)\s+(?:PT,\s*)?R(\d+),")
_WRITES_NOTHING = re.compile(r"(ST|STG|STS|STL|RED|LDGSTS|BRA|BAR|EXIT)\b")  # all operands are read


@dataclass(frozen=True)
class Wait:
    """A read and the first instruction behind it, in the order of the code, that needs what it brings.

    Attributes:
        address: of the read, in bytes from the function's begin.
        distance: instructions from one to the other; None if none follows before the way leads elsewhere.
        user: that instruction.
    """

    function: str
    address: int
    read: str
    distance: int | None
    user: str


def waits_of(sass: str) -> Iterator[Wait]:
    """The reads of a listing as `cuobjdump -sass` prints it."""
    function = ""
    code: list[tuple[str, int, str]] = []
    for line in sass.splitlines():
        if match := _FUNCTION.match(line):
            function = match.group(1)
        elif match := _INSTRUCTION.match(line):
            code.append((function, int(match.group(1), 16), match.group(2)))
    for place, (function, address, text) in enumerate(code):
        match = _READ.match(text)
        if match is None:
            continue
        modifiers = match.group(1).split(".")
        width = 4 if "128" in modifiers else 2 if "64" in modifiers else 1  # registers
        first = int(match.group(2))
        register = re.compile(rf"\bR(?:{'|'.join(str(first + i) for i in range(width))})\b")
        distance, user = None, ""
        for step, (of, _, later) in enumerate(code[place + 1 :], start=1):
            if of != function:
                break
            if register.search(_sources(later)):
                distance, user = step, later
                break
            if re.match(r"(BRA|EXIT|RET|BRX)\b", later):
                break
        yield Wait(function, address, text, distance, user)


def _sources(instruction: str) -> str:
    """The operands that an instruction reads."""
    body = re.sub(r"^@!?U?P\d+\s+", "", instruction)
    opcode, _, operands = body.partition(" ")
    return operands if _WRITES_NOTHING.match(opcode) else operands.partition(",")[2]


def disassembler() -> str | None:
    """cuobjdump on PATH, or the one that Triton brings along."""
    found = shutil.which("cuobjdump")
    if found is None:
        try:
            import triton
        except ImportError:
            return None
        brought = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        found = str(brought) if brought.exists() else None
    return found


def listing(nvcc: str, cuobjdump: str, source: Path, arch: str) -> str:
    """Machine code of a source.

    Raises:
        RuntimeError: a tool failed; the message holds its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder) / "out.cubin")
        flags = ["-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", "-cubin"]
        for command in ([nvcc, *flags, str(source), "-o", cubin], [cuobjdump, "-sass", cubin]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout
