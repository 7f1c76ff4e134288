"""`python -m tests.offline.killed_batch LINES SEED FOLDER batch ...`: the batch command, killed by its own hand.

Its temporary files are in FOLDER. SIGKILL comes up to 50 ms after LINES more requests have finished, the last of them
on disk or not; until then both this process and the engine work on, but no more gets on disk. Whoever else sends the
signal may come too late: the machine is fast, or it did not get to run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.offline.journal import Finished, Journal


def die_at(lines: int, rng: random.Random) -> None:
    """Arranges for the death of this process when `lines` requests have finished; at most those are on disk then."""
    append, left = Journal.append, lines
    on_disk, pause = rng.random() < 0.5, rng.random() * 0.05

    def die() -> None:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGKILL)

    def last_append(journal: Journal, results: Sequence[Finished]) -> None:
        nonlocal left
        kept = results[:left]
        left -= len(kept)
        if left > 0 or on_disk:
            append(journal, kept)
        if left == 0:
            # Whatever comes next to the journal, also to read what the output is made of, waits for the signal.
            Journal.append = Journal.read = wait_for_death  # type: ignore[assignment, method-assign]
            threading.Thread(target=die, daemon=True).start()
            if not on_disk or len(kept) < len(results):
                wait_for_death()

    Journal.append = last_append  # type: ignore[method-assign]


def wait_for_death(*_: object) -> NoReturn:
    while True:
        time.sleep(60)


if __name__ == "__main__":
    die_at(int(sys.argv[1]), random.Random(int(sys.argv[2])))
    tempfile.tempdir = sys.argv[3]
    sys.exit(main(sys.argv[4:]))
