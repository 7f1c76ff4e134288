"""What one tenant's requests do to the cached tokens of another, with retention: real radix trees and requests."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("sglang")

from sgl_prefix_attn.offline.queue_order import CUSTOM_PARAMETER, Place, SharedPrefix
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.pinning.state import PinningSettings
from tests.pinning.small_server import SmallServer, prompt
from tests.support.caches import CACHES

SYSTEM = prompt(1, 40)
HOSTILE_USES = (1, 2, 3000, (1 << 31) - 1)


@pytest.fixture(params=CACHES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def server_of(kind: str, *, jobs: bool, slots: int = 200) -> SmallServer:
    settings = PinningSettings.of(Settings(retention="reuse", retention_block=4, group_scheduling=jobs))
    return SmallServer(kind, slots=slots, settings=settings)


def place(tokens: list[int], uses: int, job: str = "hostile") -> Place:
    return Place(job, 0, 0, 1, (SharedPrefix(0, 0, len(tokens), uses),))


@pytest.mark.parametrize("seed", range(3))
def test_by_default_a_place_in_a_request_changes_no_cached_token(kind: str, seed: int) -> None:
    """The victim's cached tokens with and without the hostile parameter are equal, request by request."""

    def run(hostile: bool) -> list[int]:
        dice, server = random.Random(seed), server_of(kind, jobs=False)
        cached = []
        for number in range(60):
            mine = dice.random() < 0.4
            tokens = [*SYSTEM, 9000 + number] if mine else prompt(dice.randint(1, 8), dice.choice([40, 60, 90]))
            uses = dice.choice(HOSTILE_USES)
            cached.append(server.serve(tokens, place=place(tokens, uses) if hostile and not mine else None))
        assert server.manager.counters.failures == 0
        return cached

    assert run(hostile=True) == run(hostile=False)


@pytest.mark.parametrize("uses", HOSTILE_USES)
def test_where_jobs_are_asked_for_a_place_does_not_take_what_others_earned(kind: str, uses: int) -> None:
    def run(hostile: bool) -> list[int]:
        server = server_of(kind, jobs=True)
        cached = []
        for number in range(12):
            cached.append(server.serve([*SYSTEM, 9000 + number]))
            server.serve([*SYSTEM, 8000 + number], place=place(SYSTEM, uses, str(number)) if hostile else None)
            server.serve(prompt(100 + number, 60))
        assert server.manager.counters.failures == 0
        return cached

    assert all(with_it >= without for with_it, without in zip(run(True), run(False), strict=True))
    assert run(True)[1:] == [len(SYSTEM)] * 11


def test_announced_prefixes_stay_within_half_of_the_pool_and_a_flush_ends_them(kind: str) -> None:
    server = server_of(kind, jobs=True, slots=400)
    scores = server.manager.retention.scores
    for number in range(1, 9):
        tokens = prompt(number, 60)
        server.serve(tokens, place=place(tokens, HOSTILE_USES[-1], str(number)))
    assert len(scores._announced) * 4 <= 200
    assert server.flush()
    assert (len(scores._announced), len(server.manager.retention.offline)) == (0, 0)
    assert server.manager.counters.failures == 0


def test_the_parameter_is_the_one_that_sglang_passes_on() -> None:
    server = server_of(CACHES[0], jobs=True)
    request = server.send(SYSTEM, 1)
    request.sampling_params.custom_params = {CUSTOM_PARAMETER: place(SYSTEM, 5).encode()}
    server.run()
    assert [shared.uses for shared in server.manager.retention.offline.of(request)] == [5]
