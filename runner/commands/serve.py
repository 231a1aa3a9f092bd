"""Serve an artifact over HTTP, with OpenAI's interface: /v1/chat/completions, /v1/completions and more.

It needs `pip install 'ostinato[serve]'`. Progress, the line that says it is ready, and one line for each request go to
stderr; prompts and answers are not logged. SIGTERM and Ctrl-C let requests go on for --drain-seconds, and refuse new ones; a
second signal ends them.

Exit status: 0 ended by a signal, 1 the engine has ended, 2 an error in the arguments or the files, 130 interrupted while
loading.
"""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import OptionError
from ostinato.runner.scheduler.options import DEFAULT_MAX_WAITING, check_options

from .options import NO_GRAPH_NOTE, add_load_options, capacity_of, say

# Callers that can be answered at a time.
_SESSIONS_GPU, _SESSIONS_CPU = 64, 8
_GPU_MEMORY_FRACTION = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", help="artifact folder")
    for name, kind, default, metavar, text in (
        ("--host", str, "127.0.0.1", "H", "where to listen (default: %(default)s, for this machine alone)"),
        ("--port", int, 8000, "P", "default: %(default)s; 0: any free one"),
        (
            "--api-key-file",
            Path,
            None,
            "FILE",
            "keys, one on each line, of which requests must give one (default: that in OSTINATO_API_KEY, if any)",
        ),
        ("--served-model-name", str, None, "NAME", "the model's name for clients (default: the folder's)"),
        (
            "--max-waiting",
            int,
            DEFAULT_MAX_WAITING,
            "N",
            "requests that wait; more get status 429 (default: %(default)s)",
        ),
        (
            "--max-step-ms",
            float,
            None,
            "T",
            "how long a step with prompts should take (default: 16, CPU: 100, experts on the host: 250)",
        ),
        ("--host-cache-bytes", int, 0, "N", "the host's memory for the prefix cache, in bytes (default: %(default)s)"),
        (
            "--session-dir",
            Path,
            None,
            "DIR",
            "have /v1/sessions, with their files in this folder (default: there are none)",
        ),
        ("--session-ttl", float, 3600.0, "S", "idle sessions leave memory after S seconds (default: %(default)g)"),
        ("--drain-seconds", float, 30.0, "S", "how long requests may go on after SIGTERM (default: %(default)g)"),
    ):
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument(
        "--cuda_graph",
        "--cuda-graph",
        choices=("on", "off"),
        help="take the model through warmup -> capture -> replay (default: on with a GPU)",
    )
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute each prompt from its first token on")
    parser.add_argument("--no-log-requests", action="store_true", help="log no line for each request")
    parser.add_argument("--log-prompts", action="store_true", help="log prompts and answers, too")
    add_load_options(parser, f"{_SESSIONS_CPU}, with a GPU {_SESSIONS_GPU}")


def main(arguments: argparse.Namespace) -> int:
    try:
        from ostinato.runner.server.gate import read_keys
        from ostinato.runner.server.serving import ServeOptions, serve
    except ImportError as error:
        raise OptionError(f"serve needs {error.name}: pip install 'ostinato[serve]'") from error
    if not 0 <= arguments.port < 65536:
        raise OptionError(f"--port takes 0 to 65535, got {arguments.port}")
    for name in ("drain_seconds", "session_ttl"):
        if not getattr(arguments, name) >= 0:
            raise OptionError(f"--{name.replace('_', '-')} takes 0 or more, got {getattr(arguments, name)}")
    check_options(
        *(arguments.max_step_ms, arguments.max_waiting, arguments.host_cache_bytes),
        ("--max-step-ms", "--max-waiting", "--host-cache-bytes"),
    )
    keys = read_keys(arguments.api_key_file)
    if not keys and not _is_loopback(arguments.host):
        say(
            f"warning: anybody who reaches {arguments.host} can use this server: give --api-key-file, or OSTINATO_API_KEY"
        )
    return serve(
        ServeOptions(
            arguments.artifact,
            arguments.host,
            arguments.port,
            arguments.served_model_name,
            tuple(keys),
            arguments.drain_seconds,
            not arguments.no_log_requests,
            arguments.log_prompts,
            arguments.session_dir,
            arguments.session_ttl,
            _engine_options(arguments),
        )
    )


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `Engine.load`. By default there is room for many callers: on a GPU in most of its memory."""
    parsed = open_artifact(*artifact_paths(arguments.artifact), verify=False)[0]
    on_gpu = next(iter(parsed.methods.values())).target.device == "cuda"
    if arguments.cuda_graph == "on" and not on_gpu:
        say(NO_GRAPH_NOTE)
    capacity = capacity_of(arguments)
    if capacity.sessions is None:
        capacity = replace(capacity, sessions=_SESSIONS_GPU if on_gpu else _SESSIONS_CPU)
    if on_gpu and capacity.kv_tokens is None and capacity.gpu_memory_fraction is None:
        capacity = replace(capacity, gpu_memory_fraction=_GPU_MEMORY_FRACTION)
    if capacity.snapshots is None and capacity.gpu_memory_fraction is None:
        # The state behind each caller's last answer and its prompt, and behind what all share.
        capacity = replace(capacity, snapshots=2 * (capacity.sessions or 1) + 2)
    return {
        **asdict(capacity),
        "cuda_graph": on_gpu if arguments.cuda_graph is None else arguments.cuda_graph == "on",
        "prefault": arguments.prefault,
        "digest": arguments.digest,
        "max_step_ms": arguments.max_step_ms,
        "max_waiting": arguments.max_waiting,
        "host_cache_bytes": arguments.host_cache_bytes,
        "prefix_caching": not arguments.no_prefix_caching,
    }


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
