"""Routing profiles of a server with several tensor-parallel ranks: rank 0 reads them, the others get its copy.

Ranks may run on hosts with different files. Ranks that decide by different profiles would run different kernels in the
same step.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_prefix_attn.routing.profile import ProfileError
from sgl_prefix_attn.routing.profile_store import ProfileStore
from sgl_prefix_attn.settings import Settings

# Types of queries as profiles name them.
QUERY_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def profiles_of_ranks(settings: Settings) -> ProfileStore:
    """The profiles of rank 0. All ranks of a tensor-parallel group call this together.

    Raises:
        ProfileError: on all ranks, if `route_profile` is unusable on rank 0 or its profiles cannot be read.
    """
    own = settings.route_profile if settings.policy.predicts else None
    group = _group()
    if group is None or group.world_size == 1:
        return ProfileStore.read(own)
    sent: dict[str, Any] | None = None
    if group.rank_in_group == 0:
        try:
            sent = ProfileStore.read(own).as_json()
        except ProfileError as error:
            sent = {"error": str(error)}
        except Exception as error:  # the other ranks wait for the broadcast, whatever happens here
            sent = {"error": f"cannot read the profiles: {type(error).__name__}: {error}"}
    received = group.broadcast_object(sent, src=0)
    if "error" in received:
        raise ProfileError(received["error"])
    return ProfileStore.of_json(received)


def _group() -> Any:
    """SGLang's tensor-parallel group, None in a process without other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group() if torch.distributed.get_world_size() > 1 else None
