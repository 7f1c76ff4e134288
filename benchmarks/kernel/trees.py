"""The decode batches of PAT's Figure 9 (ASPLOS 2026) as radix-tree paths."""

from __future__ import annotations

from sgl_prefix_attn.explain.batch import parse_tree

# Nodes per level / tokens per level; the last level is one request each and its tokens are the request's own.
PAT_TREES = (
    "1,10/4096,416",
    "1,256/256,32",
    "1,1024/2048,32",
    "1,2,64/1024,256,256",
    "1,4,256/32,256,32",
    "1,8,512/32,512,256",
    "1,8,512/32,2048,256",
    "1,8,512/512,512,256",
    "1,4,8,256/32,256,256,32",
    "1,4,16,512/1024,256,128,32",
    "1,4,16,64,256,1024/256,32,256,64,32,256",
    "1,16,32,64,128,1024/256,128,64,32,32,32",
    "1,16,32,64,256,1024/256,128,64,32,32,32",
    "1,8,16,32,64,128,1024/256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024/256,128,64,32,32,32,32",
    "2,8,16,256/256,256,32,32",
    "4,16,256,512/512,32,128,32",
    "8,16,32,256/512,512,256,32",
    "256/1024",
    "256/4096",
)
# Query heads, KV heads.
PAT_HEADS = ((32, 32), (16, 8), (32, 8), (64, 8))

Path = list[tuple[int, int, int]]


def tree_paths(tree: str) -> tuple[list[Path], list[int]]:
    """Paths and sequence lengths of the requests of `tree`, e.g. "1,4,256/32,256,32".

    The grammar is that of `python -m sgl_prefix_attn explain --tree`.

    Raises:
        ValueError: not of that form.
    """
    batch = parse_tree(tree)
    return [list(path) for path in batch.paths], batch.seq_lens.tolist()
