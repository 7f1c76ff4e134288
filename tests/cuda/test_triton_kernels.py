"""The Triton kernels against dense attention: on a GPU, or in Triton's interpreter (see test_triton_interpreter.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.core.step_buffers import StepLimits
from sgl_prefix_attn.core.step_pool import StepPool
from tests.cuda.cases import Case, Result, check, decode_batch, make_case, same
from tests.cuda.on_device import OnDevice

triton_step = pytest.importorskip("sgl_prefix_attn.core.triton_step")

INTERPRETED = triton_step.INTERPRETED
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1 and patience"),
]
# numpy, in the interpreter, warns of what the kernels rely on: log2(0) = -inf, 2^1000 = inf.
IN_INTERPRETER = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
pytestmark = IN_INTERPRETER if INTERPRETED else ON_GPU
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)

E4M3 = torch.float8_e4m3fn
GROWTH = 8
LIMITS = (
    StepLimits(queries=512, items=512, kv_slots=1 << 14, partials=512)
    if INTERPRETED
    else StepLimits(queries=8192, items=16384, kv_slots=1 << 20, partials=32768)
)


def runner_of(case: Case, limits: StepLimits = LIMITS) -> OnDevice:
    return OnDevice(case, triton_step.TritonStep, DEVICE, limits, GROWTH)


def run(case: Case, **options: Any) -> Result:
    return runner_of(case, **options).run()


HEADS = ((2, 2), (4, 2), (8, 2), (5, 1), (7, 1), (16, 1), (20, 1), (64, 2))


@pytest.mark.parametrize(
    "options",
    [
        *({"heads": heads, "num_sms": 4} for heads in HEADS),
        *({"head_dim": head_dim, "tokens": 60} for head_dim in (16, 32, 64, 80, 96, 128, 192, 256)),
        *({"head_dim": head_dim, "tokens": 60, "dtype": torch.float16} for head_dim in (48, 128)),
        *({"logit_cap": cap, "max_new_tokens": 3} for cap in (0.01, 3.0, 50.0)),
        *({"grown": grown} for grown in (1, GROWTH)),  # the plan was made for shorter tails
        # It was made for longer ones, by bounds: behind the last token is NaN, and splits begin there.
        *(
            {"batch": decode_batch([385, 388, 425], new=4), "heads": (8, 1), "num_sms": 132, "grown": grown}
            for grown in (-4, -140)
        ),
    ],
    ids=str,
)
def test_groups_head_sizes_types_caps_and_growth(options: dict[str, Any]) -> None:
    case = make_case(3, requests=5, **options)
    check(case, run(case))


def test_float32_is_as_exact_as_float32() -> None:
    case = make_case(3, head_dim=64, dtype=torch.float32, requests=4, num_sms=8)
    out, lse = run(case)
    torch.testing.assert_close(out.double().cpu(), case.expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double().cpu(), case.expected[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(4 if INTERPRETED else 8))
def test_random_ragged_forests(seed: int) -> None:
    """Decode, extend rows and both in one batch; on a GPU larger ones."""
    rng = np.random.default_rng(seed)
    size: dict[str, Any] = (
        {"heads": (4, 1), "requests": 8, "levels": 4, "tokens": 40, "max_new_tokens": [1, 30][seed % 2],
         "num_sms": 3}
        if INTERPRETED
        else {"heads": (32, 8), "head_dim": 128, "requests": int(rng.integers(1, 257)),
              "levels": int(rng.integers(1, 9)), "tokens": int(rng.choice([20, 200, 600])),
              "max_new_tokens": int(rng.choice([1, 5, 200])), "num_sms": 132}
    )  # fmt: skip
    case = make_case(seed, **size)
    check(case, run(case, limits=LIMITS if INTERPRETED else StepLimits(1 << 17, 1 << 17, 1 << 24, 1 << 16)))


@pytest.mark.parametrize("queries", [3, 4, 5, 16, 17, 33])
def test_every_number_of_passes(queries: int) -> None:
    """`queries` requests of group 4 share one node: 12 rows and up, in a plan for tiles wider than the kernel's."""
    case = make_case(queries, heads=(4, 1), batch=decode_batch(600 + np.arange(1, queries + 1), 600))
    assert (case.plan.items[:, 1] * 4 > triton_step.MAX_TILE_ROWS).any() == (queries > 16)
    check(case, run(case))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 700])
