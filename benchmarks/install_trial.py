"""The trial of docs/install.md, by the page's own words, in an empty folder and with empty caches.

    python3 benchmarks/install_trial.py dist/cpu build/trial

Makes an environment, installs the wheel for this Python beside SGLang, starts a server, sends a request, reads the
metrics. Prints the seconds of each command. Exit status 1 if all of it took longer than ten minutes. Runs with the
standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "install.md"
ADDRESS = "http://127.0.0.1:30000"
READY = "The server is fired up and ready to roll!"
MOST_SECONDS = 600.0
KEPT = ("PATH", "HOME", "LANG", "SSL_CERT_FILE")  # of this environment, beside pip's and proxies' variables


def blocks(language: str) -> list[str]:
    """Fenced blocks of the section."""
    section = PAGE.read_text(encoding="utf-8").partition("## Try it")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def check_output(printed: str) -> None:
    """The server packed decode steps and read a fifth of the KV, as the page says; how requests join a batch varies."""
    assert printed.startswith("8 samples, the first is ["), printed
    (steps,) = re.findall(r'prefixpack_packed_steps_total{.*mode="decode".*} (\S+)', printed)
    (ratio,) = re.findall(r"prefixpack_kv_read_ratio.* (\S+)", printed)
    assert float(steps) > 10, printed
    assert float(ratio) < 0.25, printed
    assert "8 requests; each 1 new token" in printed


class Trial:
    """Runs commands in shells of one folder, and notes their seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = ""  # what each new shell does first
        self.seconds = 0.0
        beginnings = (*KEPT, "PIP_", "http_proxy", "https_proxy", "no_proxy")
        kept = {name: value for name, value in os.environ.items() if name.startswith(beginnings)}
        self.environment = {**kept, "XDG_CACHE_HOME": str(folder / "cache")}

    def note(self, title: str, started: float) -> None:
        seconds = time.monotonic() - started
        self.seconds += seconds
        print(f"{seconds:6.1f} s  {title}", flush=True)

    def run(self, command: str) -> str:
        """What a command prints, which becomes part of each new shell if it changes the environment."""
        started = time.monotonic()
        words = ["bash", "-euc", self.before + command]
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        )
        if command.startswith(". "):
            self.before = f"{command}\n"
        self.note(command.splitlines()[0], started)
        return done.stdout

    def serve_and_ask(self, launch: str, requests: list[str]) -> str:
        """Starts a server; returns what commands print once it is ready."""
        log, started = self.folder / "server.log", time.monotonic()
        words = ["bash", "-euc", f"{self.before}{launch}"]
        with log.open("w") as output:
            server = subprocess.Popen(
                words, cwd=self.folder, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            while READY not in log.read_text(errors="replace"):
                assert server.poll() is None, log.read_text()[-5000:]
                assert time.monotonic() - started < MOST_SECONDS, log.read_text()[-5000:]
                time.sleep(0.2)
            self.note("the server, until it is ready", started)
            return "".join(self.run(request) for request in requests)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def newest_wheel(folder: Path) -> Path:
    found = folder.glob(f"*-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl")
    return max(found, key=lambda path: path.stat().st_mtime).resolve()


def main() -> None:
    wheel, folder = newest_wheel(Path(sys.argv[1])), Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True)
    trial = Trial(folder)
    prepare, launch, explain = blocks("bash")
    (snippet,) = blocks("python")
    for line in prepare.splitlines():
        command = line.partition("#")[0].strip().replace("dist/cpu/sgl_prefix_attn-VERSION.whl", str(wheel))
        trial.run(command.replace("python3 ", f"{sys.executable} ") if " venv " in command else command)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = ADDRESS.replace("30000", str(port))
    (folder / "request.py").write_text(snippet.replace(ADDRESS, url))
    requests = ["python request.py", explain.replace(ADDRESS, url)]
    check_output(trial.serve_and_ask(f"{launch.rstrip()} --port {port}", requests))
    print(f"{trial.seconds:6.1f} s  in all; the request was answered, with packed steps in the metrics")
    assert trial.seconds < MOST_SECONDS


if __name__ == "__main__":
    main()
