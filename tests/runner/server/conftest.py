"""Servers of `ostinato serve`, in processes of their own, and clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from ...processes import PATIENCE

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
READY = re.compile(r"ready after \S+ s: (http://\S+) serves (\S+),")


@dataclass
class Server:
    """A running server: its process, its address, and what it wrote to stderr."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """A client of OpenAI's that asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE, **options)

    def end(self, sent: int = signal.SIGTERM) -> int:
        """End it with a signal, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sent)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(artifact: Path, *words: object, **environment: str) -> Iterator[Server]:
    """Run `ostinato serve` until the end of the context."""
    command = [sys.executable, "-m", "ostinato.runner.cli", "serve", str(artifact), "--port", "0", *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    server, ready = Server(process), threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(line)
            if found := READY.search(line):
                server.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(PATIENCE) and server.url, server.log
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def server(capitals_artifact: Path) -> Iterator[Server]:
    """A server of the capitals model that tests share. It ends cleanly."""
    with serving(capitals_artifact, "--sessions", 8, "--served-model-name", "capitals") as found:
        yield found
        assert found.end() == 0
        assert "Traceback" not in found.log


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()
