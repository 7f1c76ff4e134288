"""Places where SGLang decides by the attention backend's *name* whether Triton kernels may run.

Unknown names are taken to mean a GPU. On a CPU that ends in "0 active drivers"; these hooks give the answers that
`torch_native` would get. On any other device they pass everything through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.compat import versions

NAME = "prefixpack"

_cpu_backend_built = False


def note_cpu_backend() -> None:
    """To be called when a prefixpack backend is built for a CPU runner in this process."""
    global _cpu_backend_built
    _cpu_backend_built = True


def around_support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """AROUND hook on `support_triton(backend name)`."""
    # The name is not always given: some versions ask for the undivided --attention-backend, which is None when
    # prefill and decode have one each.
    if _cpu_backend_built or (backend == NAME and _runs_on_cpu()):
        return False
    return original(backend)


def around_get_last_loc(
    original: Callable[..., torch.Tensor],
    req_to_token: torch.Tensor,
    req_pool_indices_tensor: torch.Tensor,
    prefix_lens_tensor: torch.Tensor,
) -> torch.Tensor:
    """AROUND hook on `get_last_loc`: the KV slot of each request's last prefix token, -1 without a prefix."""
    if not _cpu_backend_built:
        return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
    return torch.where(prefix_lens_tensor > 0, last.to(prefix_lens_tensor.dtype), -1)


def _runs_on_cpu() -> bool:
    arguments: Any = versions.server_args()
    if arguments is None:
        return not torch.cuda.is_available()
    return str(arguments.device).split(":")[0] == "cpu"
