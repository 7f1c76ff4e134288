"""What a command of the pinning addresses accepts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sgl_prefix_attn.sglang_plugin.pinning.commands import AnnounceCommand, PinCommand, ReleaseCommand


@pytest.mark.parametrize("token", [True, "1", 1.0, None, -1, 1 << 31])
def test_a_token_id_is_a_whole_number(token: object) -> None:
    for command, more in ((PinCommand, {}), (ReleaseCommand, {}), (AnnounceCommand, {"uses": 1})):
        with pytest.raises(ValidationError, match=r"token_ids\.1"):
            command(token_ids=[1, token], **more)
