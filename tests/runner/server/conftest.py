"""Servers of `ostinato serve`, in processes of their own, and clients."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from ...conftest import ROOT
from ...processes import PATIENCE

sys.path.append(str(ROOT / "scripts"))

import server_client

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Server:
    """A running server: its address, its process, and what it wrote to stderr."""

    running: server_client.Server

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.running.process

    @property
    def log(self) -> str:
        return self.running.log.read_text()

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
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with server_client.serving(artifact, log, words, patience=PATIENCE, environment=environment) as running:
            yield Server(running)


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
