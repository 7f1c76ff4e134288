"""Places where SGLang decides by the *name* of the attention backend whether Triton kernels may run.

SGLang assumes a GPU for unknown names, which fails on a CPU with "0 active drivers". These hooks give the answers that
`torch_native` would get. On any other device they call SGLang's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.compat import versions

NAME = "prefixpack"


class CpuFallbacks:
    """The hooks of one process.

    Attributes:
        has_cpu_backend: whether a prefixpack backend was built for a CPU runner in this process.
    """

    def __init__(self) -> None:
        self.has_cpu_backend = False

    def around_support_triton(self, original: Callable[[str], bool], backend: str) -> bool:
        """AROUND hook on `support_triton(backend name)`."""
        # Some versions ask for the undivided --attention-backend, which is None where prefill and decode differ.
        if self.has_cpu_backend or (backend == NAME and _runs_on_cpu()):
            return False
        return original(backend)

    def around_get_last_loc(
        self,
        original: Callable[..., torch.Tensor],
        req_to_token: torch.Tensor,
        req_pool_indices_tensor: torch.Tensor,
        prefix_lens_tensor: torch.Tensor,
    ) -> torch.Tensor:
        """AROUND hook on `get_last_loc`: the KV slot of each request's last prefix token, -1 without a prefix."""
        if not self.has_cpu_backend:
            return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
        last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
        return torch.where(prefix_lens_tensor > 0, last.to(prefix_lens_tensor.dtype), -1)


def _runs_on_cpu() -> bool:
    arguments: Any = versions.server_args()
    if arguments is None:
        return not torch.cuda.is_available()
    return str(arguments.device).split(":")[0] == "cpu"
