"""KV lengths and masks of verify steps: torch operations, the emulated kernel and the GPU's give the same words."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_prefix_attn.core import draft_tables
from sgl_prefix_attn.core.draft_tables import DraftTables, visible_words
from tests.cuda.cases import random_tree

SEEDS = pytest.mark.parametrize("seed", range(12))
COLUMNS = pytest.mark.parametrize("columns", [True, False], ids=["with-kv", "drafts-only"])


def random_step(seed: int, columns: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """SGLang's mask of random trees, their words, KV lengths with those of padded rows, requests and drafts."""
    rng = np.random.default_rng(seed)
    drafts, requests = int(rng.choice([2, 3, 4, 8, 31, 33, 63, 64])), int(rng.integers(1, 80))
    committed = torch.from_numpy(rng.integers(1, 300, requests + int(rng.integers(0, 5))))
    words = torch.cat([random_tree(rng, drafts) for _ in range(requests)])
    rows = []
    for request in range(requests):
        for draft in range(drafts):
            word = int(words[request * drafts + draft])
            kv = [True] * int(committed[request]) if columns else []
            rows.append(torch.tensor(kv + [d <= draft and bool(word >> draft - d & 1) for d in range(drafts)]))
    # A buffer with room for more; of a mask of drafts alone, the size is the only sign.
    mask = torch.cat(rows + ([torch.zeros(int(rng.integers(0, 99)), dtype=torch.bool)] if columns else []))
    return mask, words, committed, requests, drafts


def of_kernel(
    emulation: ModuleType, committed: torch.Tensor, mask: torch.Tensor | None, requests: int, drafts: int, columns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the emulated kernel writes: KV lengths, and words where there is a mask."""
    lens, words = torch.zeros_like(committed), torch.zeros(requests * drafts, dtype=torch.int64)
    emulation.draft_tables(
        committed=committed.numpy(), mask=(torch.zeros(0) if mask is None else mask).to(torch.uint8).numpy(),
        requests=requests, drafts=drafts, has_committed_columns=columns, seq_lens=lens.numpy(),
        visible=None if mask is None else words.numpy(),
    )  # fmt: skip
    return lens, words


@COLUMNS
@SEEDS
def test_masks_of_random_trees(emulation: ModuleType, seed: int, columns: bool) -> None:
    mask, words, committed, requests, drafts = random_step(seed, columns)
    assert torch.equal(visible_words(mask, committed[:requests], drafts), words)
    tables = DraftTables(len(committed), drafts, torch.device("cpu"))
    seq_lens, visible = tables.fill(committed, requests, drafts, trees=True, mask=mask)
    assert torch.equal(seq_lens, committed + drafts)
    assert torch.equal(visible, words)
    found = of_kernel(emulation, committed, mask, requests, drafts, columns)
    assert torch.equal(found[0], seq_lens)
    assert torch.equal(found[1], words)


@pytest.mark.parametrize("size", [0, 5])
def test_drafts_that_the_mask_does_not_cover_see_all(emulation: ModuleType, size: int) -> None:
    mask, committed = torch.zeros(size, dtype=torch.bool), torch.tensor([1])
    _, visible = of_kernel(emulation, committed, mask, 1, 4, columns=True)
    assert visible.tolist() == visible_words(mask, committed, 4).tolist()
    assert visible.tolist() == [-1 if size == 0 else -2, -1, -1, -1]
    assert visible_words(None, committed, 4).tolist() == [-1] * 4


def test_chains_have_no_masks(emulation: ModuleType) -> None:
    committed = torch.arange(1, 8)
    tables = DraftTables(9, 100, torch.device("cpu"))
    seq_lens, visible = tables.fill(committed, 5, 100, trees=False)
    assert visible is None
    assert torch.equal(seq_lens, committed + 100)
    assert torch.equal(of_kernel(emulation, committed, None, 5, 100, columns=False)[0], seq_lens)


def test_tables_stay_where_they_are() -> None:
    tables = DraftTables(4, 3, torch.device("cpu"))
    of_steps = [tables.fill(torch.ones(rows, dtype=torch.int64), rows, 3, trees=True) for rows in (4, 1, 3)]
    for part in (0, 1):
        assert len({step[part].data_ptr() for step in of_steps}) == 1
    with pytest.raises(ValueError, match="memory for 4 requests and 12 drafts"):
        tables.fill(torch.ones(5, dtype=torch.int64), 5, 3, trees=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_the_kernel_reads_masks_where_sglang_wrote_them(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Triton's is a buffer of uint8 for the longest context of the largest batch: a copy would take as much memory."""
    mask = torch.ones(2 * 3 * 1000, dtype=dtype)
    tables, calls = DraftTables(2, 3, torch.device("cpu")), []
    monkeypatch.setattr(tables, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(draft_tables._native, "cuda_draft_tables", lambda **call: calls.append(call), raising=False)
    tables.fill(torch.tensor([9, 7]), 2, 3, trees=True, mask=mask)
    assert [(call["mask"], call["mask_size"]) for call in calls] == [(mask.data_ptr(), len(mask))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@COLUMNS
@SEEDS
def test_the_kernel_allocates_nothing(seed: int, columns: bool, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    mask, words, committed, requests, drafts = random_step(seed, columns)
    mask, committed = mask.to(device, dtype), committed.to(device)
    tables = DraftTables(len(committed), drafts, device)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    seq_lens, visible = tables.fill(committed, requests, drafts, trees=True, mask=mask)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(seq_lens, committed + drafts)
    assert torch.equal(visible.cpu(), words)
