"""Which prefix caches can be read, and what is said about those that cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.sglang_plugin.prefix.tree_readers import Branch, ObjectReader, PathNode, reader_for
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.support.caches import ComponentType
from tests.support.fake_tree import FakeTree
from tests.support.small_scheduler import TREES, SmallScheduler


def test_branches_begin_below_what_is_known() -> None:
    tree = FakeTree()
    chain = tree.chain(5, tokens=2)
    leaf = tree.add(chain[2], tokens=7)
    known: dict[int, int] = {}
    read = []
    handles = [chain[-1], leaf, chain[3], tree.root_node]
    for branch in ObjectReader(tree).branches(handles, lambda id: known.get(id, -1)):
        known.update(zip(branch.ids, branch.ends, strict=True))
        read.append(branch)
    ids = [node.id for node in chain]
    assert read == [
        Branch(-1, 0, ids, [2, 4, 6, 8, 10], True),
        Branch(ids[2], 6, [leaf.id], [13], True),
        Branch(ids[2], 6, [ids[3]], [8], False),
        Branch(-1, 0, [], [], False),
    ]
    assert read[0].path()[-2:] == [PathNode(ids[3], 6, 8, False), PathNode(ids[4], 8, 10, True)]


@pytest.mark.parametrize("kind", TREES)
def test_handles_that_are_no_nodes_have_no_path(kind: str) -> None:
    scheduler = SmallScheduler(kind)
    reader: Any = reader_for(scheduler.shown_tree)
    handles = [None, object(), scheduler.join([1] * 10).last_node]  # the second as a session's
    assert reader.ids(handles)[:2] == [-1, -1]
    assert reader.ids(handles)[2] >= 0
    nothing, none_either, path = reader.paths(handles)
    assert nothing is none_either is None
    assert [(node.begin, node.end) for node in path] == [(0, 10)]


@pytest.mark.parametrize("kind", [kind for kind in TREES if kind != "objects"])
def test_an_evicted_id_has_no_path_and_hides_no_other(kind: str) -> None:
    scheduler = SmallScheduler(kind)
    reader: Any = reader_for(scheduler.shown_tree)
    gone, stays = (scheduler.join([token] * 10) for token in (1, 2))
    handle = gone.last_node
    scheduler.finish(gone)
    scheduler.evict(10)
    missing, path = reader.paths([handle, stays.last_node])
    assert missing is None
    assert [(node.begin, node.end) for node in path] == [(0, 10)]


class TestUnreadableTrees:
    def refused(self, tree: Any) -> fallback_reasons.Refused:
        answer = reader_for(tree)
        assert isinstance(answer, fallback_reasons.Refused)
        return answer

    def test_a_disabled_radix_cache(self) -> None:
        assert self.refused(SimpleNamespace(disable=True)).reason == fallback_reasons.NO_RADIX_CACHE

    def test_a_disabled_cache_of_sglang(self) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams

        try:
            from sglang.srt.mem_cache.chunk_cache import ChunkCache as Cache
        except ImportError:  # from 0.5.22 on
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache as Cache
        scheduler = SmallScheduler(TREES[0])
        params = CacheInitParams(
            disable=True, req_to_token_pool=scheduler.pool, token_to_kv_pool_allocator=scheduler.allocator, page_size=1,
            tree_components=(ComponentType.FULL,),
        )  # fmt: skip
        assert self.refused(Cache(params)).reason == fallback_reasons.NO_RADIX_CACHE

    def test_a_native_core_without_paths_names_the_way_out(self) -> None:
        class Core:
            def root_node_handle(self) -> int:
                return 0

            def node_by_id(self, node_id: int) -> None:
                raise NotImplementedError

        answer = self.refused(SimpleNamespace(disable=False, tree_core=Core()))
        assert answer.reason == fallback_reasons.UNKNOWN_TREE
        assert "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python" in answer.detail

    def test_a_cache_of_another_kind(self) -> None:
        class LibraryCache:
            disable = False

        answer = self.refused(LibraryCache())
        assert answer.reason == fallback_reasons.UNKNOWN_TREE
        assert "LibraryCache" in answer.detail

    def test_a_session_wrapper_is_looked_through(self) -> None:
        tree = SmallScheduler(TREES[0]).tree
        assert isinstance(reader_for(SimpleNamespace(inner=tree)), type(reader_for(tree)))
        assert not isinstance(reader_for(tree), fallback_reasons.Refused)
