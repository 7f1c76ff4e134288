"""The models of `benchmarks.serving.wrapped_models`, and the ratio that it predicts. Servers need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.wrapped_models import CASES, LAYERS, SHAPES, predicted_ratio

PACKED = {"gpt_oss": 12, "llama4": 6, "qwen3_next": 6}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_one_that_transformers_reads(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    SHAPES[name].write(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_hidden_layers == LAYERS
    assert config.architectures == [SHAPES[name].architecture]
    assert sum(kind == "full_attention" for kind in config.layer_types) == PACKED[name]


def test_cases_name_shapes() -> None:
    assert {case.partition(":")[0] for case in CASES} == set(SHAPES)


def test_the_prediction_replaces_the_time_of_packed_layers() -> None:
    last = {"route": "packed", "stock_us": 80.0, "packed_us": 30.0}
    assert predicted_ratio(3.0, 12, last) == pytest.approx(3.0 / (3.0 - 12 * 0.05))
    assert predicted_ratio(3.0, 0, last) == 1.0
