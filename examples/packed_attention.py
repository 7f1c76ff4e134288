"""Attention of a batch with a shared prefix on plain tensors, beside PyTorch's own. Needs neither SGLang nor a GPU.

python examples/packed_attention.py [--requests 64] [--shared 2048] [--own 128]
"""

from __future__ import annotations

import argparse
import time

import torch

from sgl_prefix_attn import DeviceModel, ModelShape, Planner, PrefixForest, packed_attention

Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=2048, help="tokens of the common prefix")
    parser.add_argument("--own", type=int, default=128, help="tokens of each request behind it")
    arguments = parser.parse_args()
    requests, shared, length = arguments.requests, arguments.shared, arguments.shared + arguments.own

    # As in a server: one pool of KV slots, and a table with the slot of each position of each request.
    slots = torch.arange(shared + requests * arguments.own)
    table = torch.stack([torch.cat([slots[:shared], own]) for own in slots[shared:].split(arguments.own)])
    k, v = torch.randn(2, len(slots), KV_HEADS, HEAD_DIM)
    q = torch.randn(requests, Q_HEADS, HEAD_DIM)
    lengths = torch.full((requests,), length)

    planner = Planner(
        ModelShape(Q_HEADS, KV_HEADS, HEAD_DIM, kv_bytes=4), DeviceModel.cpu(threads=torch.get_num_threads())
    )
    plan = planner.plan(PrefixForest.from_paths([[(0, 0, shared)]] * requests), lengths.numpy())

    def packed() -> torch.Tensor:
        return packed_attention(
            q, k, v, plan, req_to_token=table.int(), req_pool_indices=torch.arange(requests), seq_lens=lengths,
            scale=HEAD_DIM**-0.5,
        )  # fmt: skip

    def request_wise() -> torch.Tensor:
        keys, values = (pool[table].transpose(1, 2) for pool in (k, v))  # [requests, kv_heads, length, head_dim]
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    torch.testing.assert_close(packed(), request_wise(), rtol=1e-4, atol=1e-5)
    print(f"KV positions read: {plan.kv_tokens_packed:,}, request by request {plan.kv_tokens_per_request:,}")
    for name, run in (("packed", packed), ("PyTorch, with its gather", request_wise)):
        started = time.perf_counter()
        run()
        print(f"{name}: {1e3 * (time.perf_counter() - started):.1f} ms")


if __name__ == "__main__":
    main()
