"""A body means to `batch` what it means to SGLang's server: the same tokens, sampling parameters and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offline import text_models
from tests.offline.differential import compare

pytestmark = pytest.mark.e2e


def test_drawn_bodies_mean_the_same(tmp_path: Path) -> None:
    assert compare(text_models.with_text, tmp_path / "run", 40, 2) == []
