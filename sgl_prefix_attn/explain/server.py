"""State of a running server from GET /server_info: its counters and its last packed batch."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sgl_prefix_attn.explain.batch import BatchDescription, BatchModel, InputError, describe, first_problem
from sgl_prefix_attn.explain.spread import RunningPrompts

STATE_KEY = "prefixpack"
STATE_VERSION = 1
_PATH, _OLDER_PATH = "/server_info", "/get_server_info"
_PROMPTS_PATH = "/prefixpack/prompts"
_MOST_ANSWERS = 300  # an engine hashes some blocks an answer; the most that it tells take 256
_TIMEOUT_SECONDS = 10.0
PREFILL_REASON = "compute_bound"  # of fallbacks that only prefill and mixed steps have


class Counters(BaseModel):
    """Totals since the server started. kv_tokens are per layer and KV head."""

    model_config = ConfigDict(extra="ignore")

    plans_made: int
    plans_reused: int
    plan_seconds: float
    host_seconds: float
    kv_tokens_read: int
    kv_tokens_per_request: int
    kv_tokens_unique: int
    steps_packed: dict[str, int]
    fallbacks: dict[str, int]
    one_token_steps: dict[str, int] = {}
    routed_steps: dict[str, int] = {}

    @property
    def decode_steps(self) -> int:
        """Decode and verify steps, packed or routed to the stock backend."""
        packed = self.steps_packed.get("decode", 0) + self.steps_packed.get("verify", 0)
        return packed + self.routed_steps.get("stock", 0)

    @property
    def prefill_steps(self) -> int:
        """Prefill and mixed steps, packed or not, that did not run as decode steps."""
        packed = self.steps_packed.get("extend", 0) + self.steps_packed.get("mixed", 0)
        return packed + self.fallbacks.get(PREFILL_REASON, 0)


class Decision(BaseModel):
    """A decision of the router: KV of a layer that sharing saves, and that all requests have, in 2^20 bytes."""

    route: str
    saved_mib: float = 0.0
    kv_mib: float = 0.0
    requests: int = 0


class LiveTest(BaseModel):
    """A live A/B test.

    Attributes:
        arms: names of two policies.
        running: what decides under these names.
        arm: of the last decode step, 0 or 1; None: none.
        would: steps that an arm would send to each route, of all that were decided.
        last: of each arm.
    """

    model_config = ConfigDict(extra="ignore")

    status: str
    arms: tuple[str, str]
    running: tuple[str, str]
    arm: int | None = None
    would: tuple[dict[str, int], dict[str, int]]
    last: tuple[Decision | None, Decision | None]


class RouteState(BaseModel):
    """How decode steps are routed.

    Attributes:
        setting: the setting `route`.
        policy: what decides.
        rule: when a step runs packed, in words; None: always, or by the policy alone.
        last: the last decision.
        kernels: fields of `routing.rule.KernelPair`; None: an older server, or no step has run.
    """

    model_config = ConfigDict(extra="ignore")

    setting: str
    policy: str
    rule: str | None = None
    last: Decision | None = None
    live: LiveTest | None = None
    kernels: dict[str, str] | None = None


class ServerState(BaseModel):
    """State of the backend in one scheduler process.

    batch: the last one that ran packed; None: none yet, or not told. tells_batch: whether the server tells it. route:
    None: an older server, or no backend yet.
    """

    model_config = ConfigDict(extra="ignore")

    version: int
    counters: Counters
    stock_backend: str
    sglang: str
    shape: dict[str, Any] | None = None
    device: dict[str, Any] | None = None
    batch: BatchModel | None = None
    tells_batch: bool = True
    route: RouteState | None = None

    def described_batch(self, title: str) -> BatchDescription | None:
        """The last packed batch, or None when no step ran packed yet."""
        if self.batch is None:
            return None
        return describe(title, self.batch.paths, self.batch.seq_lens, self.batch.query_lens)


def read_states(url: str, api_key: str | None = None) -> list[ServerState]:
    """States of every scheduler process of the server at `url` ("http://host:port"), in the server's order.

    Raises:
        InputError: the server does not answer, or its answer has no usable state of prefixpack.
    """
    info = _server_info(url, api_key)
    internal = info.get("internal_states")
    if not isinstance(internal, list):
        raise InputError(f"{url}: the answer has no internal_states; is this an SGLang server?")
    found = [state[STATE_KEY] for state in internal if isinstance(state, dict) and STATE_KEY in state]
    if not found:
        raise InputError(
            f"{url}: SGLang {info.get('version', 'of unknown version')} with attention backend "
            f"{info.get('attention_backend') or 'not named'} reports no {STATE_KEY} state; "
            "start it with --attention-backend prefixpack"
        )
    return [_state(url, content) for content in found]


def read_prompts(url: str, api_key: str | None = None) -> list[RunningPrompts]:
    """Prompts that the server runs, of every data-parallel rank. Asks until all are hashed.

    Raises:
        InputError: the server does not answer, or tells no prompts.
    """
    base = _checked(url)
    for _ in range(_MOST_ANSWERS):
        try:
            content = _get_json(base + _PROMPTS_PATH, api_key)
        except InputError as error:
            raise InputError(
                f"{error}; {_PROMPTS_PATH} needs the setting fingerprint_key and a server with --admin-api-key, given "
                "as --api-key"
            ) from error
        try:
            found = [RunningPrompts.model_validate(copy) for copy in content["copies"]]
        except (ValidationError, KeyError, TypeError) as error:
            raise InputError(f"{url}: {_PROMPTS_PATH}: the answer has no prompts") from error
        if not any(running.pending for running in found):
            break
    return found


def _state(url: str, content: Any) -> ServerState:
    version = content.get("version") if isinstance(content, dict) else None
    if version != STATE_VERSION:
        raise InputError(f"{url}: {STATE_KEY} state of version {version!r}; this program reads version {STATE_VERSION}")
    try:
        return ServerState.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{url}: {STATE_KEY} state: {first_problem(error)}") from error


def _checked(url: str) -> str:
    """The address without a slash at its end. Raises InputError if it is none."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # as of "http://[::1"
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"server {url!r}: expected http://HOST:PORT")
    return url.rstrip("/")


def _server_info(url: str, api_key: str | None) -> dict[str, Any]:
    base = _checked(url)
    try:
        content = _get_json(base + _PATH, api_key)
    except _NotFoundError:
        content = _get_json(base + _OLDER_PATH, api_key)
    if not isinstance(content, dict):
        raise InputError(f"{url}: the answer is not a JSON object; is this an SGLang server?")
    return content


class _NotFoundError(InputError):
    pass


def _get_json(url: str, api_key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        message = f"{url}: HTTP {error.code} {error.reason}" + ("; pass --api-key" if error.code == 401 else "")
        raise (_NotFoundError if error.code == 404 else InputError)(message) from error
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"{url}: no answer: {getattr(error, 'reason', None) or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{url}: the answer is not JSON: {error}") from error
