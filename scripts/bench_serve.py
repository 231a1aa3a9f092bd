#!/usr/bin/env python3
"""Time callers over HTTP, beside the same callers without it, and beside llama.cpp's server where it is given.

    python scripts/bench_serve.py ARTIFACT [--cuda_graph] [--concurrency 1,8,32,64,128] [-p 1024] [-n 256] [--requests N]
                                  [--llama-server FILE --gguf FILE] [--threads N] [--json FILE] [--skip-goals]

The callers are those of `ostinato bench --load`: first over an engine in a process of its own, then with --url over
`ostinato serve` with as much room, then over llama-server. Requests have random token ids. The artifact needs a tokenizer,
since the server gives text.

The goals: with HTTP at least 97 % of the output tokens/s without it, with 100 callers or more 95 %; the median first token at
most 5 ms later; and no slower than llama-server.

Exit status: 0 all was measured, nothing failed, and every goal held; 1 not so; 2 an error.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_batch import device_of
from bench_commands import fail, filled_table, numbers, ostinato, over_llama, threads_of, told
from check_speed import Finding
from server_client import HOST, HungError, serving

from ostinato.delegate.errors import OstinatoError

LEAST_SHARE, LEAST_SHARE_OF_MANY, MANY = 0.97, 0.95, 100
MOST_LATER_MS = 5.0
# A large GGUF is read and copied to the GPU.
LOAD_SECONDS = 300


@dataclass(frozen=True)
class Row:
    """One number of callers: output tokens/s and the median milliseconds to the first token, without HTTP and with it, and
    those of llama.cpp's server."""

    callers: int
    speed: float
    first_ms: float
    http_speed: float
    http_first_ms: float
    itl_ms: float
    p99_itl_ms: float
    failed: int
    peer_speed: float | None = None
    peer_first_ms: float | None = None

    @property
    def share(self) -> float:
        return self.http_speed / self.speed


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    try:
        on_gpu = device_of(arguments.artifact) == "cuda"
    except OstinatoError as error:
        fail(str(error))
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    graph = "on" if arguments.cuda_graph else "off"
    alone = load(arguments, str(arguments.artifact), "--cuda_graph", graph)
    room = ["--sessions", str(alone[0]["sessions"]), "--kv-tokens", str(alone[0]["kv_tokens"])]
    words_of_server = [*room, "--cuda_graph", graph, "--no-log-requests"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "server.log"
            with serving(arguments.artifact, log, words_of_server, patience=LOAD_SECONDS) as server:
                served = load(arguments, "--url", server.url)
    except HungError as error:
        fail(str(error))
    peers: list[dict[str, Any] | None] = [None] * len(alone)
    if arguments.gguf:
        with llama_serving(arguments, on_gpu) as url:
            peers = [*load(arguments, "--url", url)]
    rows = [row_of(*three) for three in zip(alone, served, peers, strict=True)]
    first = alone[0]
    print(f"\n{first['device']}, torch {first['torch']}; about {arguments.n_prompt} + {arguments.n_gen} tokens each")
    print(f"\n{render(rows)}\n")
    if arguments.json:
        found = [asdict(row) | {"share": row.share} for row in rows]
        arguments.json.write_text(json.dumps({"rows": found, "alone": alone, "served": served, "peers": peers}) + "\n")
    return 0 if arguments.skip_goals else told(findings(rows))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--cuda_graph", "--cuda-graph", action="store_true")
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32, 64, 128], metavar="N,N")
    parser.add_argument("-p", "--n-prompt", type=int, default=1024)
    parser.add_argument("-n", "--n-gen", type=int, default=256)
    parser.add_argument("--requests", type=int, help="of each number of callers (default: as `ostinato bench --load`)")
    parser.add_argument("--llama-server", type=Path, metavar="FILE")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, help="of both on a CPU (default: as many as there are cores)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--skip-goals", action="store_true")
    arguments = parser.parse_args(words)
    if (arguments.llama_server is None) != (arguments.gguf is None):
        parser.error("--llama-server and --gguf go together")
    arguments.concurrency = sorted({*arguments.concurrency})
    return arguments


# --- measuring


