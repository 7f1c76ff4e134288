"""What we use of SGLang is there, in every supported wheel: names, parameters, members. Found by `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import sgl_prefix_attn
from sgl_prefix_attn.sglang_plugin.compat import targets
from sgl_prefix_attn.sglang_plugin.compat.doctor_targets import DOCTOR_TARGETS
from sgl_prefix_attn.sglang_plugin.compat.layout_targets import LAYOUT_TARGETS
from sgl_prefix_attn.sglang_plugin.compat.offline_targets import OFFLINE_TARGETS
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import PINNING_TARGETS
from sgl_prefix_attn.sglang_plugin.compat.targets import ATTENTION_BACKEND, DELEGATED_MEMBERS, Target, Use
from sgl_prefix_attn.sglang_plugin.compat.wrap_targets import WRAP_TARGETS
from tests.support.sglang_contract import Definition, Signature, SourceTree
from tests.support.wheels import WheelUnavailableError, published_source

ALL_TARGETS = (
    *targets.TARGETS, *PINNING_TARGETS, *WRAP_TARGETS, *LAYOUT_TARGETS, *OFFLINE_TARGETS, *DOCTOR_TARGETS,
)  # fmt: skip
PLUGIN = Path(sgl_prefix_attn.__file__).parent / "sglang_plugin"
BACKENDS = (PLUGIN / "backend" / "stock_proxy.py", PLUGIN / "backend" / "backend.py")
# Members that our backend adds to the base class: what our process state calls.
ADDED_MEMBERS = {"pass_through", "token_to_kv_pool"}
_GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"


@pytest.fixture(scope="module", params=targets.SUPPORTED_VERSIONS)
def sglang(request: pytest.FixtureRequest) -> tuple[str, SourceTree]:
    try:
        return request.param, SourceTree(published_source(request.param))
    except WheelUnavailableError as reason:
        pytest.skip(str(reason))


def problem(source: SourceTree, target: Target) -> str | None:
    """What does not hold for a target, None if it is as we use it."""
    found = source.find(target.path)
    if found is None:
        return "not there"
    if target.use is Use.ATTRIBUTE:
        return "a method now" if isinstance(found.node, ast.FunctionDef) and not found.is_property else None
    if target.use is Use.CLASS:
        return None if found.is_class else "no class"
    signature = source.signature(found)
    if signature is None:
        # `name = other.method`: there is nothing to see, and it can be called.
        return None if isinstance(found.node, ast.Assign) else "cannot be called"
    if target.use is Use.HOOK:
        leading = signature.positional[: len(target.parameters)]
        expected = ", ".join(target.parameters)
        return None if leading == target.parameters else f"parameters are {signature}, not {expected}"
    return _call_problem(signature, target, is_method=_is_method(source, target, found))


def _call_problem(signature: Signature, target: Target, is_method: bool) -> str | None:
    own = signature.positional[1:] if is_method else signature.positional
    if own[: len(target.parameters)] != target.parameters:
        return f"parameters are {signature}, not {', '.join(target.parameters)}"
    more = signature.required - set(signature.positional[:1] if is_method else ()) - set(target.parameters)
    return f"also requires {', '.join(sorted(more))}" if more else None


def _is_method(source: SourceTree, target: Target, found: Definition) -> bool:
    owner = source.find(target.path.rpartition(".")[0])
    static = isinstance(found.node, ast.FunctionDef) and "staticmethod" in map(ast.unparse, found.node.decorator_list)
    return owner is not None and owner.is_class and not found.is_class and not static


def table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def test_every_target_is_there_as_we_use_it(sglang: tuple[str, SourceTree]) -> None:
    version, source = sglang
    used = [target for target in ALL_TARGETS if version in target.versions]
    rows = [(target.name, target.use.value, why) for target in used if (why := problem(source, target)) is not None]
    if rows:
        pytest.fail(table(f"sglang {version}: {len(rows)} of {len(used)} targets do not hold", rows), pytrace=False)


def test_a_new_version_is_asked_for_every_target_that_the_newest_has(monkeypatch: pytest.MonkeyPatch) -> None:
    newest, following = targets.SUPPORTED_VERSIONS[-1], "0.5.999"
    expected = [target for target in ALL_TARGETS if newest in target.versions]
    monkeypatch.setattr(targets, "SUPPORTED_VERSIONS", (*targets.SUPPORTED_VERSIONS, following))
    lost = [target.name for target in expected if following not in target.versions]
    assert expected
    assert not lost, f"not asked for in a new version: {', '.join(lost)}"


def test_targets_with_a_version_range_are_absent_outside_it(sglang: tuple[str, SourceTree]) -> None:
    """A hook's range decides which one is registered, so a name that is there earlier or later means a wrong range."""
    version, source = sglang
    outside = [target for target in ALL_TARGETS if target.use is Use.HOOK and version not in target.versions]
    rows = [(target.name, f"{target.since} to {target.versions[-1]}") for target in outside if source.find(target.path)]
    assert not rows, table(f"sglang {version} has hook targets outside of their versions", rows)


