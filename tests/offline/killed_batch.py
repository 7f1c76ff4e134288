"""`python -m tests.offline.killed_batch LINES SEED batch ...`: the batch command, killed by its own hand.

SIGKILL comes when LINES more requests have finished: before the last of them are on disk or after, and up to 50 ms
later, in which the engine works on. Whoever else sends the signal may come too late: the machine is fast, or it did not
get to run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.offline.journal import Finished, Journal


def die_at(lines: int, rng: random.Random) -> None:
    """Arranges for the death of this process when `lines` requests have finished; at most those are on disk then."""
    append, left = Journal.append, lines
    on_disk, pause = rng.random() < 0.5, rng.random() * 0.05

    def last_append(journal: Journal, results: Sequence[Finished]) -> None:
        nonlocal left
        results = results[:left]
        left -= len(results)
        if left > 0 or on_disk:
            append(journal, results)
        if left == 0:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = last_append  # type: ignore[method-assign]


if __name__ == "__main__":
    die_at(int(sys.argv[1]), random.Random(int(sys.argv[2])))
    sys.exit(main(sys.argv[3:]))
