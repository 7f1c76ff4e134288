"""What a user can change about each reason for which steps do not run packed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sgl_prefix_attn.settings import WRAPPABLE, variable_name
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.doctor.launch_command import arguments_without
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons

NOT_WRAPPED: Final = "not_wrapped"
NOT_WRAPPABLE: Final = "not_wrappable"
NO_SUCH_STEPS: Final = "no_such_steps"

# Reasons that only the doctor has: a server without prefixpack says nothing.
EXPLANATIONS: Final = {
    NOT_WRAPPED: "prefixpack does not run: the backend is SGLang's own, and wrap mode does not name it",
    NOT_WRAPPABLE: "prefixpack does not run: it knows no way to wrap this backend",
    NO_SUCH_STEPS: "the server has no such steps",
}


def explained(reason: str) -> str:
    """What a reason means."""
    return EXPLANATIONS.get(reason) or reasons.EXPLANATIONS[reason]


@dataclass(frozen=True)
class Change:
    """One thing to change about a server.

    Attributes:
        text: for the user.
        reason: what it removes.
        variables: environment variables to set.
        unset: environment variables, and the settings of these names, to remove.
        without: launch arguments to leave out, with their values; a name that ends with `-` stands for all that
            start with it.
        by_hand: whether following it does not remove the reason, as for an option in a configuration file.
    """

    text: str
    reason: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    by_hand: bool = False

    @property
    def can_be_followed(self) -> bool:
        """Whether the change can be made without a decision of the user's."""
        return bool(self.variables or self.unset or self.without)

    def followed(self, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Launch arguments and environment after the change."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        without = [*self.without, *_spellings(arguments, self.without)] if self.without else []
        return arguments_without(arguments, without), kept | dict(self.variables)

    def as_dict(self) -> dict[str, Any]:
        """The change as JSON-able values."""
        return {**asdict(self), "variables": dict(self.variables)}


def _unset(*keys: str) -> tuple[str, ...]:
    return tuple(variable_name(key) for key in keys)


_WRAP_ALL = ((variable_name("wrap"), "1"),)
_ON_GPU = ", ".join(name for name in WRAPPABLE[:-1] if name != trtllm_mha.NAME)
_OTHER_BACKEND = f"Start with --attention-backend {_ON_GPU} (GPU) or {WRAPPABLE[-1]} (CPU)"
_TREE_VARIABLES = (versions.CPP_TREE_VARIABLE, versions.TREE_CORE_VARIABLE)
CHANGES: dict[str, Change] = {
    NOT_WRAPPED: Change("Set PREFIXPACK_WRAP=1 in the environment of the server's process.", variables=_WRAP_ALL),
    NOT_WRAPPABLE: Change(f"{_OTHER_BACKEND}, and PREFIXPACK_WRAP=1."),
    reasons.UNKNOWN_STOCK: Change("Remove the plug-in that replaces SGLang's attention backend."),
    reasons.NO_RADIX_CACHE: Change(
        "Leave out --disable-radix-cache; with --disaggregation-mode decode, add "
        "--disaggregation-decode-enable-radix-cache.",
        without=("--disable-radix-cache",),
    ),
    reasons.UNKNOWN_TREE: Change(
        f"Unset {' and '.join(_TREE_VARIABLES)}, and leave out options that replace the prefix cache.",
        unset=_TREE_VARIABLES,
    ),
    reasons.PREFILL_ONLY: Change("Nothing: such steps are faster on the stock backend."),
    reasons.DETERMINISTIC: Change(
        "Leave out --enable-deterministic-inference and --rl-on-policy-target, if results may depend on the batch.",
        without=("--enable-deterministic-inference", "--rl-on-policy-target"),
    ),
    reasons.VIRTUAL_SLOTS: Change("Leave out --enable-unified-memory.", without=("--enable-unified-memory",)),
    reasons.TWO_BATCH_OVERLAP: Change(
        "Leave out --enable-two-batch-overlap, and measure.", without=("--enable-two-batch-overlap",)
    ),
    reasons.PDMUX: Change("Leave out --enable-pdmux, and measure.", without=("--enable-pdmux",)),
    reasons.WHOLE_MODEL_KERNEL: Change(
        "Leave out --enable-nvidia-megakernel and --enable-amd-monokernel, and measure.",
        without=("--enable-nvidia-megakernel", "--enable-amd-monokernel"),
    ),
    reasons.DECODE_CONTEXT_PARALLEL: Change("Leave out --dcp-size, and measure.", without=("--dcp-size",)),
    reasons.SPECULATIVE: Change(
        "Set pack_verify to true, and measure. If that changes nothing, leave out the options of speculative decoding, "
        "and measure: speculation may gain more than packing.",
        variables=((variable_name("pack_verify"), "true"),),
    ),
    reasons.DISABLED: Change(
        "Remove the settings that switch packing off (pack_decode, pack_verify, route), or set them to true and auto.",
        variables=(
            (variable_name("pack_decode"), "true"),
            (variable_name("pack_verify"), "auto"),
            (variable_name("route"), "auto"),
        ),
    ),
    reasons.IMAGE_MASKS: Change(
        "Remove the settings pack_extend and pack_mixed.", unset=_unset("pack_extend", "pack_mixed")
    ),
    reasons.KV_DTYPE: Change(
        "Leave out --kv-cache-dtype, or use fp8_e4m3 on a GPU with native kernels.", without=("--kv-cache-dtype",)
    ),
    reasons.KV_LAYOUT: Change(
        "Unset SGLANG_USE_HND_KVCACHE, and leave out --enable-page-major-kv-layout.",
        unset=("SGLANG_USE_HND_KVCACHE",),
        without=("--enable-page-major-kv-layout",),
    ),
    reasons.NO_CUDA_KERNEL: Change(
        "Install the package on a machine with nvcc, or install Triton and set PREFIXPACK_GPU_KERNELS=triton."
    ),
    reasons.COMPUTE_BOUND: Change("Nothing: such steps are faster on the stock backend."),
}

_REPORT: Final = "Report it with the log: this is an error of this package or an SGLang that it does not know."
_OTHER_ADVICE: Final[dict[str, str]] = {
    reasons.IDLE: "Nothing: such steps have no work.",
    reasons.NO_PATHS: "Nothing after start-up. If the number grows with every step, report it with the log.",
    reasons.MODE: "Nothing: no other steps have packed kernels.",
    reasons.SPECULATIVE_TREE: "Leave out the options of speculative decoding, or use topk 1, and measure.",
    reasons.BEAM_ROWS: "Nothing: beam search runs stock.",
    reasons.ITEM_MASKS: "Nothing: such steps run stock.",
    reasons.PLAN_TOO_LARGE: "If the number is large, lower --max-running-requests, or --chunked-prefill-size (mixed).",
    reasons.GRAPH: "Nothing: graphs of such steps hold stock layers only.",
    reasons.ROW_MISMATCH: "Nothing for single steps. If most steps have it, report it with the launch arguments.",
    reasons.NO_HOST_LENGTHS: _REPORT,
    reasons.PLAN_REFUSED: _REPORT,
    reasons.HOOK_FAILED: _REPORT,
    reasons.EXCEPTION: _REPORT,
    reasons.STOPPED: _REPORT,
    reasons.HYBRID_SWA: "Nothing: the layer is where it belongs.",
    reasons.HEAD_DIM: "Nothing; but on a GPU, for a multiple of 16 up to 256, PREFIXPACK_GPU_KERNELS=triton may help.",
    reasons.KV_SCALES: "Use a checkpoint with one scale for each layer, or 16-bit KV.",
    reasons.NO_MEMORY: "Lower --mem-fraction-static.",
    reasons.DRAFT_WORKER: "Nothing: this concerns the draft model only.",
    reasons.HOOKS_MISSING: _REPORT,
    reasons.FAILED: _REPORT,
    NO_SUCH_STEPS: "Nothing.",
}
_OF_THE_MODEL: Final = frozenset(
    {
        reasons.HEAD_GROUPS,
        reasons.QUERY_DTYPE,
        reasons.CROSS_ATTENTION,
        reasons.NON_CAUSAL,
        reasons.LAYER_VARIANT,
        reasons.CALL_ARGUMENTS,
        reasons.LATE_LAYER,
        reasons.ENCODER_DECODER,
        reasons.MLA,
        reasons.READS_METADATA,
    }
)


def what_to_do(reason: str) -> str:
    """What a user can do about a reason.

    Raises:
        KeyError: the reason is in no list.
    """
    if reason in _OF_THE_MODEL:
        return "Nothing: a property of the model."
    return _OTHER_ADVICE[reason] if reason in _OTHER_ADVICE else CHANGES[reason].text


# For KV_LAYOUT where the model's code does not divide its heads as the KV pool's are.
HEADS_OF_ALL_RANKS: Final = Change(
    "Leave out --enable-dp-attention, --dp-size, --attn-dp-size and --attn-cp-size: this model spreads its heads over "
    "all ranks, and the KV pool of SGLang does not.",
    without=("--enable-dp-attention", "--dp-size", "--data-parallel-size", "--attn-dp-size", "--attn-cp-size"),
)


def change_for(reason: str, heads_of_all_ranks: bool = False) -> Change:
    """What to change about a reason. For a property of the model the answer is: nothing."""
    known = HEADS_OF_ALL_RANKS if heads_of_all_ranks and reason == reasons.KV_LAYOUT else CHANGES.get(reason)
    if known is None:
        known = Change(what_to_do(reason))
    return Change(known.text, reason, known.variables, known.unset, known.without)


def _spellings(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """Options among launch arguments that SGLang's parser takes for `names`: aliases and abbreviations."""
    targets = targets_of_options()
    wanted = {targets.get(name, name) for name in names}
    found = []
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--"):
            exact = {targets[option]} if option in targets else set()
            meant = exact or {target for known, target in targets.items() if known.startswith(option)}
            if meant and meant <= wanted:
                found.append(option)
    return found


@functools.cache
def targets_of_options() -> dict[str, str]:
    """Where SGLang's parser stores the value of each option; aliases have the same place."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option: action.dest for action in parser._actions for option in action.option_strings}
