"""The planner's figures of GPUs, from what their drivers tell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_prefix_attn import gpus
from sgl_prefix_attn.core import gpu as gpu_module
from sgl_prefix_attn.core.gpu import H200, Gpu, planner_model
from sgl_prefix_attn.core.planner import DeviceModel, ModelShape
from sgl_prefix_attn.routing import verify


def properties(name: str, capability: str, sms: int, mhz: int, memory_mhz: int, bus: int) -> tuple[str, Any]:
    """As `torch.cuda.get_device_properties` gives them; clocks are in kHz."""
    major, minor = map(int, capability.split("."))
    return name, SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=sms, clock_rate=1000 * mhz,
        memory_clock_rate=1000 * memory_mhz, memory_bus_width=bus,
    )  # fmt: skip


# Clocks and bus widths by data sheets; none of these but the H200 was at hand.
PROPERTIES = dict([
    properties("NVIDIA H200", "9.0", 132, 1980, 3201, 6144),
    properties("NVIDIA H100 80GB HBM3", "9.0", 132, 1980, 2619, 5120),
    properties("NVIDIA A100-SXM4-80GB", "8.0", 108, 1410, 1593, 5120),
    properties("NVIDIA L40S", "8.9", 142, 2520, 9001, 384),
    properties("NVIDIA GeForce RTX 4090", "8.9", 128, 2520, 10501, 384),
    properties("NVIDIA GeForce RTX 5090", "12.0", 170, 2407, 14001, 512),
    properties("NVIDIA B200", "10.0", 148, 1850, 3996, 8192),
])  # fmt: skip
SHAPES = [ModelShape(32, 8, head_dim, kv_bytes) for head_dim in (64, 128, 256) for kv_bytes in (1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_h200_keeps_its_fitted_figures(shape: ModelShape) -> None:
    gpu = Gpu.of_properties(PROPERTIES["NVIDIA H200"])
    fitted = DeviceModel.gpu(132, head_dim=shape.head_dim, group=4, kv_bytes=shape.kv_bytes)
    assert planner_model(gpu, shape, code=90) == planner_model(H200, shape, code=90) == fitted
    assert (fitted.bandwidth, fitted.workers) == (4.3e12, 264)


@pytest.mark.parametrize("code", [90, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_narrowest_whole_tile_stays(shape: ModelShape, code: int | None) -> None:
    gpu = Gpu.of_properties(PROPERTIES["NVIDIA H200"])
    model = planner_model(gpu, shape, code, max_tile_rows=16)
    assert model.tile_rows[-1] == 32
    assert model == planner_model(gpu, shape, code, max_tile_rows=32)


@pytest.mark.parametrize(
    ("name", "terabytes", "flops", "wide", "fill"),
    [
        ("NVIDIA H100 80GB HBM3", 3.00, 183, 600, 2),
        ("NVIDIA A100-SXM4-80GB", 1.83, 107, 107, 3),
        ("NVIDIA L40S", 0.77, 220, 220, 1),
        ("NVIDIA GeForce RTX 4090", 0.90, 99, 99, 1),
        ("NVIDIA GeForce RTX 5090", 1.61, 126, 126, 2),
        ("NVIDIA B200", 7.33, 192, 192, 8),
    ],
)
def test_other_gpus_scale_with_what_the_driver_tells(name, terabytes, flops, wide, fill):
    gpu = Gpu.of_properties(PROPERTIES[name])
    major, minor = gpu.capability
    model = planner_model(gpu, ModelShape(32, 8, 128), code={10: 80}.get(major, 10 * major + minor))
    found = (model.bandwidth / 1e12, model.flops / 1e12, model.wide_flops / 1e12)
    assert found == pytest.approx((terabytes, flops, wide), rel=0.01)
    assert model.narrow_to_fill == fill
    assert "(the driver's)" in gpu.origin()


def test_what_an_old_torch_does_not_tell_is_a_labelled_guess() -> None:
    told = vars(PROPERTIES["NVIDIA L40S"]) | {"minor": 7}
    del told["clock_rate"], told["memory_clock_rate"]
    gpu = Gpu.of_properties(SimpleNamespace(**told))
    assert (gpu.clock, gpu.memory) == (1.70e9, 0.60e12), "of 8.6, the newest before 8.7"
    assert "guessed by compute capability 8.7" in gpu.origin()


def test_files_of_gpus_do_not_contradict_each_other() -> None:
    known = list(gpus.known_gpus().values())
    names = {gpu.name for gpu in known}
    speakers = [gpu for gpu in known if gpu.tensor_flops]
    assert len(names) == len(known)
    assert len({gpu.capability for gpu in speakers}) == len(speakers)
    assert all(gpu.clock and gpu.bandwidth for gpu in speakers)
    assert {gpu.name for gpu in known if gpu.planner} == {H200.name}


def test_a_gpu_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file more, with figures of its own: planner, rule of verify steps and guesses by capability take it."""
    folder = Path(gpus.__file__).parent
    for path in folder.glob("*.toml"):
        (tmp_path / path.name).write_text(path.read_text())
    text = (folder / "h200.toml").read_text().replace('"NVIDIA H200"', '"NVIDIA X1"').replace("[9, 0]", "[13, 0]")
    text = text.replace("bandwidth = 4.3e12", "bandwidth = 9e12").replace("flops = 183e12,", "flops = 99e12,", 1)
    (tmp_path / "x1.toml").write_text(f"tensor_flops = 4096\n{text}")
    caches = (gpus.known_gpus, gpus.known_gpu, gpu_module._fitted)
    shape = ModelShape(32, 8, 128)
    with monkeypatch.context() as patch:
        patch.setattr(gpus, "resources", SimpleNamespace(files=lambda package: tmp_path))
        for cache in caches:
            cache.cache_clear()
        properties = SimpleNamespace(name="NVIDIA X1", major=13, minor=0, multi_processor_count=132)
        gpu = Gpu.of_properties(properties)
        model = planner_model(gpu, shape, code=90)
        assert (gpu.clock, gpu.memory, gpu.is_fitted) == (1.98e9, 4.8e12, True)
        assert (model.bandwidth, model.flops, model.item_overhead) == (9e12, 99e12, 4.5e-6)
        assert verify.was_measured("NVIDIA X1", "native", "fa3", shape)
    for cache in caches:
        cache.cache_clear()
    assert not verify.was_measured("NVIDIA X1", "native", "fa3", shape)


def test_the_native_model_has_the_same_figures() -> None:
    model = DeviceModel.gpu(132)
    native = model.native()
    assert {name: getattr(native, name) for name in vars(model)} == vars(model) | {"tile_rows": list(model.tile_rows)}
