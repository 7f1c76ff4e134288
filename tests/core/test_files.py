"""Files of results."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sgl_prefix_attn.core.files import check_writable, write_whole


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
