"""Settings: defaults < TOML file < variables; whatever is wrong is named with its source and what is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_prefix_attn.settings import (
    OTHER_VARIABLES,
    Settings,
    SettingsError,
    accepted_values,
    load_settings,
    load_settings_with_sources,
    variable_name,
)

DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs" / "settings.md"


def config(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "prefixpack.toml"
    path.write_text(text, encoding="utf-8")
    return {"PREFIXPACK_CONFIG": str(path)}


def message(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(environ)
    return str(caught.value)


def test_defaults_without_file_and_variables() -> None:
    settings = load_settings({"PATH": "/bin"})
    assert settings == Settings()
    assert settings.stock_backend == "auto"
    assert settings.cpu_threads is None
    assert settings.replan_growth == 64


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


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("on", True), ("0", False), ("False", False)])
def test_variables_spell_booleans_in_the_usual_ways(text: str, value: bool) -> None:
    assert load_settings({"PREFIXPACK_PACK_EXTEND": text}).pack_extend is value


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXPACK_CPU_THREADS", "3")
    assert load_settings().cpu_threads == 3


def test_build_variables_are_not_settings() -> None:
    environ = dict.fromkeys(OTHER_VARIABLES, "1") | {"PREFIXPACK_CONFIG": ""}
    assert load_settings(environ) == Settings()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().workers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stock_backend", "flash"),
        ("handover", "magic"),
        ("pack_decode", "maybe"),
        ("cpu_threads", "0"),
        ("workers", "-1"),
        ("workers", "many"),
        ("max_tile_rows", "48"),
        ("max_tile_rows", "256"),
        ("replan_growth", "none"),
        ("metrics_flush_steps", "1.5"),
    ],
)
def test_bad_variable_is_named_with_value_and_accepted_values(key: str, value: str) -> None:
    assert message({variable_name(key): value}) == (
        f"{variable_name(key)}={value!r} is not usable: accepted is {accepted_values(key)}"
    )


def test_bad_value_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    environ = config(tmp_path, '# how we run\nmetrics = true\n\npack_decode = "yes"\n')
    assert message(environ) == (
        f"{environ['PREFIXPACK_CONFIG']}:4: pack_decode = 'yes' is not usable: accepted is true or false"
    )


@pytest.mark.parametrize("line", ["workers = true", 'workers = "8"', "workers = 8.0", "metrics = 1", "workers = [1]"])
def test_types_in_the_file_are_strict(tmp_path: Path, line: str) -> None:
    assert ":1: " in message(config(tmp_path, line))


def test_unknown_variable_names_the_nearest_one() -> None:
    text = message({"PREFIXPACK_WORKER": "3"})
    assert text.startswith(
        "PREFIXPACK_WORKER='3': there is no such setting; did you mean PREFIXPACK_WORKERS? known are "
    )
    assert "PREFIXPACK_MAX_TILE_ROWS" in text


def test_unknown_key_in_the_file_names_line_and_nearest_one(tmp_path: Path) -> None:
    environ = config(tmp_path, "metrics = true\nmetrics_flush = 4\n")
    assert message(environ).startswith(
        f"{environ['PREFIXPACK_CONFIG']}:2: there is no setting 'metrics_flush'; did you mean metrics_flush_steps? "
    )


def test_table_in_the_file_is_an_unknown_key(tmp_path: Path) -> None:
    assert ":2: there is no setting 'prefixpack'" in message(config(tmp_path, "\n[prefixpack]\nworkers = 3\n"))


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    environ = config(tmp_path, "workers = 0\nworkerz = 1\n") | {"PREFIXPACK_METRICS": "perhaps"}
    assert len(message(environ).splitlines()) == 3


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert message({"PREFIXPACK_CONFIG": str(path)}) == (
        f"PREFIXPACK_CONFIG={path}: cannot read the file: No such file or directory"
    )


def test_file_that_is_not_toml(tmp_path: Path) -> None:
    assert "the file is not TOML: " in message(config(tmp_path, "workers: 3\n"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "the file is not UTF-8 text" in message({"PREFIXPACK_CONFIG": str(tmp_path / "binary.toml")})


@pytest.mark.parametrize("key", Settings.model_fields)
def test_every_key_is_documented_and_says_what_it_accepts(key: str) -> None:
    description = Settings.model_fields[key].description
    assert description is not None
    assert description.endswith((".", ")"))
    assert accepted_values(key)


@pytest.mark.parametrize("key", Settings.model_fields)
def test_documentation_has_a_row_for_every_key(key: str) -> None:
    field = Settings.model_fields[key]
    default = "none" if field.default is None else str(field.default)
    row = f"| `{key}` | {default.lower()} | {accepted_values(key)} | {field.description} |"
    assert row in DOCUMENTATION.read_text(encoding="utf-8").splitlines()
