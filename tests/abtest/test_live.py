"""The client of a live test: the files of its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefix_attn.abtest.live import write_report


def test_reports_whose_names_differ_after_a_dot_are_files_of_their_own(tmp_path: Path) -> None:
    for name in ("llama-3.1", "llama-3.2"):
        write_report(tmp_path / name, "A/B test", [name], {"name": name}, b"picture")
    names = {f"llama-3.{n}.{ending}" for n in (1, 2) for ending in ("json", "png", "html")}
    assert {path.name for path in tmp_path.iterdir()} == names
    with pytest.raises(ValueError, match=r"--out \.: expected a name"):
        write_report(Path(), "A/B test", [], {}, b"")
