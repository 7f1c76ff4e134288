"""What the turns of a session leave behind: a newer turn makes what only the older one used the first to be evicted."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from sgl_prefix_attn.sglang_plugin.pinning.hints import MAX_SESSION_ID, session_of
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import Namespace

MAX_SESSIONS = 4096  # remembered; the one that was idle for longest is forgotten first
MAX_STORED_TEXT = 256  # characters; of a longer namespace or request id a digest is kept
TEMPLATE_TAIL = 8  # last tokens of a prompt, which a chat template may write otherwise in the next turn's prompt


def bounded(text: str | None) -> str | None:
    """A client's text as it is kept for long: SGLang limits neither namespaces nor request ids."""
    if text is None or len(text) <= MAX_STORED_TEXT:
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Owner(NamedTuple):
    """Whose cached tokens they are: a session within its namespace. A request without a session is one by itself."""

    namespace: str | None
    session: str | None
    rid: str | None = None

    @classmethod
    def of_request(cls, request: Any) -> Owner:
        namespace, session = bounded(Namespace.of_request(request).text), session_of(request)
        return cls(namespace, session) if session is not None else cls(namespace, None, bounded(request.rid))


class Turn(NamedTuple):
    """The last finished turn of a session.

    Attributes:
        leaf: id of the last node that it cached.
        blocks: full blocks of its prompt.
        key: of the last of them.
        end: of the prompt, without its last `TEMPLATE_TAIL` tokens.
        tail: hash of the tokens from the last full block to the end.
    """

    leaf: int
    blocks: int
    key: int
    end: int
    tail: int


class Sessions:
    """The last turn of each session.

    Args:
        block: tokens per prefix key.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._turns: dict[Owner, Turn] = {}
        self._closed: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def superseded(self, owner: Owner, keys: Sequence[int], tokens: Sequence[int]) -> Turn | None:
        """The turn that this prompt continues: its own prompt is a beginning of this one, but for the template's tail.

        Whoever knows only the session's id, or the beginning of its prompts, supersedes nothing.
        """
        turn = self._turns.get(owner)
        if turn is None or len(keys) < turn.blocks or keys[turn.blocks - 1] != turn.key:
            return None
        return turn if len(tokens) >= turn.end and self._tail(tokens, turn.blocks, turn.end) == turn.tail else None

    def admitted(self, owner: Owner) -> None:
        """A session goes on, even if it was closed."""
        self._closed.pop(owner, None)

    def finished(self, owner: Owner, leaf: int, prompt_keys: Sequence[int], prompt: Sequence[int]) -> bool:
        """A turn has ended. Returns whether its session was closed meanwhile."""
        self._turns.pop(owner, None)
        if owner in self._closed:
            return True
        if owner.session is not None and prompt_keys:
            blocks, end = len(prompt_keys), len(prompt) - TEMPLATE_TAIL
            self._turns[owner] = Turn(leaf, blocks, prompt_keys[-1], end, self._tail(prompt, blocks, end))
            if len(self._turns) > MAX_SESSIONS:
                del self._turns[next(iter(self._turns))]
        return False

    def close(self, owner: Owner) -> Turn | None:
        """Nobody needs the session any more. Returns its last turn."""
        if len(owner.session or "") > MAX_SESSION_ID:  # of no request
            return None
        self._closed[owner] = None
        if len(self._closed) > MAX_SESSIONS:
            del self._closed[next(iter(self._closed))]
        return self._turns.pop(owner, None)

    def clear(self) -> None:
        self._turns.clear()
        self._closed.clear()

    def _tail(self, tokens: Sequence[int], blocks: int, end: int) -> int:
        return hash(tuple(tokens[blocks * self._block : max(end, 0)]))
