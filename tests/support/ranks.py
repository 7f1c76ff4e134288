"""Variables of a server with two ranks on a CPU."""

from __future__ import annotations

TWO_RANKS = {
    # One entry a rank: SGLang wants cores named if there are more ranks than NUMA nodes.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    # With more than one rank SGLang compiles the look-up of embeddings, which takes longer than all else here.
    "TORCHDYNAMO_DISABLE": "1",
}
