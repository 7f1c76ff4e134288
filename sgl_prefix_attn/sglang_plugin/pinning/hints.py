"""Hints that requests carry: SGLang's `kv_hints` and `session_id`.

SGLang checks the form of the envelope, and whoever executes an action checks its payload. Here the process that makes
a request for the scheduler does so: `HintCompiler`. It replaces the actions that are executed by one small action of
ours. Other actions pass unchanged, for whoever executes those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sgl_prefix_attn.pinning.retained import MAX_PRIORITY

logger = logging.getLogger(__name__)

OURS: Final = "prefixpack.hints"
RETAIN: Final = "kv.retain"
RELEASES: Final = ("kv.evict", "kv.deref")
MAX_ACTIONS = 16
MAX_SPANS = 128
MAX_EXECUTED_SPANS = 8  # of a request: a scheduler takes some 2 ms for one of 131,072 tokens
MAX_SECONDS = 30 * 24 * 3600.0
MAX_SESSION_ID = 256  # characters; a longer id counts as none

Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY, strict=True)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, strict=True, allow_inf_nan=False)]
Position = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
# First and last token, priority, seconds that it lasts. No end: the end of the output. No seconds: until a flush.
Span = tuple[Position, Position | None, Priority, Seconds | None]


class _Directive(BaseModel):
    """A token range of vLLM's kind of payload."""

    model_config = ConfigDict(extra="forbid")

    start: Position = 0
    end: Position | None = None
    priority: Priority
    duration: Seconds | None = None
    covers_output: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _is_a_range(self) -> _Directive:
        if self.covers_output and self.model_fields_set & {"start", "end"}:
            raise ValueError("covers_output goes with neither start nor end")
        if self.end is not None and self.end <= self.start:
            raise ValueError("end has to be greater than start")
        return self


class _Ranges(BaseModel):
    """vLLM's payload of kv.retain."""

    scope: Annotated[str, Field(max_length=256)] | None = None
    directives: Annotated[list[_Directive], Field(max_length=MAX_SPANS, fail_fast=True)]

    @model_validator(mode="after")
    def _does_not_rise(self) -> _Ranges:
        ordered = sorted(self.directives, key=lambda range: (range.covers_output, range.start))
        for before, after in pairwise(ordered):
            if after.priority > before.priority:
                raise ValueError("priorities must not rise along the tokens: a prefix serves only as a whole")
        return self


class _Whole(BaseModel):
    """Dynamo's payload of kv.retain and kv.evict. Its block hashes are those of a router: they are not read."""

    execute_at: Literal["request_completion"] = "request_completion"
    include_current_request: Annotated[bool, Field(strict=True)] = False
    priority: Annotated[int, Field(ge=0, lt=1 << 64, strict=True)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS, strict=True, allow_inf_nan=False)] | None = None