def load(arguments: argparse.Namespace, *words: str) -> list[dict[str, Any]]:
    """The records of `ostinato bench --load`, one per number of callers."""
    given = ["--load", "--concurrency", ",".join(map(str, arguments.concurrency)), "--output", "json"]
    given += ["-p", str(arguments.n_prompt), "-n", str(arguments.n_gen)]
    if arguments.requests is not None:
        given += ["--requests", str(arguments.requests)]
    records: list[dict[str, Any]] = json.loads(ostinato("bench", *words, *given))
    for record in records:
        if not record["completed"]:
            fail(f"all requests of {record['max_concurrency']} callers failed: {record['error']}")
    return records


@contextmanager
def llama_serving(arguments: argparse.Namespace, on_gpu: bool) -> Iterator[str]:
    """Run llama-server with room for the most callers, and yield its address."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    callers = max(arguments.concurrency)
    # Lengths are up to 1.2 times their means.
    each = int(1.2 * (arguments.n_prompt + arguments.n_gen)) + 64
    where = ["-ngl", "99", "-b", "2048", "-ub", "2048"] if on_gpu else threads_of(arguments.threads)
    command = [str(arguments.llama_server), "-m", str(arguments.gguf), *where, "-fa", "on", "--port", str(port)]
    command += ["-np", str(callers), "-c", str(callers * each), "--no-webui"]
    print(f"$ {' '.join(command)}", file=sys.stderr, flush=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url, end = f"http://{HOST}:{port}", time.monotonic() + LOAD_SECONDS
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > end:
                    fail(f"{' '.join(command)} does not answer")
                time.sleep(0.2)
            yield url
        finally:
            process.kill()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def row_of(alone: dict[str, Any], served: dict[str, Any], peer: dict[str, Any] | None) -> Row:
    return Row(
        alone["max_concurrency"],
        alone["output_throughput"],
        alone["median_ttft_ms"],
        served["output_throughput"],
        served["median_ttft_ms"],
        served["median_itl_ms"],
        served["p99_itl_ms"],
        alone["failed"] + served["failed"],
        None if peer is None else peer["output_throughput"],
        None if peer is None else peer["median_ttft_ms"],
    )


# --- what was found


def findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for row in rows:
        least = LEAST_SHARE if row.callers < MANY else LEAST_SHARE_OF_MANY
        later = row.http_first_ms - row.first_ms
        found.append(
            Finding(
                f"{row.callers}: tokens/s with HTTP", f"{row.share:.1%}", row.share >= least, f"{least:.0%} or more"
            )
        )
        wanted = f"{MOST_LATER_MS:g} ms later or less"
        found.append(Finding(f"{row.callers}: first token", f"{later:+.1f} ms", later <= MOST_LATER_MS, wanted))
        if row.failed:
            found.append(Finding(f"{row.callers}: failed", f"{row.failed} requests", False, "0"))
        if row.peer_speed is not None:
            found.append(over_llama(str(row.callers), row.http_speed / row.peer_speed))
    return found


def render(rows: Sequence[Row]) -> str:
    columns: dict[str, Any] = dict.fromkeys(
        (
            *("callers", "tokens/s", "with HTTP", "share", "first token, ms", "with HTTP, ms"),
            *("between tokens, ms", "p99", "llama-server", "its first, ms", "ratio"),
        ),
        "right",
    )
    return filled_table(
        columns,
        [
            {
                "callers": str(row.callers),
                "tokens/s": f"{row.speed:,.1f}",
                "with HTTP": f"{row.http_speed:,.1f}",
                "share": f"{row.share:.1%}",
                "first token, ms": f"{row.first_ms:,.1f}",
                "with HTTP, ms": f"{row.http_first_ms:,.1f}",
                "between tokens, ms": f"{row.itl_ms:.2f}",
                "p99": f"{row.p99_itl_ms:.2f}",
                "llama-server": "" if row.peer_speed is None else f"{row.peer_speed:,.1f}",
                "its first, ms": "" if row.peer_first_ms is None else f"{row.peer_first_ms:,.1f}",
                "ratio": "" if row.peer_speed is None else f"{row.http_speed / row.peer_speed:.2f}",
            }
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
