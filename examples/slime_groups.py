"""slime: the samples of a group get one session id, which slime sends as routing key.

slime draws a session id for each sample that has none, and sends it with the router's policy `consistent_hashing` only.
A rollout function (`--rollout-function-path my_rollout.generate_rollout`) changes both:

    from slime.rollout import sglang_rollout
    from examples.slime_groups import keep_groups_together

    keep_groups_together(sglang_rollout)
    generate_rollout = sglang_rollout.generate_rollout
"""

from __future__ import annotations

import copy
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


def keep_groups_together(rollout: Any) -> None:
    """Makes slime's rollout module send one routing key for each group, whatever the router's policy.

    Args:
        rollout: the module `slime.rollout.sglang_rollout`, with `generate_and_rm_group(args, group, ...)`.
    """
    generate_group = rollout.generate_and_rm_group

    async def generate_sharing_group(args: Any, group: Any, *more: Any, **named: Any) -> Any:
        share_sessions([group])
        args = copy.copy(args)
        args.router_policy = "consistent_hashing"  # slime's condition for sending the key
        return await generate_group(args, group, *more, **named)

    rollout.generate_and_rm_group = generate_sharing_group
