"""The patched methods of every supported wheel, run from their source with stubs around them."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import pytest

from sgl_prefix_attn.sglang_plugin.compat.targets import SUPPORTED_VERSIONS
from tests.patches.conftest import UnpackedWheel, unpacked_wheel

WORKER = "sglang/srt/managers/tp_worker.py"
ATTENTION = "sglang/srt/layers/attention"


@dataclass
class Mode:
    name: str

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_decode_or_idle(self) -> bool:
        return self.name in ("decode", "idle")

    def is_target_verify(self) -> bool:
        return self.name == "target_verify"


@dataclass(eq=False)
class Batch:
    """The fields of ScheduleBatch that the patched methods read."""

    forward_mode: Mode
    hicache_consumer_index: int = 0
    split_index: int = 0
    split_forward_count: int = 1
    split_forward_batch: Any = None


class Backend:
    """Stands for an attention backend and keeps what it is shown."""

    def __init__(self, log: list[tuple[str, Any]] | None = None) -> None:
        self.log = [] if log is None else log

    def prepare_schedule_batch(self, batch: Any) -> None:
        self.log.append(("prepare", batch))

    @property
    def batches(self) -> list[Any]:
        return [batch for _, batch in self.log]


def methods_of(wheel: UnpackedWheel, file: str, *names: str) -> tuple[type, dict[str, Any]]:
    """A class with only these methods, compiled from the wheel's file, and their globals; other names are mocks."""
    tree = ast.parse((wheel.root / file).read_bytes())
    found = [
        statement
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for statement in owner.body
        if isinstance(statement, ast.FunctionDef) and statement.name in names
    ]
    by_name = {function.name: function for function in found}  # the last definition: the concrete class's
    assert set(by_name) == set(names)
    annotations = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*annotations, *by_name.values()], type_ignores=[]))
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)} - set(vars(builtins))
    namespace: dict[str, Any] = {name: MagicMock(name=name) for name in used}
    exec(compile(module, str(wheel.root / file), "exec"), namespace)
    return type("Partial", (), {name: namespace[name] for name in names}), namespace


def worker_of(wheel: UnpackedWheel, log: list[tuple[str, Any]]) -> Any:
    """A TP worker with the wheel's three forward methods, over stubs that record the order of the calls."""
    methods = "forward_batch_generation", "forward_batch_embedding", "forward_batch_split_prefill"
    partial, namespace = methods_of(wheel, WORKER, "_prepare_attn_backend", *methods)

    def init_new(batch: Any, *_: Any, **__: Any) -> Any:
        log.append(("init_new", batch))
        return MagicMock()

    namespace["ForwardBatch"].init_new = init_new
    if "get_exec" in namespace:
        namespace["get_exec"].return_value.features.enable_encoder_swa_bounded_replay = False
    worker = partial()
    worker.model_runner = MagicMock()
    worker.model_runner.attn_backend = Backend(log)
    worker.model_runner.decode_attn_backend = None
    worker.set_hicache_consumer = MagicMock()
    # A diffusion LLM's step returns right after the ForwardBatch is built.
    worker.is_dllm = lambda: True
    worker._forward_batch_generation_dllm = MagicMock()
    worker._maybe_finalize_elastic_cuda_graph_scale = MagicMock()
    return worker


@pytest.fixture(scope="module", params=SUPPORTED_VERSIONS)
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> UnpackedWheel:
    wheel = unpacked_wheel(request.param, tmp_path_factory.mktemp("wheel"))
    assert wheel.patch("apply") == 0
    return wheel


@pytest.mark.parametrize(
    "method", ["forward_batch_generation", "forward_batch_embedding", "forward_batch_split_prefill"]
)
def test_backend_sees_each_batch_once_right_before_its_forward_batch_is_built(patched, method):
    log: list[tuple[str, Any]] = []
    worker, batch = worker_of(patched, log), Batch(Mode("extend"))
    getattr(worker, method)(batch)
    assert log == [("prepare", batch), ("init_new", batch)]


def test_later_parts_of_a_split_prefill_and_prepared_forward_batches_are_not_announced(patched: UnpackedWheel) -> None:
    log: list[tuple[str, Any]] = []
    worker, batch = worker_of(patched, log), Batch(Mode("extend"))
    batch.split_index, batch.split_forward_batch = 1, MagicMock()
    worker.forward_batch_split_prefill(batch)
    worker.forward_batch_generation(None, MagicMock(), is_verify=True)
    assert log == []


@pytest.mark.parametrize(
    ("mode", "child"), [("decode", "decode"), ("idle", "decode"), ("extend", "prefill"), ("mixed", "prefill")]
)
def test_hybrid_backend_passes_the_batch_to_the_child_that_runs_it(patched, mode, child):
    partial, _ = methods_of(patched, f"{ATTENTION}/hybrid_attn_backend.py", "prepare_schedule_batch", "_select_backend")
    hybrid, batch = partial(), Batch(Mode(mode))
    hybrid.prefill_backend, hybrid.decode_backend = Backend(), Backend()
    hybrid.prepare_schedule_batch(batch)
    seen = {"prefill": hybrid.prefill_backend.batches, "decode": hybrid.decode_backend.batches}
    assert seen.pop(child) == [batch]
    assert list(seen.values()) == [[]]


def test_two_batch_overlap_passes_the_batch_to_the_primary_only(patched: UnpackedWheel) -> None:
    partial, _ = methods_of(patched, f"{ATTENTION}/tbo_backend.py", "prepare_schedule_batch")
    overlap, batch = partial(), Batch(Mode("decode"))
    overlap.primary, overlap.children = Backend(), [Backend(), Backend()]
    overlap.prepare_schedule_batch(batch)
    assert overlap.primary.batches == [batch]
    assert [child.batches for child in overlap.children] == [[], []]
    default, _ = methods_of(patched, f"{ATTENTION}/base_attn_backend.py", "prepare_schedule_batch")
    assert default().prepare_schedule_batch(batch) is None
