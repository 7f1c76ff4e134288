"""Files of results."""

from __future__ import annotations

import codecs
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_prefix_attn.abtest.servers import read_requests
from sgl_prefix_attn.core.files import check_writable, write_whole
from sgl_prefix_attn.explain.batch import read_batch_file
from sgl_prefix_attn.offline.batch_file import read_batch
from sgl_prefix_attn.routing.measured import read_results
from sgl_prefix_attn.settings import CONFIG_VARIABLE, load_settings
from sgl_prefix_attn.trace import read_trace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_drawn.json"
ROW = b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}'
REQUEST = b'{"input_ids": [5], "max_new_tokens": 4}'
JOB = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": [1]}})


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.json"
    write_whole(path, b"before")

    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"steps.json: cannot write 5 bytes: No space left on device"):
        write_whole(path, b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["steps.json"]
    assert path.read_bytes() == b"before"
    for bad, message in ((tmp_path / "no" / "x", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=message):
            check_writable(bad)


def test_links_and_devices_stay(tmp_path: Path) -> None:
    """Of /dev/stdout an administrator could take the link away."""
    path, link, device = tmp_path / "steps.json", tmp_path / "link", tmp_path / "device"
    path.write_bytes(b"before")
    link.symlink_to(path)
    device.symlink_to(os.devnull)
    for written in (link, device):
        check_writable(written)
        write_whole(written, b"after")
        assert written.is_symlink()
    assert path.read_bytes() == b"after"
    assert not Path(os.devnull).is_file()
    with pytest.raises(ValueError, match="cannot write 5 bytes"):
        write_whole(Path("/dev/full"), b"after")


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_trace, ROW + b"\n \n\r\n" + ROW),
        (read_requests, REQUEST + b"\n\n" + REQUEST),
        (lambda path: list(read_batch(path)), JOB.encode() + b"\n\n"),
        (lambda path: read_batch_file(str(path)).paths, b'{"paths": [[]], "seq_lens": [4]}'),
        (lambda path: load_settings({CONFIG_VARIABLE: str(path)}), b"workers = 12"),
        (lambda path: len(read_results(path).cases), RESULTS.read_bytes()),
    ],
)
def test_a_byte_order_mark_and_blank_lines_are_read_over(
    read: Callable[[Path], Any], content: bytes, tmp_path: Path
) -> None:
    """Windows editors write the mark."""
    path = tmp_path / "file"
    path.write_bytes(content)
    found = read(path)
    path.write_bytes(codecs.BOM_UTF8 + content)
    assert read(path) == found


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"\xff": 1}')
    for read in (read_trace, read_requests):
        with pytest.raises(ValueError, match=str(path)):
            read(path)


def test_a_limit_counts_rows_not_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([ROW, b"", ROW, b"no row"]))
    assert len(read_trace(path, limit=2)) == 2
