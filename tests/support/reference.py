"""Dense attention over the same inputs as `packed_attention`, written to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor | Sequence[int],
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's last `query_lens[r]` tokens over its own KV positions, one request at a time.

    Args:
        q: [sum of query_lens, q_heads, head_dim], the requests' tokens one request after the other. All tensors are
            on its device, but for lengths and rows, which may be elsewhere.
        query_lens: new tokens per request.
        dtype: of the arithmetic and the results.
        others: see `packed_attention`.

    Returns:
        out [tokens, q_heads, head_dim] and lse [tokens, q_heads] (natural logarithm, sinks included).

    Raises:
        ValueError: if query_lens and q disagree, or a request has more new tokens than positions.
    """
    tokens, q_heads, head_dim = q.shape
    if sum(int(n) for n in query_lens) != tokens:
        raise ValueError(f"query_lens add up to {sum(int(n) for n in query_lens)} tokens but q has {tokens}")
    groups = (k_cache.shape[1], -1)  # KV heads, and the query heads of each
    out = torch.zeros(tokens, q_heads, head_dim, dtype=dtype, device=q.device)
    lse = torch.full((tokens, q_heads), -torch.inf, dtype=dtype, device=q.device)
    lengths, rows = seq_lens.tolist(), req_pool_indices.tolist()
    begin = 0
    for request, new in enumerate(int(n) for n in query_lens):
        length = lengths[request]
        if new > length:
            raise ValueError(f"request {request} has {new} new tokens but a length of {length}")
        end = begin + new
        slots = req_to_token[rows[request], :length].long()
        keys, values = k_cache[slots].to(dtype) * k_scale, v_cache[slots].to(dtype) * v_scale
        scores = torch.einsum("tghd,kgd->ghtk", q[begin:end].to(dtype).unflatten(1, groups), keys).flatten(0, 1) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        query_position = torch.arange(length - new, length, device=q.device)[:, None]
        key_position = torch.arange(length, device=q.device)[None, :]
        back = query_position - key_position
        seen = back >= 0
        if window_left >= 0:
            seen &= back <= window_left
        if visible is not None:
            seen &= (back > 63) | ((visible[begin:end, None] >> back.clamp(0, 63)) & 1).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
        logits = scores
        if sinks is not None:
            logits = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, new, 1)], dim=-1)
        denominator = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(scores - denominator[..., None])
        out[begin:end] = torch.einsum("ghtk,kgd->tghd", weights.unflatten(0, groups), values).flatten(1, 2)
        lse[begin:end] = denominator.T
        begin = end
    return out, lse
