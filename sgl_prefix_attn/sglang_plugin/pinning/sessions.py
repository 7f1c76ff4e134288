"""What the turns of a session leave behind: a newer turn makes what only the older one used the first to be evicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from sgl_prefix_attn.sglang_plugin.pinning.hints import session_of
from sgl_prefix_attn.sglang_plugin.pinning.tree_adapters import Namespace

MAX_SESSIONS = 4096  # remembered; the one that was idle for longest is forgotten first


class Owner(NamedTuple):
    """Whose cached tokens they are: a session within its namespace. A request without a session is one by itself."""

    namespace: str | None
    session: str | None
    rid: str | None = None

    @classmethod
    def of_request(cls, request: Any) -> Owner:
        namespace, session = Namespace.of_request(request).text, session_of(request)
        return cls(namespace, session) if session is not None else cls(namespace, None, request.rid)


class Turn(NamedTuple):
    """The last finished turn of a session.

    Attributes:
        leaf: id of the last node that it cached.
        blocks: full blocks of its prompt.
        key: of the last of them.
    """

    leaf: int
    blocks: int
    key: int


class Sessions:
    """The last turn of each session."""

    def __init__(self) -> None:
        self._turns: dict[Owner, Turn] = {}
        self._closed: dict[Hashable, None] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def superseded(self, owner: Owner, keys: Sequence[int]) -> Turn | None:
        """The turn that this prompt continues: its own prompt is a beginning of this one.

        Whoever knows only the session's id supersedes nothing.
        """
        turn = self._turns.get(owner)
        if turn is None or len(keys) < turn.blocks or keys[turn.blocks - 1] != turn.key:
            return None
        return turn

    def admitted(self, owner: Owner) -> None:
        """A session goes on, even if it was closed."""
        self._closed.pop(owner, None)

    def finished(self, owner: Owner, leaf: int, prompt_keys: Sequence[int]) -> bool:
        """A turn has ended. Returns whether its session was closed meanwhile."""
        self._turns.pop(owner, None)
        if owner in self._closed:
            return True
        if owner.session is not None and prompt_keys:
            self._turns[owner] = Turn(leaf, len(prompt_keys), prompt_keys[-1])
            if len(self._turns) > MAX_SESSIONS:
                del self._turns[next(iter(self._turns))]
        return False

    def close(self, owner: Owner) -> Turn | None:
        """Nobody needs the session any more. Returns its last turn."""
        self._closed[owner] = None
        if len(self._closed) > MAX_SESSIONS:
            del self._closed[next(iter(self._closed))]
        return self._turns.pop(owner, None)

    def clear(self) -> None:
        self._turns.clear()
        self._closed.clear()
