"""Fingerprints of the running requests' prompts at GET /prefixpack/prompts, so that servers can be compared.

A prompt is cut into blocks. The hash of a block covers all tokens before it as well, so equal hashes mean equal
prefixes, on any server with the same setting `fingerprint_key`. They are keyed by that secret and by the request's
namespace, and are for the admin key only: who can guess all but a few tokens of a prompt could else find the rest.
The last, shorter block has no hash. Without the setting there is no endpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import http_routes

logger = logging.getLogger(__name__)

PATH = "/prefixpack/prompts"
COMMAND = "prefixpack-prompts"  # the id of the internal-state request
ANSWER_KEY = "prefixpack_prompts"
BLOCK = 512
# Of larger batches and longer prompts the rest is left out, which bounds the answer to about 1 MB.
MAX_REQUESTS = 1024
MAX_BLOCKS = 64
# The scheduler hashes no more in one answer: 1 MB, which take some 2 ms. The next answers go on.
BLOCKS_AN_ANSWER = 256
_HASH_BYTES = 8


@dataclass
class _Fingerprint:
    running: Any
    text: str = ""  # all hashes: one string is sent faster than many


class RunningPrompts:
    """Hashes each prompt once while it runs, some blocks an answer.

    Args:
        key: the operators' secret.
    """

    def __init__(self, key: str) -> None:
        self._key = hashlib.blake2b(key.encode()).digest()
        self._known: WeakKeyDictionary[Any, _Fingerprint] = WeakKeyDictionary()

    def state(self, requests: Iterable[Any]) -> dict[str, Any]:
        """The prompts of requests as JSON-able values.

        Args:
            requests: SGLang's `Req` objects.

        Returns:
            {"block": tokens of a block, "key": tells whether servers have the same secret, "pending": prompts that are
            not hashed yet to their end, "prompts": [the hashes of a prompt's full blocks as one text]}
        """
        left, pending = BLOCKS_AN_ANSWER, 0
        prompts = []
        for request in islice(requests, MAX_REQUESTS):
            known = self._known.get(request)
            if known is None:
                known = self._known[request] = _Fingerprint(self._hash(request))
            tokens, done = request.origin_input_ids, len(known.text) // (2 * _HASH_BYTES)
            blocks = min(len(tokens) // BLOCK, MAX_BLOCKS)
            end = min(blocks, done + left)
            if end > done:
                _extend(known, tokens, done, end)
                left -= end - done
            pending += end < blocks
            prompts.append(known.text)
        name = hashlib.blake2b(key=self._key, digest_size=_HASH_BYTES).hexdigest()
        return {"block": BLOCK, "key": name, "pending": pending, "prompts": prompts}

    def _hash(self, request: Any) -> Any:
        # A LoRA adapter's id is part of the extra key.
        namespace = json.dumps([request.extra_key or "", getattr(request, "cache_salt", None) or ""])
        digest = hashlib.blake2b(namespace.encode(), digest_size=32, key=self._key).digest()
        return hashlib.blake2b(digest_size=_HASH_BYTES, key=digest)


def _extend(known: _Fingerprint, tokens: Any, first: int, end: int) -> None:
    """Hashes the blocks from `first` to `end`."""
    if isinstance(tokens, array) and tokens.typecode == "q":
        data, begin = memoryview(tokens), first
    else:
        data, begin = memoryview(array("q", tokens[first * BLOCK : end * BLOCK])), 0
    added = []
    for block in range(begin, begin + end - first):
        known.running.update(data[block * BLOCK : (block + 1) * BLOCK])
        added.append(known.running.copy().hexdigest())
    known.text += "".join(added)


def add_endpoint(settings: Settings, *, in_scheduler: bool) -> None:
    """Adds the endpoint in the server's process, if there is a `fingerprint_key`."""
    if settings.fingerprint_key is not None and http_routes.serves_http(in_scheduler=in_scheduler):
        try:
            server = http_routes.server_without(PATH)
            if server is not None:
                add_route(*server)
        except Exception:  # the one guard of a registration: the server has to start
            logger.exception("prefixpack: the server has no HTTP endpoint for running prompts")


def add_route(app: Any, manager_of: Any) -> None:
    """Adds the route to SGLang's FastAPI application.

    Args:
        manager_of: returns the tokenizer manager; called without arguments for each request.
    """

    async def read(request: Any) -> Any:
        states = await http_routes.internal_states(manager_of(), COMMAND)
        answers = [state[ANSWER_KEY] for state in states if ANSWER_KEY in state]
        if len(answers) == len(states):
            return {"copies": answers}
        message = "the schedulers have no prefixpack backend, or no fingerprint_key"
        raise http_routes.RequestError(message, status=503, kind="unavailable")

    http_routes.add_endpoints(app, PATH, {"GET": read}, admin_only=True)
