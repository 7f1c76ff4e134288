"""Runs a batch file: reads it, plans, feeds engines, keeps the journal, writes the output."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from sgl_prefix_attn.offline import token_batching
from sgl_prefix_attn.offline.answers import failure, success
from sgl_prefix_attn.offline.batch_file import BatchRequest, LineError, read_batch
from sgl_prefix_attn.offline.engines import EngineArguments, EngineMain, EnginePool, Engines, StartEngines
from sgl_prefix_attn.offline.job_plan import JobPlan, Work
from sgl_prefix_attn.offline.journal import Finished, Journal, check_writable, write_lines
from sgl_prefix_attn.offline.messages import Go, Line, Outcome, Planned, Ready, Refused, Steps, Task
from sgl_prefix_attn.offline.progress import Progress
from sgl_prefix_attn.offline.prompts import Prompts

_POLL_SECONDS = 0.5
_LAST_TOKEN = 2**31 - 1


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
        model: name of the model.
        engines: arguments of each engine.
        ordered: output in the order of the input, else as requests finish.
        window: requests an engine has at once; None: as token_batching.py says. More let it fill its batch, fewer let
            estimates of output lengths come in time to order the rest.
        batching: a choice of token_batching.py.
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
    window: int | None = None
    batching: str = "off"
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
        ignored: fields of bodies that SGLang does not know, and in how many requests.
        seconds: first request to last answer.
        steps: what engines have counted.
        engines: what each said when it was ready.
        window: requests that each had at once.
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
    ignored: dict[str, int] = field(default_factory=dict)
    steps: Sequence[Steps] = ()
    engines: Sequence[Ready] = ()
    window: int = 0

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
    progress: Progress | None = None,
    start: StartEngines = EnginePool,
) -> BatchSummary:
    """Runs what is left of a batch, writes output and errors, and removes the journal.

    Args:
        main: what an engine process runs (see `EnginePool`).
        start: starts the engines.

    Raises:
        OSError: a file cannot be read or written, or exists and is not this job's.
        ValueError: the batch file is no text that could be read, or SGLang does not take the engines' arguments.
        JournalError: the journal cannot be used.
        EngineError: an engine ended; what had finished is in the journal.
    """
    progress = progress or Progress(enabled=False)
    lines = _read(options.source)
    # The files may be those of a run that ended since the arguments were checked.
    kept = () if options.overwrite else (options.output, options.errors)
    try:
        journal = Journal(
            options.journal, options.source, options.model, options.errors, kept, options.job, anew=options.restart
        )
    except (FileNotFoundError, PermissionError) as error:  # the first also in folders without ordinary files, as /proc
        if error.filename is None or Path(error.filename) != options.journal:
            raise
        what = f"OUT {options.output}: cannot write to {options.output.resolve().parent}: {error.strerror}"
        raise OSError(error.errno, what) from error
    try:
        _check_writable(options, journal)
        summary = BatchSummary(requests=len(lines.usable) + len(lines.errors), resumed=len(journal.finished))
        remaining = [request for request in lines.usable if request.line not in journal.finished]
        # An earlier version may have run what this one refuses: a result stays one.
        lines.errors = [error for error in lines.errors if error.line not in journal.finished]
        if remaining:
            with start(main, options.engines) as pool, progress:
                requests, work = _prepare(options, remaining, pool, lines.errors, summary, progress)
                if work is not None:
                    plan = JobPlan(work, len(pool), secrets.token_hex(16), grouped=options.grouped)
                    tokens = plan.tree.unique_tokens / len(requests) + float(plan.decode_tokens().mean())
                    summary.window = options.window or token_batching.window(summary.engines, tokens)
                    for told in token_batching.report(summary.engines, summary.window, ()):
                        progress.say(told)
                    _run(plan, requests, pool, journal, progress, summary)
                    summary.steps = pool.finish()
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
    options: BatchOptions,
    requests: Sequence[BatchRequest],
    pool: Engines,
    errors: list[LineError],
    summary: BatchSummary,
    progress: Progress,
) -> tuple[list[BatchRequest], Work | None]:
    """Has the engines check and plan the requests, and leaves out those that cannot run. No work if none is left."""
    by_line = {request.line: request for request in requests}

    def refuse(refused: Refused) -> None:
        line = by_line.pop(refused.number)
        errors.append(LineError(line.line, refused.code, refused.message, line.custom_id))

    checked = pool.check([Line(request.line, request.url, request.text) for request in requests])
    for refused in checked.refused:
        refuse(refused)
    summary.ignored = dict(checked.ignored)
    planned: dict[int, Planned] = {}
    if by_line:
        texts = (request.text for request in by_line.values())
        shared = token_batching.shared_part(texts) if options.batching == "auto" else 0.0
        for plan in progress.over(pool.plan(Go(options.batching, shared)), "reading prompts", len(by_line)):
            if isinstance(plan, Refused):
                refuse(plan)
            else:
                planned[plan.number] = plan
    if not planned:
        return [], None
    progress.say("loading the model")
    summary.engines = engines = pool.wait_ready()
    room, strict = min(ready.room for ready in engines), any(ready.strict for ready in engines)
    for plan in planned.values() if strict else ():
        length = 0 if plan.tokens is None else len(plan.tokens)
        if length + max(1, plan.limit or 0) > room:
            refuse(_too_long(plan, length, room))
    kept = list(by_line.values())
    return kept, _work(kept, planned, room, strict=strict) if kept else None


def _work(requests: Sequence[BatchRequest], planned: dict[int, Planned], room: int, *, strict: bool) -> Work:
    """The work of these requests; what is planned of them is used up."""
    prompts, apart = [], {"": 0}
    tasks, alone, numbers = [], set(), []
    for number, request in enumerate(requests):
        plan = planned.pop(request.line)
        tokens = np.zeros(1, np.int32) if plan.tokens is None else plan.tokens
        if plan.tokens is None:
            alone.add(number)
        if key := apart.setdefault(str(number) if plan.tokens is None else plan.apart, len(apart)):
            tokens = np.append(np.int32(_LAST_TOKEN - key), tokens[1:])
        prompts.append(tokens)
        left = max(0, room - len(tokens))
        numbers.append((left if plan.limit is None else min(left, plan.limit), plan.minimum, plan.samples))
        tasks.append(Task(number, request.url, request.text, left if strict and plan.limit is None else None))
    limits, minimums, samples = np.array(numbers, dtype=np.int64).T.copy()
    return Work(tasks, Prompts.from_lists(prompts), limits, minimums, samples, frozenset(alone))


def _too_long(plan: Planned, length: int, room: int) -> Refused:
    asked = "" if plan.limit is None else f" and {plan.limit} tokens of output"
    message = f"a prompt of {length} tokens{asked} does not fit: the engine has room for {room} tokens of both"
    return Refused(plan.number, "prompt_too_long", message)


def _run(
    plan: JobPlan,
    requests: Sequence[BatchRequest],
    pool: Engines,
    journal: Journal,
    progress: Progress,
    summary: BatchSummary,
) -> None:
    samples = plan.work.samples
    summary.shared_tokens = int(plan.tree.shared[samples[plan.tree.order] == 1].sum(dtype=np.int64))
    progress.start(len(requests) + len(journal.finished), len(journal.finished))
    left = len(requests)
    while left:
        for engine, queue in enumerate(plan.queues):
            while pool.outstanding(engine) < summary.window and (task := queue.next()) is not None:
                pool.submit(engine, task)
        outcomes = pool.outcomes(_POLL_SECONDS)
        if outcomes:
            journal.append([_finished(requests[outcome.number], outcome) for outcome in outcomes])
        for outcome in outcomes:
            left -= 1
            if outcome.answer is not None:
                plan.learn(outcome.number, outcome.answer.output_tokens)
                summary.output_tokens += outcome.answer.output_tokens
                summary.prompt_tokens += outcome.answer.prompt_tokens
                if samples[outcome.number] == 1:
                    summary.single_tokens += outcome.answer.prompt_tokens
                    summary.cached_tokens += outcome.answer.cached_tokens
        summary.seconds = progress.seconds
        progress.advance(len(outcomes), summary.prompt_tokens, summary.output_tokens, summary.saving)


def _finished(request: BatchRequest, outcome: Outcome) -> Finished:
    if outcome.answer is not None:
        return Finished(request.line, ok=True, record=success(request, outcome.answer))
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
