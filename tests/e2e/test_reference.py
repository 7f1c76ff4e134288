"""What the other end-to-end tests compare with is right itself, and far enough from ties to be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import workloads
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.mark.parametrize("name", workloads.ALL)
def test_stock_tokens_are_those_of_transformers_with_room_to_spare(expected, reference, vocabulary, name):
    requests = workloads.ALL[name](vocabulary)
    for request, samples in zip(requests, expected(requests), strict=True):
        assert samples == [samples[0]] * request.samples
        reference.check(request, samples[0])
