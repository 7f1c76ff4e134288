"""Forests and plans are bit for bit those that were recorded."""

from __future__ import annotations

import json

import pytest

from tests.core.golden_plans import DIGESTS, GROUPS, digests_of


@pytest.mark.parametrize("group", GROUPS)
def test_plans_are_as_recorded(group: str) -> None:
    """Deliberate changes of plans are recorded with `python -m tests.core.golden_plans`."""
    recorded, found = json.loads(DIGESTS.read_text())[group], digests_of(group)
    assert found["inputs"] == recorded["inputs"], "the generator draws other batches; check the version of numpy"
    assert found["forests"] == recorded["forests"]
    assert found["plans"] == recorded["plans"]
