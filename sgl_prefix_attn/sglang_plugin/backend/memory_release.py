"""Device memory that SGLang releases and maps again, for a trainer on the same GPUs (--enable-memory-saver).

A captured graph keeps the addresses of its buffers. With the tag `cuda_graph`, SGLang unmaps memory that was allocated
for graphs. The addresses stay, and the content is lost: plans, semaphores and output of packed steps, if they are in
such memory. SGLang releases memory only while no request runs.
"""

from __future__ import annotations

from typing import Any

from sgl_prefix_attn.sglang_plugin.backend import plugin_state

TAG = "cuda_graph"


def after_resume_memory_occupation(result: Any, manager: Any, recv_req: Any) -> None:
    """AFTER hook on `SchedulerWeightUpdaterManager.resume_memory_occupation`: makes the buffers of packed steps anew.

    Other tags leave these buffers alone: memory with the tag of graphs may still be unmapped.
    """
    state = plugin_state.active()
    if state is None or (recv_req.tags and TAG not in recv_req.tags):
        return
    with state.counters.failures.guard("memory_release", "packed steps may read lost plans"):
        for record in state.backends.values():
            record.executor.memory_resumed()
