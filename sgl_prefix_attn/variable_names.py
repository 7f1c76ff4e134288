"""Names of environment variables: those that Kubernetes sets, and those that someone took for ours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "PREFIXPACK_"
# Kubernetes sets these in every pod of a namespace with a service named prefixpack or prefixpack-*.
KUBERNETES = re.compile(r"PREFIX_?PACK_(SERVICE_\w*|PORT\w*|\w+_SERVICE_(HOST|PORT\w*)|\w+_PORT(_\d+_\w+)?)")
_NEAR = 0.85  # as PREFIXPAK_ROUTE to PREFIXPACK_ROUTE; PREFIX_PATH is near to nothing


def misnamed(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """A warning for each variable that looks like one of ours and is none, so that nothing reads it.

    Names that begin with PREFIX are not among them: an unknown one is an error of the settings.
    """
    by_letters = {_letters(name): name for name in known}
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) or KUBERNETES.fullmatch(name) or not environ[name].strip():
            continue
        letters = _letters(name)
        begin = max(0, letters.find(_letters(PREFIX)))  # of SGLANG_PREFIXPACK_ROUTE too
        near = difflib.get_close_matches(letters[begin:], by_letters, n=1, cutoff=_NEAR)
        if near or letters.startswith(_letters(PREFIX)):
            hint = f"did you mean {by_letters[near[0]]}?" if near else f"ours begin with {PREFIX}"
            warnings.append(f"the variable {name} is not read; {hint}")
    return warnings


def _letters(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())
