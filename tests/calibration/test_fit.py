"""Profiles from measurements: what the fit recovers, and how the shipped one does over the measured steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.simulator.__main__ import main as fit_shipped
from benchmarks.simulator.__main__ import simulated_times
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.calibration.fit import fit_coefficients, fit_kernel, non_negative_least_squares
from sgl_prefix_attn.calibration.fit_profile import fit_profile
from sgl_prefix_attn.calibration.judge import Candidate, Verdict, candidate, judge, outcomes, profile_choice
from sgl_prefix_attn.calibration.sources import Source, gather
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.cost import KernelCost
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.measured import MeasuredCase, Results, ResultsError, read_results, stock_kernel
from sgl_prefix_attn.routing.profile import load_profile, read_shipped, shipped_profile
from sgl_prefix_attn.routing.versions import KERNELS_VERSION
from sgl_prefix_attn.workloads import ALL_FAMILIES

RESULTS_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RESULTS = RESULTS_FOLDER / "gpu_attention.json"
RESULTS_OF_FP8_KV = RESULTS_FOLDER / "gpu_attention_fp8.json"
VERIFY_STEPS = RESULTS_FOLDER / "verify_4_1196418529.json"
DEV_SEEDS = [f"gpu_drawn_dev{seed}.json" for seed in (61, 62, 63, 64, 65)]
SOURCES = [
    "gpu_attention.json:triton,fa3,flashinfer_tc,flashinfer_cc,triton_gqa,triton_mha",
    "gpu_drawn_dev1_before.json:fa3",  # head_dim 64 and 256
    *DEV_SEEDS,
]
SOURCES_OF_FP8_KV = ["gpu_attention_fp8.json:triton,flashinfer_tc,flashinfer_cc", *DEV_SEEDS]
SHAPE = ModelShape(q_heads=32, kv_heads=8, head_dim=128)


@pytest.fixture(scope="module")
def measured() -> Results:
    return read_results(RESULTS)


class TestLeastSquares:
    def test_negative_parts_are_left_out_and_the_others_fitted_without_them(self) -> None:
        rng = np.random.default_rng(1)
        matrix = rng.random((60, 4))
        target = matrix @ np.array([2.0, -1.0, 0.5, 1.0]) + rng.normal(0, 0.01, 60)
        solution = non_negative_least_squares(matrix, target)
        assert (solution >= 0).all()
        # Of all supports, none does better: the solution is the best one.
        best = min(
            np.linalg.norm(matrix @ trial - target)
            for bits in range(1, 16)
            if (trial := _with_support(matrix, target, bits)).min() >= 0
        )
        assert np.linalg.norm(matrix @ solution - target) == pytest.approx(best, rel=1e-9)


def _with_support(matrix: np.ndarray, target: np.ndarray, bits: int) -> np.ndarray:
    columns = [column for column in range(matrix.shape[1]) if bits >> column & 1]
    trial = np.zeros(matrix.shape[1])
    trial[columns] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    return trial


def drawn_steps(count: int) -> Iterator[StepFeatures]:
    """Steps of many sizes. Half of their KV tokens lie in shared nodes."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        requests, unique = int(rng.integers(1, 300)), int(rng.integers(1000, 200_000))
        tokens, longest = unique + int(rng.integers(0, 10 * unique)), int(rng.integers(1, 9000))
        yield StepFeatures(requests, tokens, unique, tokens // 2, 3, requests, unique // 2, longest)


def cases_by(truth: KernelCost, steps: Iterable[StepFeatures]) -> list[MeasuredCase]:
    """Steps that took fa3 what a cost model says, of two families."""
    return [
        MeasuredCase(str(number), "ab"[number % 2], SHAPE, step, {}, {"fa3": truth.microseconds(step, SHAPE)})
        for number, step in enumerate(steps)
    ]


def test_times_behind_made_up_coefficients_are_predicted() -> None:
    truth = KernelCost("stock", {"launch": 12.0, "unique_mb": 0.2, "repeated_mb": 0.1, "requests": 15.0})
    cases = cases_by(truth, drawn_steps(70))
    fitted = fit_kernel("stock", "fa3", cases[:60])
    assert fitted.error < 1e-4
    assert set(fitted.error_left_out) == {"a", "b"}
    for other in cases[60:]:
        found = KernelCost("stock", fitted.us).microseconds(other.step, SHAPE)
        assert found == pytest.approx(other.stock["fa3"], rel=1e-3)


@pytest.mark.parametrize(("unshared", "sharing"), [(2, 0.0), (20, 3.0)])
def test_sharing_costs_nothing_where_nearly_all_steps_share(unshared: int, sharing: float) -> None:
    """It could be the launch as well, which a step without sharing would then not have."""
    terms = np.stack([np.ones(60), np.arange(60) >= unshared, np.arange(60.0)], axis=1)
    assert fit_coefficients(terms, terms @ [12.0, 3.0, 2.0])[1] == pytest.approx(sharing)


def test_a_fit_counts_the_ctas_of_its_own_gpu() -> None:
    truth = KernelCost("stock", {"launch": 9.0, "split_2": 8.0, "unsplit": 4.0}, sms=58)
    drawn = np.random.default_rng(0).integers((1, 500), (40, 9000), (60, 2)).tolist()
    cases = cases_by(truth, (StepFeatures(n, n * length, n * length, 0, 0, 0, length, length) for n, length in drawn))
    assert fit_kernel("stock", "fa3", cases, 58).error < 1e-4 < 0.01 < fit_kernel("stock", "fa3", cases).error
    results = Results("r.json", "GPU", "1", "now", 2, [replace(c, packed={"native": 9.0}) for c in cases], sm_count=58)
    cost = fit_profile(results).cost("stock", "fa3")
    assert [cost.microseconds(c.step, SHAPE) for c in cases] == pytest.approx([c.stock["fa3"] for c in cases], rel=1e-3)


class TestMeasuredSteps:
    """Policies over the measured steps, against an oracle that knows both times."""

    @staticmethod
    def verdict(measured: Results, policy: str, backend: str, packed: str = "native") -> Verdict:
        chosen = candidate(policy, packed, backend, measured)
        return judge(outcomes(measured.cases, chosen, packed, backend))

    @pytest.mark.parametrize(
        ("policy", "backend"),
        [
            *(("shipped", backend) for backend in ("fa3", "flashinfer", "triton")),
            ("left-out", "fa3"),
            *(pytest.param("left-out", backend, marks=pytest.mark.slow) for backend in ("flashinfer", "triton")),
        ],
    )
    def test_regret(self, measured: Results, policy: str, backend: str) -> None:
        verdict = self.verdict(measured, policy, backend)
        assert verdict.steps > 150
        assert verdict.regret < 0.02
        assert verdict.mean_regret < 0.03
        packed = self.verdict(measured, "packed", backend)
        assert verdict.worst_loss[0] < 0.2 < packed.worst_loss[0], "or it is not worth it"
        assert verdict.behind < packed.behind / 2

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
    def test_the_conservative_rule_loses_little_and_gains(self, measured: Results, backend: str) -> None:
        verdict = self.verdict(measured, "conservative", backend)
        assert verdict.worst_loss[0] <= 0.02
        assert verdict.packed > 20
        assert verdict.regret < self.verdict(measured, "stock", backend).regret / 4

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer", "triton"])
    def test_the_conservative_rule_of_the_triton_kernels_loses_on_no_step(self, measured, backend):
        verdict = self.verdict(measured, "conservative", backend, "triton")
        assert verdict.behind == 0
        assert verdict.packed > 70

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
    def test_without_a_profile_no_family_of_drawn_steps_is_behind_stock(self, backend: str) -> None:
        drawn = read_results(RESULTS_FOLDER / "gpu_drawn.json")
        steps = outcomes(drawn.cases, candidate("conservative", "native", backend, drawn), "native", backend)
        families = {step.case.family for step in steps}
        assert families == set(ALL_FAMILIES)
        assert min(judge([step for step in steps if step.case.family == name]).gain for name in families) >= 1.0
        assert judge(steps).behind <= 0.02 * len(steps)

    def test_steps_without_sharing_never_lose(self, measured: Results) -> None:
        steps = outcomes(measured.cases, candidate("shipped", "native", "fa3", measured), "native", "fa3")
        unshared = [step for step in steps if step.case.family == "none"]
        assert len(unshared) == 24
        assert judge(unshared).worst_loss[0] <= 0.02

    def test_the_shipped_profile_is_that_of_the_machine(self) -> None:
        """As docs/comparing-policies.md tells of an H100; another GPU has the H200's, and a note says so."""
        drawn = read_results(RESULTS_FOLDER / "gpu_drawn_h100.json")
        for policy in ("cost", "shipped"):
            verdict = self.verdict(drawn, policy, "fa3")
            assert (verdict.packed, verdict.behind) == (166, 0)
            assert verdict.regret == pytest.approx(0.0164, abs=1e-4)
            assert candidate(policy, "native", "fa3", drawn).notes == ()
        unknown = candidate("cost", "native", "fa3", replace(drawn, machine="NVIDIA L40S")).notes
        assert "no shipped profile is of NVIDIA L40S with packed native, stock fa3 and 16-bit KV" in unknown[0]
        assert "that of NVIDIA H200 decides" in unknown[0]

    def test_fp8_kv_has_a_profile_of_its_own(self) -> None:
        """flashinfer alone takes it. By 16-bit KV's profile a quarter of the time would be lost."""
        stock = Source.parse(f"{RESULTS_OF_FP8_KV}:flashinfer_tc,flashinfer_cc").read(kv_bytes=1)
        times = simulated_times(stock)
        fp8 = replace(stock, cases=[replace(case, packed={"native": times[case.key]}) for case in stock.cases])
        verdict = self.verdict(fp8, "shipped", "flashinfer")
        assert verdict.steps == 171
        assert verdict.regret < 0.02
        assert verdict.mean_regret < 0.03
        assert verdict.worst_loss[0] < 0.2
        other = profile_choice(shipped_profile(), "native", "flashinfer", 10)
        assert judge(outcomes(fp8.cases, Candidate("16 bits", other), "native", "flashinfer")).regret > 0.05

    @pytest.mark.parametrize("backend", ["fa3", "flashinfer"])
    @pytest.mark.parametrize(("file", "steps"), [("gpu_drawn.json", 211), ("gpu_drawn_857294969.json", 214)])
    def test_drawn_steps_that_were_not_fitted(self, file: str, steps: int, backend: str) -> None:
        drawn = read_results(RESULTS_FOLDER / file)
        assert drawn.kernels_version == KERNELS_VERSION
        verdict = self.verdict(drawn, "shipped", backend)
        assert verdict.steps == steps
        assert verdict.regret < 0.011
        assert verdict.mean_regret < 0.021
        assert verdict.behind == 0 < self.verdict(drawn, "packed", backend).behind
        conservative = self.verdict(drawn, "conservative", backend)
        assert conservative.worst_loss[0] <= 0.02
        assert verdict.mean_regret < conservative.mean_regret / 10

    @pytest.mark.parametrize(("backend", "gain"), [("fa3", 2.05), ("flashinfer", 2.03)])
    def test_drawn_steps_of_an_h100_that_were_not_fitted(self, backend: str, gain: float) -> None:
        drawn = read_results(RESULTS_FOLDER / "gpu_drawn_h100.json")
        choice = profile_choice(read_shipped("h100.json"), "native", backend, None)
        steps = outcomes(drawn.cases, Candidate("h100", choice), "native", backend)
        verdict = judge(steps)
        assert verdict.steps == 214
        assert verdict.gain > gain > 1.25 * self.verdict(drawn, "conservative", backend).gain
        assert verdict.regret < 0.02
        assert verdict.mean_regret < 0.016
        assert verdict.worst_loss[0] < 0.01

    @pytest.mark.parametrize(
        ("sources", "name"),
        [(SOURCES, "h200.json"), (SOURCES_OF_FP8_KV, "h200_fp8_kv.json"), (["gpu_drawn_h100_dev.json"], "h100.json")],
    )
    def test_a_shipped_profile_is_what_the_command_makes_of_the_results(self, sources, name, tmp_path):
        files = [str(RESULTS_FOLDER / source) for source in sources]
        out, shipped = tmp_path / "p.json", read_shipped(name)
        assert shipped.kernels_version == KERNELS_VERSION, "or servers say that they borrow it"
        assert fit_shipped(["--kv-bits", str(8 * shipped.kv_bytes), "--out", str(out), "--from", *files]) == 0
        made = load_profile(out)
        assert made.kv_bytes == shipped.kv_bytes
        assert made.head_dims == shipped.head_dims
        assert (made.commit, made.measured) == (shipped.commit, shipped.measured), "fit the shipped profile anew"
        assert made.margins.get("triton") == shipped.margins.get("triton")
        assert set(made.margins["native"]) == set(shipped.margins["native"]), "their times are the present planner's"
        for kind in ("packed", "stock"):
            for kernel, fitted in getattr(shipped, kind).items():
                again = getattr(made, kind)[kernel].us
                assert again == pytest.approx(fitted.us, rel=1e-3, abs=1e-6), (kind, kernel)


class TestSources:
    def test_a_step_has_the_times_of_all_files(self) -> None:
        both = gather([Source.parse(f"{RESULTS}:fa3"), Source.parse(f"{RESULTS}:native")], 2)
        assert len(both.cases) == 171
        assert {(*case.packed, *case.stock) for case in both.cases} == {("native", "fa3")}
        assert simulated_times(both) == {}, "all have a measured packed time"

    def test_batches_under_one_key_are_told_apart_by_their_features(self, tmp_path: Path) -> None:
        """`calibrate` cuts them to the GPU's memory, and gives them names of other batches."""
        data = json.loads((RESULTS_FOLDER / "gpu_drawn.json").read_text())
        row, *_ = data["rows"]
        sources = []
        for name, more in (("a", 0), ("b", 7), ("c", 7)):
            rows = [{**row, "step": {**row["step"], "longest_request": row["step"]["longest_request"] + more}}]
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps({**data, "rows": rows}))
            sources.append(Source.parse(f"{path}:{'native' if name == 'c' else 'fa3'}"))
        first, second = gather(sources, 2).cases
        assert (first.key, second.key) == (row["key"], f"{row['key']}#2")
        assert (list(first.packed), list(first.stock)) == ([], ["fa3"])
        assert (list(second.packed), list(second.stock)) == (["native"], ["fa3"])
        assert set(simulated_times(gather(sources[:2], 2))) == {row["key"]}

    def test_what_all_files_were_measured_with_is_kept(self, tmp_path: Path) -> None:
        """As of steps of `calibrate`; of files that differ there, nothing is known."""
        data = json.loads((RESULTS_FOLDER / "gpu_drawn.json").read_text())
        sources = []
        for page_size, heads in ((16, "32/8/128"), (16, "8/2/128")):
            about = {"page_size": page_size, "head_shapes": [heads], "dtype": "bf16"}
            path = tmp_path / f"{len(sources)}.json"
            path.write_text(json.dumps({**data, **about, "rows": data["rows"][:1]}))
            sources.append(Source.parse(str(path)))
        one, both = gather(sources[:1], 2), gather(sources, 2)
        assert (one.page_size, one.head_shapes, one.dtype) == (16, ("32/8/128",), "bf16")
        assert (both.page_size, both.head_shapes, both.dtype) == (16, (), "bf16")

    def test_verify_steps_have_no_influence_on_a_profile(self, tmp_path: Path, capsys: Any) -> None:
        """Not even files of another GPU. What `left-out` does in decode steps does not depend on them either."""
        names = ["gpu_drawn.json:native,fa3", "verify_4_1196418529.json:native", "verify_h100_8_1806084533.json"]
        out = tmp_path / "p.json"
        main(["calibrate", "--out", str(out), "--from", *(str(RESULTS_FOLDER / name) for name in names)])
        assert capsys.readouterr().err.count("not used, it has no decode steps with 16-bit KV") == 2
        decode = gather([Source.parse(str(RESULTS_FOLDER / names[0]))], 2)
        assert load_profile(out) == fit_profile(decode)
        verify = read_results(VERIFY_STEPS).cases
        beside = replace(decode, cases=[*decode.cases, *verify, replace(verify[0], shape=ModelShape(8, 8, 256))])
        assert fit_profile(beside) == fit_profile(decode)
        chosen = [candidate("left-out", "native", "fa3", results) for results in (decode, beside)]
        ours, theirs = (outcomes(decode.cases, one, "native", "fa3") for one in chosen)
        assert ours == theirs

    def test_a_kernel_that_was_not_fitted_is_not_judged(self, tmp_path: Path, capsys: Any) -> None:
        drawn, out = RESULTS_FOLDER / "gpu_drawn.json", str(tmp_path / "p.json")
        words = ["calibrate", "--out", out, "--from", f"{drawn}:native,fa3", "--check", str(drawn)]
        assert main(words) == 0
        told = capsys.readouterr().out
        assert f"{drawn}: packed native or stock fa3\n" in told
        assert f"{drawn}: packed native or stock flashinfer\n" not in told
        assert "not judged, the profile has no cost of it: flashinfer_cc, flashinfer_tc\n" in told

    def test_left_out_decides_verify_steps_by_the_rule(self) -> None:
        results = read_results(VERIFY_STEPS)
        left, shipped = (
            outcomes(results.cases, candidate(name, "native", "fa3", results), "native", "fa3")
            for name in ("left-out", "shipped")
        )
        assert left == shipped

    @pytest.mark.parametrize(
        ("sources", "message"),
        [
            ([":native"], "':native': expected FILE or FILE:KERNEL,KERNEL"),
            ([f"{RESULTS}:marlin"], r"no times of marlin with 16-bit KV; it has fa3, flashinfer_cc"),
            ([str(RESULTS_OF_FP8_KV)], "no decode step with 16-bit KV in"),
            ([str(VERIFY_STEPS)], "no decode step with 16-bit KV in"),
        ],
    )
    def test_mistakes_are_named(self, sources: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            gather([Source.parse(source) for source in sources], 2)


def test_the_kernel_of_flashinfer_depends_on_heads() -> None:
    assert stock_kernel("flashinfer", SHAPE) == "flashinfer_tc"
    assert stock_kernel("flashinfer", ModelShape(16, 8, 128)) == "flashinfer_cc"
    assert stock_kernel("flashinfer", ModelShape(16, 8, 128, kv_bytes=1)) == "flashinfer_tc", "fp8 KV needs them"
    assert stock_kernel("flashinfer", SHAPE, tensor_cores=False) == "flashinfer_cc"
    assert stock_kernel("fa3", SHAPE) == "fa3"


class TestResultsFile:
    ROW: ClassVar = {
        "key": "x/1@32/8", "case": "x/1", "q_heads": 32, "kv_heads": 8,
        "baselines": {"prefixpack": {"cold_us": 20.0}, "fa3": {"cold_us": 10.0}, "triton": {"failed": "why"}},
    }  # fmt: skip
    STEP: ClassVar = {
        "requests": 1, "tokens": 10, "unique_tokens": 10, "linked_tokens": 0, "nodes": 0, "links": 0,
        "longest_range": 10, "longest_request": 10,
    }  # fmt: skip

    def write(self, folder: Path, row: dict[str, Any]) -> Path:
        path = folder / "r.json"
        machine = {"gpu": "NVIDIA Test", "date": "today"}
        path.write_text(json.dumps({"machine": machine, "commit": "abc", "rows": [row]}), encoding="utf-8")
        return path

    def test_a_row_says_what_its_step_looks_like(self, tmp_path: Path) -> None:
        results = read_results(self.write(tmp_path, self.ROW | {"step": self.STEP}))
        (case,) = results.cases
        assert case.step.longest_range == 10
        assert (dict(case.packed), dict(case.stock)) == ({"native": 20.0}, {"fa3": 10.0})
        assert (results.machine, results.commit) == ("NVIDIA Test", "abc")

    def test_a_row_that_does_not_say_what_its_step_looks_like(self, tmp_path: Path) -> None:
        with pytest.raises(ResultsError, match=r"row .* has no features of its step: measure again"):
            read_results(self.write(tmp_path, self.ROW))

    def test_too_few_cases_are_said_to_be(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"r\.json has too few measured cases to fit any packed kernel"):
            fit_profile(read_results(self.write(tmp_path, self.ROW | {"step": self.STEP})))

    @pytest.mark.parametrize("text", ["{}", "[]", '{"machine": {}, "rows": []}'])
    def test_another_file(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "r.json").write_text(text, encoding="utf-8")
        with pytest.raises(ResultsError, match="not a results file"):
            read_results(tmp_path / "r.json")