def test_lengths_around_the_kv_tile(length: int) -> None:
    case = make_case(length, heads=(4, 1), batch=decode_batch([length, 1]))
    check(case, run(case))


def test_partials_of_one_query_are_combined() -> None:
    """A long request cut into many parts."""
    case = make_case(1, heads=(5, 1), head_dim=256, batch=decode_batch([40, 4000]), num_sms=4)
    assert np.diff(case.plan.combine_offset).tolist() == [case.plan.num_partials]
    assert case.plan.num_partials > 2
    check(case, run(case))


@pytest.mark.parametrize("window", [0, 1, 7, 64, 100])
def test_sliding_window_reads_nothing_outside(window: int) -> None:
    case = make_case(window, window_left=window, max_new_tokens=20, levels=0, requests=4)
    seen = []
    new_tokens = np.bincount(case.plan.query_request, minlength=4)
    for request, new in enumerate(new_tokens.tolist()):
        slots = case.pool.slots_of(request)
        seen.append(slots[max(0, len(slots) - new - window) :])
    assert case.expected[0].isfinite().all()  # made of the pool as it is now
    case.pool.poison_all_but(torch.cat(seen))
    check(case, run(case))


@pytest.mark.parametrize("level", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("combined", [False, True], ids=["written through", "combined"])
def test_sinks_count_once(combined: bool, level: float) -> None:
    """A sink far above all scores takes all the weight; one far below takes none."""
    batch = decode_batch(600 + np.arange(1, 18), 600) if combined else decode_batch([41, 42, 43])
    case = make_case(2, heads=(4, 1), with_sinks=True, sink_offset=level, batch=batch)
    assert (case.plan.num_partials > 0) == combined
    check(case, run(case))


def test_rows_that_no_query_names_are_left_alone() -> None:
    runner = runner_of(make_case(4))
    runner.q = torch.cat([runner.q, torch.ones_like(runner.q[:3])])
    runner.out = torch.full_like(runner.q, 7.0)
    runner.lse = torch.full(runner.q.shape[:2], 7.0, device=DEVICE)
    runner.prepare()
    runner.attend()
    check(runner.case, (runner.out[:-3], runner.lse[:-3]))
    assert (runner.out[-3:] == 7.0).all()
    assert (runner.lse[-3:] == 7.0).all()


def test_nan_in_the_cache_reaches_the_output() -> None:
    case = make_case(5, batch=decode_batch([40]))
    case.pool.k_cache[case.pool.slots_of(0)[17]] = torch.nan
    out, _ = run(case)
    assert out.isnan().all()


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_cache_with_scales(dtype: torch.dtype, head_dim: int) -> None:
    case = make_case(3, dtype=dtype, kv_dtype=E4M3, head_dim=head_dim, v_scale=2.5, num_sms=8)
    assert 0 < len(case.plan.combine_query) < case.plan.num_queries, "some results are combined, and scaled once"
    check(case, run(case))


def test_all_256_numbers_of_fp8_are_read_exactly() -> None:
    """One KV position: its value is the output, and a query that is zero but for one dimension has the key as score."""
    case = make_case(0, heads=(256, 1), head_dim=256, dtype=torch.float32, kv_dtype=E4M3, batch=decode_batch([1]))
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = numbers.nan_to_num(0.0)
    slot = int(case.pool.slots_of(0))
    case.q, case.variant["scale"] = torch.eye(256)[None], 1.0
    case.pool.k_cache[slot], case.pool.v_cache[slot] = finite.to(E4M3), numbers.to(E4M3)
    assert torch.equal(case.pool.v_cache[slot].view(torch.uint8)[0], torch.arange(256, dtype=torch.uint8))
    out, lse = run(case)
    torch.testing.assert_close(out.cpu(), numbers.expand(1, 256, 256), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), finite[None], rtol=1e-6, atol=1e-6)


def test_the_same_bits_whoever_takes_what_from_the_queue() -> None:
    size: dict[str, Any] = {} if INTERPRETED else {"heads": (32, 8), "head_dim": 128, "requests": 200, "tokens": 400}
    runner = runner_of(make_case(9, num_sms=8, **size))
    first = runner.run()
    runner.step.blocks = 1 if INTERPRETED else runner.step.blocks // 3
    assert same(runner.run(), first)
    assert runner.step._tile_counter.tolist() == [0]


