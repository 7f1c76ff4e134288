"""Unit tests for AttentionBackend.prepare_schedule_batch -- no server, no model loading.

The TP worker shows each ScheduleBatch to the attention backend once, right
before it builds the ForwardBatch. The fake runner below initialises metadata
as ModelRunner does, and the fake backend records which batch it then knows.
"""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()  # must precede any import that pulls in sgl_kernel

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.managers import tp_worker
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardMode

register_cpu_ci(est_time=11, suite="base-a-test-cpu")

NOT_ANNOUNCED = None


class RecordingBackend(AttentionBackend):
    """Keeps the announced batch until the next metadata, as the contract asks."""

    def __init__(self):
        self.announced = NOT_ANNOUNCED
        self.planned = []  # (announced batch, forward batch), by forward

    def prepare_schedule_batch(self, batch):
        assert self.announced is NOT_ANNOUNCED, "announced twice for one forward"
        self.announced = batch

    def init_forward_metadata(self, forward_batch):
        self.planned.append((self.announced, forward_batch))
        self.announced = NOT_ANNOUNCED


class FakeForwardBatch(SimpleNamespace):
    """What the forward methods read. known: the announced batch when it was built."""

    def apply_deprecated_skip_attn_backend_init(self, skip):
        pass


class FakeRunner:
    """A model runner that only initialises metadata."""

    def __init__(self, attn_backend, decode_attn_backend=None):
        self.attn_backend = attn_backend
        self.decode_attn_backend = decode_attn_backend

    def forward(self, forward_batch, pp_proxy_tensors=None, split_forward_count=None):
        if not forward_batch.planned:
            backend = self.decode_attn_backend or self.attn_backend
            if backend is not None:
                backend.init_forward_metadata(forward_batch)
            forward_batch.planned = True
        return SimpleNamespace(
            logits_output=None, can_run_graph=False, expert_distribution_metrics=None
        )

    def _elastic_cuda_graph_enabled(self):
        return False


def make_worker(runner):
    """The real worker's forward methods over a fake runner, as a rank that passes hidden states on."""
    worker = TpModelWorker.__new__(TpModelWorker)
    worker.pp_group = SimpleNamespace(is_last_rank=False)
    worker.dllm_algorithm = None
    worker.set_hicache_consumer = lambda index: None
    worker.__dict__["_model_runner"] = runner
    return worker


def make_batch(mode):
    return SimpleNamespace(
        forward_mode=mode,
        hicache_consumer_index=0,
        split_index=0,
        split_forward_count=1,
        split_forward_batch=None,
    )


class TestWorkerAnnouncesBatches(CustomTestCase):
    def setUp(self):
        self.backend = RecordingBackend()
        self.runner = FakeRunner(self.backend)
        self.worker = make_worker(self.runner)
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        for patcher in (
            patch.object(tp_worker.ForwardBatch, "init_new", self.init_new),
            patch.object(
                tp_worker, "get_exec", lambda: SimpleNamespace(features=features)
            ),
        ):
            patcher.start()
            self.addCleanup(patcher.stop)

    def init_new(self, batch, runner, **kwargs):
        known = getattr(runner.attn_backend, "announced", NOT_ANNOUNCED)
        return FakeForwardBatch(batch=batch, known=known, planned=False)

    def assert_planned(self, backend, batches):
        """Each forward of the backend knew its own batch, before its ForwardBatch was built."""
        self.assertEqual([batch for batch, _ in backend.planned], batches)
        for batch, forward_batch in backend.planned:
            if batch is not NOT_ANNOUNCED:
                self.assertIs(forward_batch.batch, batch)
        self.assertIs(backend.announced, NOT_ANNOUNCED)

    def test_every_forward_knows_its_own_batch(self):
        batches = [
            make_batch(mode)
            for mode in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DECODE)
        ]
        for batch in batches:
            self.worker.forward_batch_generation(batch)
        embedding = make_batch(ForwardMode.EXTEND)
        self.worker.forward_batch_embedding(embedding)
        self.assert_planned(self.backend, [*batches, embedding])
        for batch, forward_batch in self.backend.planned:
            self.assertIs(forward_batch.known, batch)

    def test_split_prefill_announces_its_first_part_only(self):
        batch = make_batch(ForwardMode.SPLIT_PREFILL)
        for part in range(3):
            batch.split_index = part
            self.worker.forward_batch_split_prefill(batch)
        self.assert_planned(self.backend, [batch])

    def test_a_prepared_forward_batch_is_not_announced(self):
        prepared = FakeForwardBatch(batch=None, known=None, planned=False)
        self.worker.forward_batch_generation(None, prepared, is_verify=True)
        self.assert_planned(self.backend, [NOT_ANNOUNCED])

    def test_pd_multiplexing_announces_decodes_to_the_stream_groups_backend(self):
        self.runner.decode_attn_backend = group = RecordingBackend()
        decode = make_batch(ForwardMode.DECODE)
        self.worker.forward_batch_generation(decode)
        self.assert_planned(group, [decode])
        self.assert_planned(self.backend, [])

    def test_a_runner_without_an_attention_backend(self):
        self.runner.attn_backend = None
        result = self.worker.forward_batch_generation(make_batch(ForwardMode.DECODE))
        self.assertFalse(result.can_run_cuda_graph)

    def test_the_default_is_a_no_op(self):
        self.runner.attn_backend = backend = AttentionBackend()
        before = dict(vars(backend))
        backend.prepare_schedule_batch(make_batch(ForwardMode.DECODE))
        self.assertEqual(vars(backend), before)


class TestWrappersPassTheBatchOn(CustomTestCase):
    def test_hybrid_backend_chooses_by_the_mode_of_the_forward(self):
        for spec_attn_is_decode in (False, True):
            hybrid = HybridAttnBackend.__new__(HybridAttnBackend)
            hybrid.spec_attn_is_decode = spec_attn_is_decode
            for mode in (
                ForwardMode.DECODE,
                ForwardMode.IDLE,
                ForwardMode.EXTEND,
                ForwardMode.MIXED,
                ForwardMode.TARGET_VERIFY,
            ):
                hybrid.prefill_backend = RecordingBackend()
                hybrid.decode_backend = RecordingBackend()
                batch = make_batch(mode)
                hybrid.prepare_schedule_batch(batch)
                hybrid.init_forward_metadata(SimpleNamespace(forward_mode=mode))
                planned = hybrid.prefill_backend.planned + hybrid.decode_backend.planned
                self.assertEqual([known for known, _ in planned], [batch])

    def test_two_batch_overlap_announces_the_whole_batch_to_the_primary(self):
        overlap = TboAttnBackend.__new__(TboAttnBackend)
        overlap.primary = RecordingBackend()
        overlap.children = [RecordingBackend(), RecordingBackend()]
        batch = make_batch(ForwardMode.DECODE)
        overlap.prepare_schedule_batch(batch)
        self.assertIs(overlap.primary.announced, batch)
        for child in overlap.children:
            self.assertIs(child.announced, NOT_ANNOUNCED)


if __name__ == "__main__":
    unittest.main()
