"""Verify and draft steps over SGLang's `torch_native` backend: the stock backend of tests with speculation."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def add_verify_steps(module: ModuleType) -> None:
    """Teaches TorchNativeAttnBackend the steps in which a target model checks drafts, chains and trees."""
    backend = module.TorchNativeAttnBackend
    forward_extend = backend.forward_extend

    def forward(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, module.KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return verify(self, q, layer, forward_batch)

    backend.forward_extend = forward


def verify(backend: Any, q: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
    """Attention of n drafts a request over its KV and over the drafts that the mask shows them."""
    info, count = forward_batch.spec_info, forward_batch.batch_size
    drafts = info.draft_token_num
    masks = info.custom_mask.view(count, drafts, drafts).bool()
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    values = backend.token_to_kv_pool.get_value_buffer(layer.layer_id)
    queries = q.view(count, drafts, layer.tp_q_head_num, layer.qk_head_dim)
    rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
    outputs = []
    for query, mask, row, length in zip(queries, masks, rows, lengths, strict=True):
        slots = backend.req_to_token_pool.req_to_token[row, : length + drafts].long()
        visible = torch.cat([mask.new_ones(drafts, length), mask], dim=1)
        out = scaled_dot_product_attention(
            query.transpose(0, 1), keys[slots].transpose(0, 1), values[slots].transpose(0, 1),
            attn_mask=visible, scale=layer.scaling, enable_gqa=True,
        )  # fmt: skip
        outputs.append(out.transpose(0, 1).reshape(drafts, -1))
    return torch.cat(outputs)


def add_draft_backends(module: ModuleType) -> None:
    """Adds `torch_native` to the backends that SGLang knows for the steps of a draft model."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class DraftStep(TorchNativeAttnBackend):
        """The draft model's step `index`: as many drafts are in the cache already, and it adds one."""

        def __init__(self, runner: Any, index: int) -> None:
            super().__init__(runner)
            self.index = index

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
        ) -> torch.Tensor:
            grown = copy.copy(forward_batch)
            grown.seq_lens = forward_batch.seq_lens + self.index + 1
            return super().forward_decode(q, k, v, layer, grown, save_kv_cache)

    class DraftSteps:
        """The backends of all draft steps but the last, which needs none."""

        needs_cpu_seq_lens = True

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [DraftStep(runner, index) for index in range(steps)]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(forward_batch)

    factory = module.DraftBackendFactory
    create = factory._create_backend

    def create_backend(self: Any, name: str, backends: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        runner = self.draft_model_runner
        # Both maps have the same keys; the messages tell them apart.
        if "decode attention" in args[0]:
            made: Any = lambda: ("torch_native", DraftSteps(runner, self.speculative_num_steps))  # noqa: E731
        else:
            made = lambda: ("torch_native", TorchNativeAttnBackend(runner))  # noqa: E731
        return create(self, name, {**backends, "torch_native": made}, *args, **kwargs)

    factory._create_backend = create_backend
