"""The walker behind the contract test: it finds what is there and says None for what is not."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support.sglang_contract import Signature, SourceTree

SOURCES = {
    "sglang/srt/base.py": """
class Base:
    declared: int = 0
    def __init__(self, runner, *, flag=None):
        self.set_here = runner
        self.left, self.right = 1, 2
    @property
    def computed(self): ...
""",
    "sglang/srt/middle.py": """
from __future__ import annotations
try:
    from sglang.srt.nowhere import Base
except ImportError:
    from .base import Base as Renamed
if True:
    def inside_if(first, second=None, *rest, only, **more): ...
class Derived(Renamed):
    async def own(self): ...
value = [].extend
""",
    "sglang/srt/front.py": "from sglang.srt.middle import Derived, inside_if\n",
    "sglang/srt/circle.py": "from sglang.srt.circle import itself\n",
}


@pytest.fixture(params=["folder", "wheel"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> SourceTree:
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "sglang.whl", "w") as archive:
            for name, text in SOURCES.items():
                archive.writestr(name, text)
        return SourceTree(tmp_path / "sglang.whl")
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return SourceTree(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "middle",
        "middle.value",
        "middle.inside_if",
        "front.inside_if",
        "front.Derived.own",
        "front.Derived.declared",
        "front.Derived.set_here",
        "front.Derived.right",
        "front.Derived.computed",
    ],
)
def test_finds_definitions_imports_bases_and_instance_attributes(source: SourceTree, path: str) -> None:
    assert source.find(f"sglang.srt.{path}") is not None


@pytest.mark.parametrize(
    "path",
    ["nowhere", "middle.Base", "middle.absent", "front.Derived.absent", "circle.itself", "middle.value.attribute"],
)
def test_says_none_for_what_is_not_there(source: SourceTree, path: str) -> None:
    assert source.find(f"sglang.srt.{path}") is None


def test_signatures(source: SourceTree) -> None:
    function, derived = source.find("sglang.srt.front.inside_if"), source.find("sglang.srt.front.Derived")
    assert function is not None
    assert derived is not None
    required = frozenset({"first", "only"})
    assert source.signature(function) == Signature(("first", "second"), ("only",), required, True, True)
    assert source.signature(derived) == Signature(("runner",), ("flag",), frozenset({"runner"}), False, False)
    assert str(source.signature(function)) == "(first, second, *, only, **)"


def test_members_are_those_of_the_class_itself(source: SourceTree) -> None:
    derived, base = source.find("sglang.srt.middle.Derived"), source.find("sglang.srt.base.Base")
    assert derived is not None
    assert base is not None
    assert set(source.members(derived)) == {"own"}
    assert set(source.members(base)) == {"declared", "__init__", "computed"}
