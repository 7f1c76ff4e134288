"""What pinning uses of SGLang is there, in every supported wheel."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import PINNING_TARGETS
from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.sglang_plugin.compat.test_contract import problem, table
from tests.support.sglang_contract import SourceTree
from tests.support.wheels import WheelUnavailableError, published_source

pytestmark = pytest.mark.xdist_group("wheels")


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_every_target_of_pinning_is_there_as_we_use_it(version: str) -> None:
    try:
        source = SourceTree(published_source(version))
    except WheelUnavailableError as reason:
        pytest.skip(str(reason))
    used = [target for target in PINNING_TARGETS if version in target.versions]
    rows = [(target.name, target.use.value, why) for target in used if (why := problem(source, target)) is not None]
    if rows:
        pytest.fail(table(f"sglang {version}: {len(rows)} of {len(used)} targets do not hold", rows), pytrace=False)
