"""Hooks of mkdocs: the site holds README, CHANGELOG and other pages outside docs/, and every file a page links to.

Pages are written with links as they work in the repository. A link that leads nowhere is a warning, and the site is
built with `strict`, so the build fails.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.structure.files import File, Files

logger = logging.getLogger("mkdocs.hooks.links")

ROOT = Path(__file__).resolve().parents[1]
# Pages outside docs/, by their place in the site.
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "patches.md": "patches/README.md",
}
PLACES = {source: place for place, source in PAGES.items()}
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE = re.compile(r"^ *```")
LIST_ITEM = re.compile(r"^([-*]|\d+\.) ")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of `PAGES` and the files that pages link to."""
    for place, source in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        source = source_of(page.src_uri)
        for target in targets(source, (ROOT / source).read_text(encoding="utf-8")):
            place = place_of(target)
            if files.get_file_from_path(place) is None and (ROOT / target).is_file():
                files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with its links as they are in the site."""
    source, folder = source_of(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def place(match: re.Match[str]) -> str:
        link = urlsplit(match.group(0))
        if link.scheme or link.netloc or not link.path:
            return match.group(0)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.path))
        if not (ROOT / target).is_file():
            logger.warning("%s: the link %s leads to no file", source, match.group(0))
        anchor = f"#{link.fragment}" if link.fragment else ""
        return posixpath.relpath(place_of(target), folder or ".") + anchor

    lines = []
    before = ""
    for line, in_code in code_marked(markdown):
        if not in_code and LIST_ITEM.match(line) and is_paragraph(before):
            logger.warning("%s: a list needs an empty line before it: %s", source, line)
        lines.append(line if in_code else LINK.sub(place, line))
        before = line
    return "\n".join(lines)


def is_paragraph(line: str) -> bool:
    """Whether a line is text of a paragraph, in which Python-Markdown sees no list."""
    return bool(line.strip()) and not line.startswith((" ", "#")) and not LIST_ITEM.match(line)


def targets(source: str, text: str) -> Iterator[str]:
    """Paths, from the repository's root, of the files that a page links to."""
    for line, in_code in code_marked(text):
        for match in () if in_code else LINK.finditer(line):
            link = urlsplit(match.group(0))
            if not link.scheme and link.path:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(source), link.path))


def code_marked(text: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is code."""
    fenced = False
    for line in text.split("\n"):
        fence = bool(FENCE.match(line))
        yield line, fenced or fence or line.startswith("    ")
        fenced ^= fence


def source_of(place: str) -> str:
    """Path of a page from the repository's root."""
    return PAGES.get(place, posixpath.join("docs", place))


def place_of(source: str) -> str:
    """Path in the site's source tree of a file of the repository."""
    if source in PLACES:
        return PLACES[source]
    if source.startswith("docs" + os.sep):
        return source.removeprefix("docs/")
    name = f"source/{source}"
    return f"{name}.txt" if name.endswith(".md") else name