def test_every_member_of_the_base_class_is_ours_or_knowingly_delegated(sglang: tuple[str, SourceTree]) -> None:
    """A method that a new SGLang adds must not be answered by the base class's default without anybody noticing."""
    version, source = sglang
    members = {name for name in base_members(source) if not name.startswith("_")}
    unknown = sorted(members - set(own_members()) - DELEGATED_MEMBERS)
    assert not unknown, (
        f"sglang {version}: AttentionBackend has {', '.join(unknown)}: define or add to DELEGATED_MEMBERS"
    )


def test_our_members_take_what_the_base_class_takes(sglang: tuple[str, SourceTree]) -> None:
    version, source = sglang
    rows = []
    for name, member in base_members(source).items():
        ours = own_members().get(name)
        if not isinstance(member, ast.FunctionDef) or not isinstance(ours, ast.FunctionDef):
            continue
        theirs, mine = Signature.of(member), Signature.of(ours)
        same_positions = mine.positional[: len(theirs.positional)] == theirs.positional or mine.has_args
        keywords = mine.has_kwargs or set(theirs.keyword_only) <= {*mine.keyword_only, *mine.positional}
        if not same_positions or not keywords or not mine.required <= theirs.required:
            rows.append((name, str(mine), str(theirs)))
    assert not rows, table(f"sglang {version}: ours and the base class's parameters differ", rows)


def test_a_replay_asks_for_its_key_after_its_metadata_was_made(sglang: tuple[str, SourceTree]) -> None:
    """What the second set of decode graphs rests on: the route is decided with the metadata, and chooses the key."""
    version, source = sglang
    load, execute, capture = (
        method(source, f"{_GRAPH_RUNNER}.{name}") for name in ("load_batch", "execute", "capture_one_shape")
    )
    # Newer versions make the metadata in a method of its own.
    made = max(calls_of(load, "init_forward_metadata_out_graph") + calls_of(load, "_init_replay_attn_metadata"))
    assert max(calls_of(load, "_make_graph_key")) > made, version
    assert max(calls_of(execute, "load_batch")) < min(calls_of(execute, "replay")), version
    (key,) = calls_of(capture, "_make_graph_key")
    assert min(calls_of(capture, "init_forward_metadata_out_graph")) < key < max(calls_of(capture, "capture_one"))


def test_a_drafts_own_backend_is_built_before_those_of_its_steps(sglang: tuple[str, SourceTree]) -> None:
    """When our factory is asked for the first, it says which backend SGLang is to take for the others."""
    version, source = sglang
    init = method(source, "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backends")
    assert max(calls_of(init, "init_attention_backends")) < min(calls_of(init, "init_attention_backend")), version
    factory = method(source, "sglang.srt.speculative.draft_utils.DraftBackendFactory.__init__")
    read = "draft_model_runner.draft_attention_backend", "server_args.speculative_draft_attention_backend"
    assert any(name in ast.unparse(factory) for name in read), version


