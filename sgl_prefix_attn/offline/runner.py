"""Runs a batch file: reads it, plans, feeds engines, keeps the journal, writes the output."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from sgl_prefix_attn.offline.answers import failure, success
from sgl_prefix_attn.offline.batch_file import BatchRequest, LineError, read_batch
from sgl_prefix_attn.offline.engines import EngineArguments, EngineMain, EnginePool, Engines, Outcome, StartEngines
from sgl_prefix_attn.offline.job_plan import JobPlan, Work
from sgl_prefix_attn.offline.journal import Finished, Journal, check_writable, write_lines
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.prompts import Int32Array, PromptsBuilder

_POLL_SECONDS = 0.5


def journal_of(output: Path) -> Path:
    """Path of the journal of a run with this output."""
    return output.with_name(output.name + ".journal")


@dataclass(frozen=True)
class BatchOptions:
    """A batch run.

    Attributes:
        source: the batch file.
        output: file of results, one line a request that succeeded.
        errors: file of requests that failed; none is left if all succeeded.
        model: name for the output and the tokenizer.
        engines: arguments of each engine.
        ordered: output in the order of the input, else as requests finish.
        window: requests an engine has at once. More let it fill its batch, fewer let estimates of output lengths
            come in time to order the rest.
        grouped: False leaves order and admission to SGLang (for comparison).
        overwrite: a new job may replace an existing output and errors file.
        job: what the runs of a job have in common besides the batch file and the model's name (see `Journal`).
        restart: discards what earlier runs have finished.
    """

    source: Path
    output: Path
    errors: Path
    model: str
    engines: tuple[EngineArguments, ...]
    ordered: bool = False
    window: int = 512
    grouped: bool = True
    overwrite: bool = False
    job: Mapping[str, str] = field(default_factory=dict)
    restart: bool = False

    @property
    def journal(self) -> Path:
        return journal_of(self.output)


@dataclass
class BatchSummary:
    """What a run did. Tokens and seconds are of this run, requests of the whole job.

    SGLang runs the prompt of several samples once before them, and then reports it as cached. So three of the figures
    are of requests with one sample only.

    Attributes:
        requests: in the batch file.
        failed: requests in the errors file.
        resumed: requests that an earlier run had finished.
        prompt_tokens: of all prompts.
        single_tokens: of prompts of requests with one sample.
        cached_tokens: of these, tokens that SGLang took from its cache.
        output_tokens: of all answers.
        shared_tokens: of the same, tokens that an earlier prompt begins with too.
        seconds: first request to last answer.
    """

    requests: int = 0
    failed: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    single_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    shared_tokens: int = 0
    seconds: float = 0.0

    @property
    def saving(self) -> float:
        """Share of prompt tokens that was not computed (equation 2)."""
        return self.cached_tokens / max(1, self.single_tokens)

    @property
    def possible_saving(self) -> float:
        """The same if every shared token had been computed once."""
        return self.shared_tokens / max(1, self.single_tokens)


@dataclass
class _Lines:
    usable: list[BatchRequest] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)


def run_batch(
    options: BatchOptions,
    main: EngineMain,
    encode: Callable[[BatchRequest], list[int] | LineError],
    progress: Progress | None = None,
    start: StartEngines = EnginePool,
) -> BatchSummary:
    """Runs what is left of a batch, writes output and errors, and removes the journal.

    Args:
        main: what an engine process runs (see `EnginePool`).
        encode: turns a request into token ids.
        start: starts the engines.

    Raises:
        OSError: a file cannot be read or written, or exists and is not this job's.
        JournalError: the journal cannot be used.
        EngineError: an engine ended; what had finished is in the journal.
    """
    progress = progress or Progress(enabled=False)
    # The files may be those of a run that ended since the arguments were checked.
    kept = () if options.overwrite else (options.output, options.errors)
    journal = Journal(
        options.journal, options.source, options.model, options.errors, kept, options.job, anew=options.restart
    )
    try:
        _check_writable(options, journal)
        lines = _read(options.source)
        summary = BatchSummary(requests=len(lines.usable) + len(lines.errors), resumed=len(journal.finished))
        remaining = [request for request in lines.usable if request.line not in journal.finished]
        # An earlier version may have run what this one refuses: a result stays one.
        lines.errors = [error for error in lines.errors if error.line not in journal.finished]
        if remaining:
            with start(main, options.engines) as pool, progress:
                work = _prepare(remaining, encode, pool, lines.errors, progress)
                _run(
                    JobPlan(work, len(pool), secrets.token_hex(16), grouped=options.grouped),
                    pool,
                    options,
                    journal,
                    progress,
                    summary,
                )
        summary.failed = _write(options, journal, lines)
        journal.remove()
    finally:
        journal.close()
    return summary


def _check_writable(options: BatchOptions, journal: Journal) -> None:
    """Raises OSError if output and errors could not be written once all has run."""
    try:
        for path in (options.output, options.errors):
            check_writable(path)
    except OSError:
        if not journal.finished:
            journal.remove()
        raise


def _read(source: Path) -> _Lines:
    lines = _Lines()
    for entry in read_batch(source):
        if isinstance(entry, LineError):
            lines.errors.append(entry)
        else:
            lines.usable.append(entry)
    return lines


def _prepare(
    requests: Sequence[BatchRequest],
    encode: Callable[[BatchRequest], list[int] | LineError],
    pool: Engines,
    errors: list[LineError],
    progress: Progress,
) -> Work:
    """Encodes prompts while the engines load, then leaves out those that do not fit them."""
    builder, encoded = PromptsBuilder(), []
    for request in progress.over(requests, "reading prompts"):
        tokens = encode(request)
        if isinstance(tokens, LineError):
            errors.append(tokens)
        else:
            builder.append(tokens)
            encoded.append(request)
    progress.say("loading the model")
    engines = pool.wait_ready()
    room = min(ready.room for ready in engines)
    vocab_size = min((ready.vocab_size for ready in engines if ready.vocab_size is not None), default=None)
    prompts = builder.finish()
    kept, limits, fitting = [], array("q"), PromptsBuilder()
    for number, request in enumerate(encoded):
        length = int(prompts.offsets[number + 1] - prompts.offsets[number])
        limit = room - length if request.body.limit is None else request.body.limit
        if length + max(1, limit) > room:
            errors.append(_too_long(request, length, room))
            continue
        # SGLang checks none of them: the engine would die of the first.
        if vocab_size is not None and (foreign := _foreign_token(request, prompts[number], vocab_size)) is not None:
            errors.append(foreign)
            continue
        kept.append(request)
        limits.append(limit)
    if len(kept) < len(encoded):
        lines = {request.line for request in kept}
        for number, request in enumerate(encoded):
            if request.line in lines:
                fitting.append(prompts[number].tolist())
        prompts = fitting.finish()
    return Work(kept, prompts, np.frombuffer(limits, dtype=np.int64))


def _too_long(request: BatchRequest, length: int, room: int) -> LineError:
    limit = request.body.limit
    asked = "" if limit is None else f" and {limit} tokens of output"
    return LineError(
        request.line,
        "prompt_too_long",
        f"a prompt of {length} tokens{asked} does not fit: the engine has room for {room} tokens of both",
        request.custom_id,
    )


def _foreign_token(request: BatchRequest, prompt: Int32Array, vocab_size: int) -> LineError | None:
    """An error if a token of the prompt, or one to stop at, is not in the model's vocabulary."""
    stop = request.body.stop_token_ids or []
    for where, token in (("the prompt", int(prompt.max(initial=0))), ("stop_token_ids", max(stop, default=0))):
        if token >= vocab_size:
            return LineError(
                request.line,
                "invalid_prompt" if where == "the prompt" else "invalid_request",
                f"{where} has the token id {token}; those of the model are below {vocab_size}",
                request.custom_id,
            )
    return None


