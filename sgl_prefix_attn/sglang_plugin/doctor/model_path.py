"""Whether there is a model behind `--model-path`, told at once: SGLang would ask the hub several times for any name."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence

# Options by all their names, with that of the revision.
_OPTIONS = (
    (("--model-path", "--model"), "--revision"),
    (("--speculative-draft-model-path", "--speculative-draft-model"), "--speculative-draft-model-revision"),
)
_CONFIGS = ("config.json", "params.json", "model_index.json")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_WAIT = 10.0  # seconds for the hub's answer
_ON = ("1", "ON", "YES", "TRUE")


def value_of(arguments: Sequence[str], *options: str) -> str | None:
    """The value of a launch option, by its exact names; None without one."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in options:
            return value if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return None


def problem(arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Why a model of the launch arguments is missing, in words; None if all are there, or if only SGLang can tell.

    Args:
        arguments: launch arguments of SGLang.
        environ: the environment of the server's process.
    """
    found = (
        _problem(value_of(arguments, *names), value_of(arguments, revision), environ) for names, revision in _OPTIONS
    )
    return next(filter(None, found), None)


def _problem(name: str | None, revision: str | None, environ: Mapping[str, str]) -> str | None:
    if name is None or "://" in name or environ.get("SGLANG_USE_MODELSCOPE", "").upper() in _ON:
        return None
    if os.path.isdir(name):
        if any(os.path.exists(os.path.join(name, file)) for file in _CONFIGS) or _has_gguf(name):
            return None
        return f"the folder {name} has no config.json"
    if os.path.exists(name):
        return None
    if not _HUB_NAME.fullmatch(name):
        return f"no such folder: {name} (and no name of a hub model, which is owner/model)"
    return _hub_problem(name, revision, environ)


def _has_gguf(folder: str) -> bool:
    return any(file.endswith(".gguf") for file in os.listdir(folder))


def _hub_problem(name: str, revision: str | None, environ: Mapping[str, str]) -> str | None:
    import huggingface_hub

    home = environ.get("HF_HOME", os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = os.path.expanduser(
        environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    )
    if any(isinstance(huggingface_hub.try_to_load_from_cache(name, file, cache, revision), str) for file in _CONFIGS):
        return None
    looked = f"no such folder: {name}; no such model in the hub's cache {cache}"
    if "/" not in name:
        return f"{looked}; a name for the hub is owner/model"
    if any(environ.get(variable, "").upper() in _ON for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return f"{looked}; the hub is not asked, as HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    answer = _answer_of_hub(name, revision, environ)
    return None if answer is None else f"{looked}; the hub: {answer}"


def _answer_of_hub(name: str, revision: str | None, environ: Mapping[str, str]) -> str | None:
    """What the hub has against a name; None if it has the model. Asked once, whatever the library repeats."""
    import huggingface_hub

    answers: list[str | None] = []

    def ask() -> None:
        try:
            url = huggingface_hub.hf_hub_url(
                name, "config.json", revision=revision, endpoint=environ.get("HF_ENDPOINT") or None
            )
            huggingface_hub.get_hf_file_metadata(url, token=environ.get("HF_TOKEN") or None, timeout=_WAIT)
            answers.append(None)
        except Exception as error:  # of the network, in the library's or its HTTP client's classes
            text = str(error).strip() or "no answer"
            answers.append(f"{type(error).__name__}: {text.splitlines()[0]}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_WAIT)
    return answers[0] if answers else f"no answer within {_WAIT:.0f} s"
