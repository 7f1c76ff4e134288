"""Settings: defaults, TOML file, variables; errors name source, value and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefix_attn.settings import (
    OTHER_VARIABLES,
    WRAPPABLE,
    Settings,
    SettingsError,
    accepted_values,
    load_settings,
    load_settings_with_sources,
    misnamed_variables,
    variable_name,
)
from sgl_prefix_attn.settings_cli import markdown

DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def config(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "prefixpack.toml"
    path.write_text(text, encoding="utf-8")
    return {"PREFIXPACK_CONFIG": str(path)}


def message(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)
    return str(caught.value)


def test_variable_beats_file_beats_default(tmp_path: Path) -> None:
    environ = config(tmp_path, "workers = 7\nmax_tile_rows = 32\n") | {"PREFIXPACK_WORKERS": "9"}
    loaded = load_settings_with_sources(environ)
    assert (loaded.settings.workers, loaded.settings.max_tile_rows) == (9, 32)
    assert loaded.sources["workers"] == "PREFIXPACK_WORKERS"
    assert loaded.sources["max_tile_rows"] == f"{environ['PREFIXPACK_CONFIG']}:2"
    assert loaded.sources["metrics"] == "default"


def test_none_takes_an_optional_value_back(tmp_path: Path) -> None:
    environ = config(tmp_path, "workers = 7\n") | {"PREFIXPACK_WORKERS": " none "}
    assert load_settings(environ).workers is None


@pytest.mark.parametrize(
    ("text", "names"),
    [("1", WRAPPABLE), ("off", ()), (" triton, fa3", ("fa3", "triton")), ("torch_native", ("torch_native",))],
)
def test_wrap_is_all_none_or_a_list(text: str, names: tuple[str, ...]) -> None:
    assert load_settings({"PREFIXPACK_WRAP": text}).wrap == names


def test_wrap_in_a_file(tmp_path: Path) -> None:
    assert load_settings(config(tmp_path, "wrap = true\n")).wrap == WRAPPABLE
    assert load_settings(config(tmp_path, 'wrap = ["triton"]\n')).wrap == ("triton",)


@pytest.mark.parametrize("text", ["hpc_ops", "fa3,fa4", "2"])
def test_wrap_knows_no_other_backends(text: str) -> None:
    assert "accepted is true, false, or a list of fa3" in message({"PREFIXPACK_WRAP": text})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("on", True), ("0", False), ("False", False)])
def test_variables_spell_booleans_in_the_usual_ways(text: str, value: bool) -> None:
    assert load_settings({"PREFIXPACK_PACK_EXTEND": text}).pack_extend is value


def test_build_variables_are_not_settings() -> None:
    environ = dict.fromkeys(OTHER_VARIABLES, "1") | {"PREFIXPACK_CONFIG": ""}
    assert load_settings(environ) == Settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stock_backend", "flash"), ("pack_decode", "maybe"), ("cpu_threads", "0"),
        ("workers", "-1"), ("workers", "many"), ("max_tile_rows", "48"), ("max_tile_rows", "256"),
        ("replan_growth", "none"), ("metrics_flush_steps", "1.5"),
    ],
)  # fmt: skip
def test_bad_variable_is_named_with_value_and_accepted_values(key: str, value: str) -> None:
    assert message({variable_name(key): value}) == (
        f"{variable_name(key)}={value!r} is not usable: accepted is {accepted_values(key)}"
    )


def test_bad_value_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    environ = config(tmp_path, '# how we run\nmetrics = true\n\npack_decode = "yes"\n')
    assert message(environ) == (
        f"{environ['PREFIXPACK_CONFIG']}:4: pack_decode = 'yes' is not usable: accepted is true or false"
    )


@pytest.mark.parametrize(
    "line", ["workers = true", 'workers = "8"', "workers = 8.0", "metrics = 1", "workers = [1]", 'fingerprint_key = ""']
)
def test_types_in_the_file_are_strict(tmp_path: Path, line: str) -> None:
    assert ":1: " in message(config(tmp_path, line))


def test_unknown_variable_names_the_nearest_one() -> None:
    text = message({"PREFIXPACK_WORKER": "3"})
    assert text.startswith("PREFIXPACK_WORKER: there is no such setting; did you mean PREFIXPACK_WORKERS? known are ")
    assert "PREFIXPACK_MAX_TILE_ROWS" in text


def test_unknown_key_in_the_file_names_line_and_nearest_one(tmp_path: Path) -> None:
    environ = config(tmp_path, "metrics = true\nmetrics_flush = 4\n")
    assert message(environ).startswith(
        f"{environ['PREFIXPACK_CONFIG']}:2: there is no setting 'metrics_flush'; did you mean metrics_flush_steps? "
    )


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    environ = config(tmp_path, "workers = 0\nworkerz = 1\n") | {"PREFIXPACK_METRICS": "perhaps"}
    assert len(message(environ).splitlines()) == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert f"={path}: cannot read the file: No such file" in message({"PREFIXPACK_CONFIG": str(path)})
    assert "=~nosuchuser/p.toml: cannot read the file" in message({"PREFIXPACK_CONFIG": "~nosuchuser/p.toml"})
    assert "the file is not TOML: " in message(config(tmp_path, "workers: 3\n"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "the file is not UTF-8 text" in message({"PREFIXPACK_CONFIG": str(tmp_path / "binary.toml")})


def test_the_documentation_has_the_current_reference() -> None:
    """`python -m sgl_prefix_attn settings --markdown` prints it."""
    assert DOCUMENTATION.read_text(encoding="utf-8").endswith(f"\n## Reference\n\n{markdown()}\n")


class TestVariablesOfOthers:
    KUBERNETES = (
        "PREFIXPACK_SERVICE_HOST=10.0.0.7",
        "PREFIXPACK_SERVICE_PORT=30000",
        "PREFIXPACK_SERVICE_PORT_HTTP=30000",
        "PREFIXPACK_PORT=tcp://10.0.0.7:30000",
        "PREFIXPACK_PORT_30000_TCP=tcp://10.0.0.7:30000",
        "PREFIXPACK_PORT_30000_TCP_ADDR=10.0.0.7",
        "PREFIXPACK_DECODE_SERVICE_HOST=10.0.0.8",
        "PREFIXPACK_DECODE_PORT_30000_TCP_PROTO=tcp",
    )

    def test_those_of_a_kubernetes_service_are_ignored_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        injected = dict(line.split("=", 1) for line in self.KUBERNETES)
        assert load_settings(injected | {"PREFIXPACK_WORKERS": "3"}) == Settings(workers=3)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert all(name in caplog.text for name in injected)

    @pytest.mark.parametrize("name", ["PREFIXPACK_METRICS", "PREFIXPACK_WORKERS", "PREFIXPACK_CONFIG"])
    @pytest.mark.parametrize("value", ["", " "])
    def test_an_empty_variable_is_unset(self, name: str, value: str) -> None:
        assert load_settings({name: value}) == Settings()

    @pytest.mark.parametrize("name", ["PREFIXPACK_SERVICES", "PREFIXPACK_EXPORT", "PREFIXPACK_REPORT_1"])
    def test_a_misspelt_key_stays_an_error(self, name: str) -> None:
        assert "there is no such setting" in message({name: "1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PREFIX_PACK_WRAP", "did you mean PREFIXPACK_WRAP?"),
        ("prefixpack_wrap", "did you mean PREFIXPACK_WRAP?"),
        ("PREFIXPACKROUTE", "did you mean PREFIXPACK_ROUTE?"),
        ("PREFIXPAK_ROUTE", "did you mean PREFIXPACK_ROUTE?"),
        ("PREFXIPACK_ROUT", "did you mean PREFIXPACK_ROUTE?"),
        ("SGLANG_PREFIXPACK_ROUTE", "did you mean PREFIXPACK_ROUTE?"),
        ("PREFIX-PACK-WORKER", "did you mean PREFIXPACK_WORKERS?"),
        ("PREFIX_PACK_COLOUR_OF_GRAPHS", "ours begin with PREFIXPACK_"),
        ("PREFIXPACK", "ours begin with PREFIXPACK_"),
    ],
)
def test_a_variable_that_looks_like_ours_is_told(name: str, hint: str) -> None:
    assert misnamed_variables({name: "1"}) == [f"the variable {name} is not read; {hint}"]
    assert misnamed_variables({name: " "}) == []


def test_other_variables_are_not_taken_for_ours() -> None:
    others = "PREFIX PATH PREFIX_PATH CMAKE_PREFIX_PATH PACK SGLANG_ROUTE CONDA_PREFIX npm_config_prefix MY_PREFIXPACK"
    services = "PREFIX_PACK_SERVICE_HOST PREFIX_PACK_PORT_30000_TCP MY_PREFIXPACK_SERVICE_HOST MY_PREFIXPACK_PORT"
    ours = ["PREFIXPACK_WRAP", "PREFIXPACK_CUDA", "PREFIXPACK_UNKNOWN"]  # the last one is an error elsewhere
    assert misnamed_variables(dict.fromkeys([*others.split(), *services.split(), *ours], "1")) == []
