"""The benchmark of drawn batches without a GPU: seeds, resuming, what serves a case, summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernel.gpu_drawn import parser, seed_of


def args_of(*arguments: str) -> Any:
    return parser().parse_args(list(arguments))


def test_acceptance_draws_a_seed_and_keeps_its_file(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    new = args_of("--set", "acceptance", "--out", str(out))
    assert seed_of(new) != seed_of(new)
    out.write_text(json.dumps({"set": "acceptance", "seed": 77}))
    with pytest.raises(ValueError, match="acceptance runs are kept"):
        seed_of(new)
    with pytest.raises(ValueError, match="acceptance runs are kept"):
        seed_of(args_of("--set", "dev", "--out", str(out)))
    assert seed_of(args_of("--set", "acceptance", "--out", str(out), "--resume")) == 77
    with pytest.raises(ValueError, match="draws its own seed"):
        seed_of(args_of("--set", "acceptance", "--seed", "3"))