def test_a_pool_makes_its_buffers_as_plans_need_them() -> None:
    pool = StepPool()
    made = []
    for requests in (2, 16, 16, 2):
        case = make_case(requests, heads=(2, 1), requests=requests, tokens=30)
        runner = runner_of(case)
        pool.run(
            runner.q, runner.k_cache, runner.v_cache, runner.out, case.plan, req_to_token=runner.req_to_token,
            req_pool_indices=runner.rows, seq_lens=runner.seq_lens, lse=runner.lse, **runner.variant,
        )  # fmt: skip
        check(case, (runner.out, runner.lse))
        made.append(next(iter(pool._steps.values()))[1])
    assert made[0] is not made[1]
    assert made[1] is made[2] is made[3]


def test_indices_that_lead_outside_are_named() -> None:
    case = make_case(8)
    runner, lens = runner_of(case), case.pool.seq_lens

    def call(**changes: Any) -> None:
        arguments: dict[str, Any] = {
            "q": runner.q, "req_to_token": runner.req_to_token, "req_pool_indices": runner.rows,
            "seq_lens": runner.seq_lens, **changes,
        }  # fmt: skip
        StepPool().run(
            arguments.pop("q"), runner.k_cache, runner.v_cache, runner.out, case.plan, **arguments, **runner.variant
        )

    rows = len(case.pool.req_to_token)
    with pytest.raises(ValueError, match=f"request 0: req_pool_indices is {rows}, .* below {rows}"):
        call(req_pool_indices=torch.full_like(runner.rows, rows))
    with pytest.raises(ValueError, match="request 0: seq_lens is"):
        call(seq_lens=(lens + 1000).to(DEVICE))
    with pytest.raises(ValueError, match="position is -1"):
        call(seq_lens=torch.zeros_like(runner.seq_lens))
    with pytest.raises(ValueError, match=r"query \d+: row of q is"):
        call(q=runner.q[:-1])


def test_unsupported_shapes_and_types_are_named() -> None:
    step = triton_step.TritonStep
    with pytest.raises(ValueError, match="head_dim is 320"):
        step(ModelShape(4, 1, 320), torch.float16, DEVICE, LIMITS)
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2 KV heads"):
        step(ModelShape(5, 2, 64), torch.float16, DEVICE, LIMITS)
    with pytest.raises(ValueError, match=r"dtype is torch\.float64"):
        step(ModelShape(4, 1, 64), torch.float64, DEVICE, LIMITS)
    with pytest.raises(ValueError, match=r"dtype is torch\.float8_e4m3fn; the Triton kernels support bfloat16"):
        step(ModelShape(4, 1, 64), E4M3, DEVICE, LIMITS)
    with pytest.raises(ValueError, match=r"kv_dtype is torch\.float8_e5m2; .* torch\.float8_e4m3fn"):
        step(ModelShape(4, 1, 64), torch.float16, DEVICE, LIMITS, torch.float8_e5m2)
    with pytest.raises(ValueError, match="device is meta; the Triton kernels run on a GPU"):
        step(ModelShape(4, 1, 64), torch.float16, torch.device("meta"), LIMITS)


def test_bad_tensors_are_named() -> None:
    runner = runner_of(make_case(7))
    with pytest.raises(ValueError, match=r"seq_lens must be a contiguous torch\.int64"):
        runner.step.prepare(runner.req_to_token, runner.rows, runner.seq_lens.int())
    runner.prepare()
    with pytest.raises(ValueError, match=r"q is torch\.float32"):
        runner.step.attend(runner.q.float(), runner.k_cache, runner.v_cache, runner.out, **runner.variant)
    with pytest.raises(ValueError, match=r"v_cache is torch\.float16"):
        runner.step.attend(runner.q, runner.k_cache, runner.v_cache.half(), runner.out, **runner.variant)
    spread = torch.zeros(*runner.v_cache.shape[:2], 128, dtype=torch.bfloat16, device=DEVICE)[..., ::2]
    with pytest.raises(ValueError, match="v_cache has strides"):
        runner.step.attend(runner.q, runner.k_cache, spread, runner.out, **runner.variant)