class Hints(BaseModel):
    """What a scheduler gets.

    Attributes:
        now: the sender's clock. All ranks get the same, so they decide alike.
        spans: token ranges to keep, or with priority 0 to keep no longer.
        ends: whether the request is the last one that needs its own tokens.
        ignored: actions that are not executed.
    """

    now: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    spans: Annotated[list[Span], Field(max_length=MAX_EXECUTED_SPANS)] = []
    ends: bool = False
    ignored: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class HintCompiler:
    """The hook of the processes that make requests for schedulers.

    Args:
        refusal: why a server with these arguments does not read hints. It leaves them to SGLang's storage backends.

    Attributes:
        seen: whether a request had hints. From then on all requests carry the time, by which hints end.
    """

    def __init__(self, refusal: Callable[[Any], str | None] = lambda args: None) -> None:
        self.seen = False
        self._refusal = refusal

    def after_create(self, result: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `TokenizerManager._create_tokenized_object`. ValueError: SGLang answers with status 400."""
        envelope = getattr(result, "kv_hints", None)
        if envelope is None and not self.seen:
            return
        if not hasattr(result, "kv_hints"):  # of an embedding
            return
        if not self.seen and self._refusal(getattr(manager, "server_args", None)) is not None:
            return
        self.seen = True
        result.kv_hints = None  # whatever happens: nobody but this hook writes to schedulers
        try:
            result.kv_hints = compiled(envelope, len(result.input_ids or ()), time.monotonic())
        except ValueError:
            raise
        except Exception:  # the one guard of this hook: the request is served without its hints
            logger.exception("prefixpack: the KV hints of a request are not executed")


def compiled(envelope: Any, prompt: int, now: float) -> Any:
    """The envelope that a scheduler gets for this one, None for a request without hints.

    Args:
        prompt: tokens of the prompt.
        now: the time.

    Raises:
        ValueError: a payload of an executed action is unusable, or there are too many.
    """
    from sglang.srt.managers.kv_hints import KvHintAction, KvHintsEnvelope

    hints, others, executed = Hints(now=now), [], 0
    for action in () if envelope is None else envelope.actions:
        if action.action_type == RETAIN or action.action_type in RELEASES:
            executed += 1
            if executed > MAX_ACTIONS:
                raise ValueError(f"kv_hints: at most {MAX_ACTIONS} actions of {RETAIN} and {', '.join(RELEASES)}")
            if action.action_version.partition(".")[0] not in ("0", "1"):
                hints.ignored += 1
                continue
            try:
                _add(action.action_type, action.payload, prompt, hints)
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                where = ".".join(map(str, first["loc"]))
                raise ValueError(f"kv_hints: {action.action_type}: {where}: {first['msg']}"[:500]) from None
        else:
            hints.ignored += 1
            if action.action_type != OURS:
                others.append(action)
    if len(hints.spans) > MAX_SPANS:
        raise ValueError(f"kv_hints: at most {MAX_SPANS} ranges of a request")
    hints.ignored += len(hints.spans[MAX_EXECUTED_SPANS:])
    del hints.spans[MAX_EXECUTED_SPANS:]
    ours = KvHintAction(action_id="", action_type=OURS, action_version="1.0", payload=hints.model_dump(mode="json"))
    protocol, message = ("0.1", "") if envelope is None else (envelope.protocol_version, envelope.message_id)
    return KvHintsEnvelope(protocol_version=protocol, message_id=message, actions=[ours, *others])


def _add(kind: str, payload: dict[str, Any], prompt: int, hints: Hints) -> None:
    if kind == RETAIN and "directives" in payload:
        for part in _Ranges.model_validate(payload).directives:
            begin = prompt if part.covers_output else part.start
            hints.spans.append((begin, part.end, part.priority, part.duration))
        return
    whole = _Whole.model_validate(payload)
    if kind in RELEASES and (whole.include_current_request or "block_hashes" not in payload):
        hints.ends = True
    elif kind == RETAIN and whole.include_current_request and whole.priority is not None:
        hints.spans.append((0, None, min(whole.priority, MAX_PRIORITY), whole.ttl_seconds))
    else:
        hints.ignored += 1


def hints_of(request: Any) -> Hints | None:
    """What the compiler sent with a request. ValueError: somebody else wrote it."""
    envelope = getattr(request, "kv_hints", None)
    if envelope is None:
        return None
    ours = [action for action in envelope.actions if action.action_type == OURS]
    if not ours:  # the process that made the request has no hook of ours
        return Hints(now=0.0, ignored=len(envelope.actions))
    return Hints.model_validate(ours[0].payload)


def session_of(request: Any) -> str | None:
    """The session of a request; None if it has none."""
    session = getattr(request, "session_id", None)
    return session if isinstance(session, str) and 0 < len(session) <= MAX_SESSION_ID else None


def asks_for_anything(request: Any) -> bool:
    """Whether a request has hints or a session."""
    return getattr(request, "kv_hints", None) is not None or session_of(request) is not None