def _run(
    plan: JobPlan, pool: Engines, options: BatchOptions, journal: Journal, progress: Progress, summary: BatchSummary
) -> None:
    work = plan.work
    summary.shared_tokens = int(plan.tree.shared[work.samples[plan.tree.order] == 1].sum(dtype=np.int64))
    progress.start(len(work.requests) + len(journal.finished), len(journal.finished))
    left = len(work.requests)
    while left:
        for engine, queue in enumerate(plan.queues):
            while pool.outstanding(engine) < options.window and (task := queue.next()) is not None:
                pool.submit(engine, task)
        outcomes = pool.outcomes(_POLL_SECONDS)
        if outcomes:
            journal.append([_finished(work.requests[o.number], o, options.model, journal.created) for o in outcomes])
        for outcome in outcomes:
            left -= 1
            if outcome.answer is not None:
                plan.learn(outcome.number, outcome.answer.output_tokens)
                summary.output_tokens += outcome.answer.output_tokens
                summary.prompt_tokens += outcome.answer.prompt_tokens
                if work.requests[outcome.number].body.n == 1:
                    summary.single_tokens += outcome.answer.prompt_tokens
                    summary.cached_tokens += outcome.answer.cached_tokens
        summary.seconds = progress.seconds
        progress.advance(len(outcomes), summary.prompt_tokens, summary.output_tokens, summary.saving)


def _finished(request: BatchRequest, outcome: Outcome, model: str, created: int) -> Finished:
    if outcome.answer is not None:
        return Finished(request.line, ok=True, record=success(request, outcome.answer, model, created))
    error = LineError(request.line, "engine_error", outcome.error, request.custom_id)
    return Finished(request.line, ok=False, record=failure(error))


def _write(options: BatchOptions, journal: Journal, lines: _Lines) -> int:
    """Writes the output and, if there are errors, the errors file; returns the number of errors."""
    good: list[tuple[int, int]] = []
    failed = [(error.line, failure(error)) for error in lines.errors]
    for offset, entry in journal.read():
        if entry.ok:
            good.append((entry.line, offset))
        else:
            failed.append((entry.line, entry.record))
    if options.ordered:
        good.sort()

    def results() -> Iterator[bytes]:
        for entry in journal.read_at([offset for _, offset in good]):
            yield orjson.dumps(entry.record)

    if failed:
        failed.sort(key=lambda entry: entry[0])
        write_lines(options.errors, (orjson.dumps(record) for _, record in failed))
    else:
        options.errors.unlink(missing_ok=True)
    write_lines(options.output, results())
    return len(failed)
