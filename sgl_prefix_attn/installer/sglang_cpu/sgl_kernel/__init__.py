"""Stand-in for SGLang's kernel package, which is published for GPUs only.

With SGLANG_USE_CPU_ENGINE=1, SGLang imports a few `*_cpu` functions of `sgl_kernel` when its modules load. In all
supported releases only speculative decoding calls them. Serving text needs the names to exist and nothing more, so
every name here is a function that raises when it is called.

No operator is registered under `torch.ops.sgl_kernel`: SGLang takes the presence of `convert_weight_packed` there as
the sign that it may use Intel AMX kernels, and without it stays on its plain torch implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+cpu.shim"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no {name!r}, only names that end in '_cpu'")

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this is the CPU stand-in for sgl_kernel, which has no kernels. "
            "SGLang needs it for speculative decoding; run that on a GPU with the real package."
        )

    unavailable.__name__ = unavailable.__qualname__ = name
    return unavailable
