"""Everything of SGLang that this package hooks, calls, subclasses or reads: one table, data only, no SGLang import.

The table is the contract with SGLang. `tests/plugin/test_contract.py` walks it, by `ast`, in every supported wheel. Who
starts to use another name of SGLang adds it here; who stops using one removes it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Every published version that is supported, oldest first.
SUPPORTED_VERSIONS = (
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


class Use(enum.Enum):
    """What we do with a target, and so what has to hold for it."""

    HOOK = "hook"  # wrapped through HookRegistry: its first parameters are `parameters`, in this order
    CALL = "call"  # called by us: it takes `parameters`, by these names, and requires no others
    CLASS = "class"  # a class we derive from or compare with
    ATTRIBUTE = "attribute"  # a module variable, or an attribute or property that we read or set on objects


@dataclass(frozen=True)
class Target:
    """One name of SGLang: `path` is dotted, as HookRegistry takes it, and stands below `sglang.srt`.

    `since` and `until` bound the versions in which the name exists and is used; both belong to the range.
    """

    name: str
    use: Use
    parameters: tuple[str, ...] = ()
    since: str = SUPPORTED_VERSIONS[0]
    until: str = SUPPORTED_VERSIONS[-1]

    @property
    def path(self) -> str:
        """The full dotted path."""
        return f"sglang.srt.{self.name}"

    @property
    def versions(self) -> tuple[str, ...]:
        """The supported versions in which the target has to be there."""
        return SUPPORTED_VERSIONS[SUPPORTED_VERSIONS.index(self.since) : SUPPORTED_VERSIONS.index(self.until) + 1]


def _attributes(owner: str, names: str, since: str = "0.5.14", until: str = "0.5.23") -> tuple[Target, ...]:
    return tuple(Target(f"{owner}.{name}", Use.ATTRIBUTE, since=since, until=until) for name in names.split())


# Hooks. The two of the hand-over are not registered where `prepare_schedule_batch` has been patched in.
FORWARD_BATCH_INIT = Target(
    "model_executor.forward_batch_info.ForwardBatch.init_new", Use.HOOK, ("cls", "batch", "model_runner")
)
MODEL_RUNNER_FORWARD = Target("model_executor.model_runner.ModelRunner.forward", Use.HOOK, ("self", "forward_batch"))
SUPPORT_TRITON = Target("utils.common.support_triton", Use.HOOK, ("backend",))
INTERNAL_STATE = Target("managers.scheduler.Scheduler.get_internal_state", Use.HOOK, ("self", "recv_req"))
HOOKS = (FORWARD_BATCH_INIT, MODEL_RUNNER_FORWARD, SUPPORT_TRITON, INTERNAL_STATE)

# The class that a seam of ours is patched into, and the method that says it has been.
ATTENTION_BACKEND = Target("layers.attention.base_attn_backend.AttentionBackend", Use.CLASS)
NATIVE_SEAM = "prepare_schedule_batch"
