"""Carries the paths of a step from the scheduler's batch to the attention backend.

`ForwardBatch.init_new` is the last place that sees batch and requests together. What a hook attaches there to
the ForwardBatch reaches `ModelRunner.forward`, but not the backend, because runners build other batch objects from it.
So a hook on `ModelRunner.forward` makes it the current step while that runs.

An error in here is counted, and the step uses the stock backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.one_token import OneTokenSteps
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason

_ATTRIBUTE = "_prefixpack_handed"


class Handed(NamedTuple):
    """What is handed over for one forward.

    Attributes:
        paths: what the requests share, or why that is not known.
        rows: [num_requests] int64, the batch's req_pool_indices, which identify the batch.
        seq_lens: [num_requests] int64 on the host, the batch's seq_lens_cpu; SGLang makes a new tensor for each step.
        bounds: whether SGLang keeps no lengths in host memory, and `seq_lens` are upper bounds of a verify batch.
    """

    paths: StepPaths | Reason
    rows: Any = None
    seq_lens: Any = None
    bounds: bool = False


NOTHING = Handed(fallback_reasons.NO_PATHS)


class Handover:
    """Hand-over from batch to backend in one scheduler process."""

    def __init__(self, tracker: BatchTracker, counters: Counters) -> None:
        self._tracker = tracker
        self._counters = counters
        self._current: Handed | None = None
        self._one_token: OneTokenSteps | None = None

    @property
    def runs_one_token_steps(self) -> bool:
        """Whether one-token steps run as decode steps."""
        return self._one_token is not None

    def run_one_token_steps(self) -> None:
        """From now on, prefill and mixed steps with one token a request run as decode steps where possible."""
        self._one_token = OneTokenSteps(self._counters)
        self._tracker.runs_as_decode = self._one_token.applies

    def one_token_step(self, batch: Any, forward_batch: Any) -> None:
        """Makes a decode step of a batch's ForwardBatch if it is a one-token step.

        Raises:
            MemoryError: of this rank alone, where the others may replay a graph.
        """
        if self._one_token is None:
            return
        start = time.perf_counter()
        try:
            if self._one_token.applies(batch):
                self._one_token.convert(batch, forward_batch)
        except Exception as error:  # the step stays a prefill
            self._counters.failures.failed("one_token_steps", error, "the step runs as a prefill")
        self._counters.host_seconds += time.perf_counter() - start

    def read_packable_only(self, why_stock: Callable[[Mode], Reason | None]) -> None:
        """From now on, reads no paths for the kinds of steps for which `why_stock` returns a reason."""
        self._tracker.why_stock = why_stock
        self._tracker.refuses_drafts = why_stock("verify") is not None

    def read(self, batch: Any) -> Handed:
        """Reads a batch's paths.

        Raises:
            MemoryError: of this rank alone, where the others may replay another graph (`StepPlanner.failed`).
        """
        start = time.perf_counter()
        try:
            paths = self._tracker.step(batch)
            handed = Handed(paths, batch.req_pool_indices, batch.seq_lens_cpu)
            if batch.seq_lens_cpu is None and not isinstance(paths, Reason) and paths.query_lens is not None:
                # The verify step before may still run, and commit as many tokens as this one at most.
                lens = versions.committed_lens(batch.reqs) + paths.query_lens
                handed = handed._replace(seq_lens=torch.from_numpy(lens), bounds=True)
        except Exception as error:  # the step uses the stock backend
            if isinstance(error, MemoryError) and not self._counters.may_stop:
                raise
            self._counters.step_failed("request_paths", error)
            self._tracker.forget()  # it may have been broken off anywhere
            handed = Handed(fallback_reasons.HOOK_FAILED)
        self._counters.host_seconds += time.perf_counter() - start
        return handed

    def take(self, forward_batch: Any) -> Handed:
        """What was handed over for the forward that is being prepared, else NOTHING.

        Some of SGLang's speculative workers prepare the backend before they call `ModelRunner.forward`, with the
        ForwardBatch that has the paths.
        """
        handed = self._current
        if handed is None:
            handed = getattr(forward_batch, _ATTRIBUTE, None)
        return NOTHING if handed is None else handed

    @contextmanager
    def handed_over(self, handed: Handed | None) -> Iterator[None]:
        """Makes `handed` the current step inside the context."""
        before = self._current
        self._current = handed
        try:
            yield
        finally:
            self._current = before


class HandoverHooks:
    """Hook bodies that hand over the paths of this process's steps. SGLang has them before a backend exists.

    Attributes:
        active: what the hooks work for; None where no prefixpack backend exists: then they do nothing.
    """

    def __init__(self) -> None:
        self.active: Handover | None = None

    def after_forward_batch_init(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on the classmethod `ForwardBatch.init_new`. Arguments by name would cost refused servers time."""
        if self.active is not None:
            self._read_batch(self.active, result, *args, **kwargs)

    def _read_batch(
        self, active: Handover, result: Any, cls: type, batch: Any, model_runner: Any, *args: Any, **kwargs: Any
    ) -> None:
        if model_runner.is_draft_worker:
            return
        active.one_token_step(batch, result)
        setattr(result, _ATTRIBUTE, active.read(batch))

    def around_forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """AROUND hook on `ModelRunner.forward` and `DecodeCudaGraphRunner.load_batch`."""
        if self.active is None:
            return original(*args, **kwargs)
        forward_batch = args[1] if len(args) > 1 else kwargs.get("forward_batch")
        handed = getattr(forward_batch, _ATTRIBUTE, None)
        if handed is None:
            return original(*args, **kwargs)
        with self.active.handed_over(handed):
            return original(*args, **kwargs)
