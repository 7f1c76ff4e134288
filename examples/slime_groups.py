"""slime: the samples of a group get one session id, which slime sends as routing key.

slime draws a session id for each sample that has none. Give a group's samples theirs before they are generated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl_prefix_attn.group_routing import group_key


def share_sessions(groups: Iterable[Iterable[Any]]) -> None:
    """Sets `session_id` of all samples of each group to the key of its prompt.

    Args:
        groups: lists of slime's `Sample`: each has `prompt` (text, or messages) and `session_id`. A session id that a
            sample already has is kept, since a conversation of several turns may hang on it.
    """
    for group in groups:
        samples = list(group)
        if not samples:
            continue
        key = next((sample.session_id for sample in samples if getattr(sample, "session_id", None)), None)
        key = key or group_key(str(samples[0].prompt))
        for sample in samples:
            sample.session_id = getattr(sample, "session_id", None) or key