def test_lengths_of_verify_steps_have_bounds_from_0_5_16_on(sglang: tuple[str, SourceTree]) -> None:
    """ReqKvInfo came with that version. Before, a graph without lengths in host memory gets those of an older step."""
    version, source = sglang
    bounded = source.find("sglang.srt.managers.schedule_batch.ReqKvInfo") is not None
    assert bounded == (version not in ("0.5.14", "0.5.15", "0.5.15.post1"))
    view = source.find("sglang.srt.model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view")
    assert view is not None
    assert ("forward_batch.seq_lens_cpu is None" in ast.unparse(view.node)) == bounded, version


def test_no_draft_counts_as_committed_before_its_result(sglang: tuple[str, SourceTree]) -> None:
    """Decode steps count their token when they are prepared. Verify steps must not, or lengths exceed their bounds."""
    version, source = sglang
    prepare = ast.unparse(method(source, "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"))
    with_drafts, decode = prepare.index("spec_algorithm.is_none()"), prepare.index("alloc_for_decode(")
    assert "return" in prepare[with_drafts:decode], version
    assert "kv_committed_len +=" not in prepare[:decode], version
    if source.find("sglang.srt.managers.schedule_batch.ReqKvInfo") is not None:
        for path in (
            "speculative.eagle_utils.eagle_prepare_for_decode",
            "speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode",
            "mem_cache.allocation.alloc_for_spec_decode",
        ):
            assert "kv_committed_len +=" not in ast.unparse(method(source, f"sglang.srt.{path}")), version


def method(source: SourceTree, path: str) -> ast.FunctionDef:
    found = source.find(path)
    assert found is not None, path
    assert isinstance(found.node, ast.FunctionDef)
    return found.node


def calls_of(function: ast.FunctionDef, name: str) -> list[int]:
    """Lines on which a method of that name is called."""
    return [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def base_members(source: SourceTree) -> dict[str, ast.stmt]:
    base = source.find(ATTENTION_BACKEND.path)
    assert base is not None
    return source.members(base)


def own_members() -> dict[str, ast.stmt]:
    """What the bodies of our backend class and its base define."""
    parsed = [node for file in BACKENDS for node in ast.parse(file.read_bytes()).body]
    classes = [node for node in parsed if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["StockProxy", "PrefixPackBackend"]
    members: dict[str, ast.stmt] = {}
    for statement in (statement for node in classes for statement in node.body):
        if isinstance(statement, ast.FunctionDef):
            members[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            members.update({target.id: statement for target in statement.targets if isinstance(target, ast.Name)})
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            members[statement.target.id] = statement
    return members


def test_no_member_is_listed_that_no_version_has() -> None:
    known: set[str] = set()
    for version in targets.SUPPORTED_VERSIONS:
        try:
            source = SourceTree(published_source(version))
        except WheelUnavailableError as reason:
            pytest.skip(str(reason))
        known |= set(base_members(source))
    assert known >= DELEGATED_MEMBERS
    assert not DELEGATED_MEMBERS & set(own_members()), "delegated, or ours"
    public = {name for name, node in own_members().items() if not name.startswith("_")}
    assert public - ADDED_MEMBERS <= known, "public names of ours that only look like overrides"


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted path) of everything that a file takes from SGLang by import statement or by name in a string."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("sglang."):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"sglang(\.[A-Za-z_]\w*)+", str(node.value)):
            yield node.lineno, str(node.value)


@pytest.mark.parametrize("path", sorted(PLUGIN.rglob("*.py")), ids=lambda path: str(path.relative_to(PLUGIN)))
def test_what_the_plugin_imports_is_in_the_table(path: Path) -> None:
    known = {target.path for target in ALL_TARGETS}
    known.add("sglang.srt.plugins")  # the entry point group is no module of ours
    known.add("sglang.launch_server")  # a word of launch commands
    missing = [
        f"{path.name}:{line} {name}"
        for line, name in imported_names(path)
        if not any(target == name or target.startswith(f"{name}.") for target in known)
    ]
    assert not missing, f"in no table of targets: {', '.join(missing)}"
