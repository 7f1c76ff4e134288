"""Functions of `sgl_kernel.speculative`."""

from __future__ import annotations

from torch import Tensor


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, seq_lens: Tensor, positions: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor, count: int, drafts: int,
) -> None:  # fmt: skip
    """Positions and links of trees whose masks name each draft's ancestors and itself. The last ancestor is the parent.

    A draft's first child is the first draft that has it as parent.
    """
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for request, mask in enumerate(tree_mask.view(count, drafts, drafts).bool().tolist()):
        last_child: dict[int, int] = {}
        for draft in range(drafts):
            retrieve_index[request, draft] = request * drafts + draft
            ancestors = [other for other in range(draft) if mask[draft][other]]
            positions[request * drafts + draft] = int(seq_lens[request]) + len(ancestors)
            if not ancestors:
                continue
            parent = ancestors[-1]
            if parent in last_child:
                retrieve_next_sibling[request, last_child[parent]] = draft
            else:
                retrieve_next_token[request, parent] = draft
            last_child[parent] = draft
