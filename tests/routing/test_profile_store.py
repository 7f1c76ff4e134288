"""The profile that a server takes: the user's, then the package's, else none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.profile import SHIPPED_FILES, MeasuredStep, ProfileError, parse_profile, read_shipped
from sgl_prefix_attn.routing.profile_store import ProfileStore, ServerFacts, refusal, user_folder
from sgl_prefix_attn.routing.versions import KERNELS_VERSION, TAKEN_VERSIONS
from tests.routing.profiles import profile

H200 = "NVIDIA H200"


def facts(heads: str = "32/8/128", kv_bytes: int = 2, gpu: str = H200, **other: Any) -> ServerFacts:
    q_heads, kv_heads, head_dim = map(int, heads.split("/"))
    shape = ModelShape(q_heads, kv_heads, head_dim, kv_bytes=kv_bytes)
    return ServerFacts(gpu, "9.0", shape, **({"dtype": "bf16", "packed": "native", "stock": "fa3"} | other))


def write(folder: Path, name: str, **fields: Any) -> None:
    made = profile({"launch": 1.0}, {"launch": 2.0})
    values = {"machine": H200, "capability": "9.0", "kernels_version": KERNELS_VERSION, "dtype": "bf16"} | fields
    made.model_copy(update=values).save(folder / f"{name}.json")


def taken(folder: Path, of: ServerFacts, **arguments: Any) -> str | None:
    found = ProfileStore.read(folder=folder, **arguments).find(of)
    return None if found is None else f"{found.stored.origin} {Path(found.stored.name).stem}"


def borrowed(folder: Path, of: ServerFacts) -> str | None:
    """In what the profile that is taken differs from the server."""
    return ProfileStore.read(folder=folder).find(of).borrowed


def test_the_users_comes_before_the_packages_and_the_same_heads_before_others(tmp_path: Path) -> None:
    assert taken(tmp_path, facts()) == "shipped h200"
    write(tmp_path, "others", head_shapes=["8/1/128"])
    assert taken(tmp_path, facts()) == "shipped h200", "measured with many heads, not with others only"
    write(tmp_path, "any")
    assert taken(tmp_path, facts()) == "user any"
    write(tmp_path, "these", head_shapes=["64/8/128", "32/8/128"])
    assert taken(tmp_path, facts()) == "user these"
    assert taken(tmp_path, facts("40/8/128")) == "user any"
    assert taken(tmp_path, facts("8/1/128")) == "user others"
    write(tmp_path / "..", "named", machine="another GPU")
    assert taken(tmp_path, facts(), route_profile=str(tmp_path / ".." / "named.json")) == "setting named"


def test_of_profiles_that_differ_in_pages_alone_the_servers_is_taken(tmp_path: Path) -> None:
    """Their names, by which equals are in order, put page 16 first."""
    write(tmp_path, "a-page16", head_shapes=["32/8/128"], page_size=16)
    assert taken(tmp_path, facts()) == "user a-page16", "borrowed, before the package's"
    write(tmp_path, "b", head_shapes=["32/8/128"])
    assert taken(tmp_path, facts()) == "user b"
    assert taken(tmp_path, facts(page_size=16)) == "user a-page16"
    assert borrowed(tmp_path, facts(page_size=64)) == "page size 16; this is 64"


def test_an_h100_has_a_profile_of_its_own(tmp_path: Path) -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    assert taken(tmp_path, facts(gpu=h100)) == "shipped h100"
    assert borrowed(tmp_path, facts("32/8/64", gpu=h100)) == "head_dim 128; this is 64"
    assert taken(tmp_path, facts(gpu=h100, stock="triton_gqa")) is None
    assert taken(tmp_path, facts(gpu="NVIDIA H100 PCIe")) is None


def test_kv_types(tmp_path: Path) -> None:
    assert taken(tmp_path, facts(kv_bytes=1, stock="flashinfer_tc")) == "shipped h200_fp8_kv"
    assert borrowed(tmp_path, facts(kv_bytes=1)) == "16-bit KV; of 8 bits, predictions know the bytes alone"
    assert taken(tmp_path, facts(kv_bytes=4, dtype="fp32")) is None
    assert borrowed(tmp_path, facts("32/8/64", kv_bytes=1, stock="flashinfer_tc")) == "head_dim 128; this is 64"


def test_kernels_of_an_earlier_version(tmp_path: Path) -> None:
    write(tmp_path, "p", kernels_version=min(TAKEN_VERSIONS))
    assert taken(tmp_path, facts()) == "user p"
    assert borrowed(tmp_path, facts()) == f"kernels of version {min(TAKEN_VERSIONS)}; these are of {KERNELS_VERSION}"


def test_the_shipped_profiles_are_of_these_kernels() -> None:
    assert {read_shipped(name).kernels_version for name in SHIPPED_FILES} == {KERNELS_VERSION}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"machine": "NVIDIA H200 NVL"}, "of NVIDIA H200 NVL, not of NVIDIA H200"),
        ({"machine": "NVIDIA H200 MIG 1g.18gb"}, "of NVIDIA H200 MIG 1g.18gb, not of NVIDIA H200"),
        ({"capability": "10.0"}, "of compute capability 10.0, not 9.0"),
        ({"kernels_version": 1}, f"of kernels 1; these are {KERNELS_VERSION}: calibrate again"),
        ({"dtype": "fp32"}, "of fp32 queries, not bf16"),
        ({"kv_bytes": 1}, "of 8-bit KV, not 16-bit"),
        ({"stock": {}}, "without a cost of the stock kernel fa3"),
        ({"packed": {}}, "without a cost of the packed kernel native"),
        ({"dtype": "fp16"}, None),
        ({"kernels_version": min(TAKEN_VERSIONS)}, None),
    ],
)
def test_what_does_not_fit_is_not_taken(tmp_path: Path, fields: dict[str, Any], why: str | None) -> None:
    write(tmp_path, "p", **fields)
    (stored, *_) = ProfileStore.read(folder=tmp_path).profiles
    assert refusal(stored.profile, facts()) == why
    assert (taken(tmp_path, facts()) == "user p") == (why is None)
    assert taken(tmp_path, facts(gpu="NVIDIA B200")) is None


def test_an_unreadable_file_of_the_user_is_left_out_and_one_of_the_setting_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("launch: 3", encoding="utf-8")
    step = MeasuredStep(step=(1, 10, 10, 0, 0, 0, 10, 10), packed={"native": 5.5}, stock={"fa3": 6.0})
    write(tmp_path, "p", steps=[step], sm_count=58)
    store = ProfileStore.read(folder=tmp_path)
    assert [stored.origin for stored in store.profiles] == ["user", "shipped", "shipped", "shipped"]
    (message,) = store.unreadable
    assert "broken.json: not a routing profile" in message
    with pytest.raises(ProfileError, match="not a routing profile"):
        ProfileStore.read(str(tmp_path / "broken.json"))
    again = ProfileStore.of_json(store.as_json())
    assert (again.profiles, again.unreadable) == (store.profiles, store.unreadable)


def test_what_cannot_be_read_is_an_error_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("~nosuchuser/p.json", "a\0b.json"):
        with pytest.raises(ProfileError, match="cannot read the profile"):
            ProfileStore.read(name, tmp_path)
    digits = "1" * 5000
    for text in (f'{{"version": {digits}}}', json.dumps({"version": 1, "sm_count": 10**300})):
        with pytest.raises(ProfileError, match="p: not a routing profile"):
            parse_profile(text, "p")
    write(tmp_path, "steps")
    values = json.loads((tmp_path / "steps.json").read_text())
    values["steps"] = [{"step": [1, 10**30, 10, 0, 0, 0, 10, 10], "packed": {}, "stock": {}}]
    with pytest.raises(ProfileError, match=r"steps\.0\.step\.1: Input should be less than"):
        parse_profile(json.dumps(values), "p")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (message,) = ProfileStore.read().unreadable
    assert "XDG_CACHE_HOME names one" in message


def test_the_folder_follows_xdg() -> None:
    assert user_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/sgl-prefix-attn/profiles")
    assert user_folder({"XDG_CACHE_HOME": "x"}) == user_folder({}) == Path.home() / ".cache/sgl-prefix-attn/profiles"


def test_route_profiles_lists_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    user_folder().mkdir(parents=True)
    write(user_folder(), "mine", head_shapes=["32/8/128"])
    (user_folder() / "broken.json").write_text("{", encoding="utf-8")
    assert main(["route", "profiles", "--gpu", H200]) == 0
    out = capsys.readouterr().out
    assert "mine.json: NVIDIA H200, heads 32/8/128, 16-bit KV, never: taken" in out
    assert "h200.json: NVIDIA H200, heads drawn, 16-bit KV, 2026" in out
    assert "not taken: another one fits better" in out
    assert "broken.json: not a routing profile" in out
    assert main(["route", "profiles", "--gpu", H200, "--page-size", "16"]) == 0
    out = capsys.readouterr().out
    assert "16-bit KV, pages of 16, native or fa3" in out
    assert "it was measured with page size 1; this is 16" in out
    assert main(["route", "profiles", "--gpu", "cpu"]) == 0
    assert "fp32, 32-bit KV, cpu or torch_native" in capsys.readouterr().out
    assert main(["route", "profiles", "--gpu", "NVIDIA B200"]) == 0
    assert "no profile fits, so a step runs packed only if at least 64" in capsys.readouterr().out
