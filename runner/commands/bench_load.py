"""`ostinato bench --load`: its options, and how it runs. See `runner/bench/load_bench.py` for what is measured."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ostinato.delegate.artifact.files import open_artifact
from ostinato.delegate.artifact.names import META_MAX_SEQ_LEN, META_PAGE_SIZE, META_VOCAB_SIZE
from ostinato.delegate.artifact.paths import artifact_paths
from ostinato.delegate.errors import ArtifactError, OptionError
from ostinato.runner.async_engine import AsyncEngine
from ostinato.runner.bench.batch_bench import check_length
from ostinato.runner.bench.bench import with_kv_tokens
from ostinato.runner.bench.device import device_name
from ostinato.runner.bench.load_bench import EngineEndpoint, Load, LoadMeasurement, LoadSpec, measure_loads
from ostinato.runner.bench.load_report import draw_loads, render_loads
from ostinato.runner.model.buckets import PREFILL_BUCKETS
from ostinato.runner.scheduler.options import DEFAULT_MAX_WAITING, check_options

from .bench_options import buckets_of, check_files, check_sampling, sizes
from .options import NO_GRAPH_NOTE, capacity_of, say

_PROMPT, _ANSWER, _CONCURRENCY = 1024, 256, (1, 8, 32, 64, 128)
# What vLLM calls 0.2: lengths from 80 % to 120 % of the mean.
_RANGE_RATIO = 0.2
# Sessions that there is room for where only --rate is given.
_SESSIONS_OF_RATE = 64
# The most bytes that are read of --api-key-file.
_KEY_BYTES = 4096

# Options of --load; those of them that belong to --url; those that an engine has, and a server would not hear of.
_LOAD_OPTIONS = ("concurrency", "rate", "range_ratio", "requests", "duration", "turns", "shared_prefix", "seed")
_URL_OPTIONS = ("model", "vocab_size", "api_key_file")
_LOAD_ENGINE_OPTIONS = ("max_step_ms", "max_waiting", "host_cache_bytes", "no_prefix_caching")
_ENGINE_OPTIONS = (
    *_LOAD_ENGINE_OPTIONS,
    *("cuda_graph", "prefill_buckets", "sessions", "kv_tokens", "gpu_memory_fraction", "snapshots", "prefault"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        action="store_true",
        help="a load test: callers send requests with prompts of about -p tokens and answers of -n (default: "
        f"{_PROMPT}, {_ANSWER}), all random, at temperature 0. --sessions and --kv-tokens are enough for the most callers by "
        "default",
    )
    group = parser.add_argument_group("with --load")
    for name, kind, metavar, text in (
        (
            "--concurrency",
            str,
            "N,N",
            "numbers of callers, measured one after the other; each sends its next request when its last one has ended "
            f"(default: {','.join(map(str, _CONCURRENCY))})",
        ),
        ("--rate", str, "R,R", "instead: requests per second, at random times (a Poisson process)"),
        (
            "--range-ratio",
            float,
            "F",
            "draw each length uniformly from mean * (1 - F) to mean * (1 + F), as vLLM's --random-range-ratio does (SGLang's "
            f"draws from F * length to length; default: {_RANGE_RATIO})",
        ),
        ("--requests", int, "N", "requests for each load (default: 4 per caller, at least 16; or those of 30 seconds)"),
        ("--duration", float, "S", "begin no conversation after S seconds"),
        (
            "--turns",
            int,
            "N",
            "requests of a conversation, each of which begins with all that was said before (default: 1). With --rate, "
            "conversations come at that rate",
        ),
        (
            "--shared-prefix",
            int,
            "N",
            "tokens before the prompt of each conversation that are the same for all, as vLLM's --random-prefix-len "
            "(default: 0)",
        ),
        ("--seed", int, "N", "seed of tokens, lengths and times (default: 0)"),
        (
            "--max-step-ms",
            float,
            "MS",
            "see Engine.load: how long a step with prompts should take (default: 16, CPU: 100, experts on the host: 250)",
        ),
        ("--max-waiting", int, "N", "see Engine.load: the most requests that wait (default: 1024)"),
        (
            "--host-cache-bytes",
            int,
            "N",
            "see Engine.load: bytes of the host's memory for the prefix cache (default: 0)",
        ),
    ):
        group.add_argument(name, type=kind, metavar=metavar, help=text)
    group.add_argument(
        "--no-prefix-caching", action="store_true", default=None, help="compute each prompt from its first token on"
    )
    group.add_argument(
        "--url",
        metavar="URL",
        help="instead of ARTIFACT: send the requests to the server with OpenAI's interface at http://HOST:PORT, as `ostinato "
        "serve`, llama.cpp and vLLM are (needs ostinato[serve]). It must take ignore_eos, and return_token_ids with --turns",
    )
    group.add_argument(
        "--model", metavar="NAME", help="with --url: the model (default: the first that the server lists)"
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="with --url: number of token ids, if the server does not say it"
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="with --url: a file that holds the server's API key"
    )


def check_not_given(arguments: argparse.Namespace) -> None:
    """Raises OptionError: an option of --load without it."""
    given = (*_LOAD_OPTIONS, *_LOAD_ENGINE_OPTIONS, "url", *_URL_OPTIONS)
    _refuse(arguments, given, "is an option of --load: give --load, too")


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises OptionError: one of these options is given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:
            raise OptionError(f"--{name.replace('_', '-')} {why}")


def main(arguments: argparse.Namespace) -> int:
    spec = _spec(arguments)
    rows, subject = _of_artifact(arguments, spec) if arguments.url is None else _of_url(arguments, spec)
    print(render_loads(spec, rows, subject, arguments.output))
    if arguments.save:
        arguments.save.write_text(render_loads(spec, rows, subject, "json") + "\n")
    if arguments.plot:
        draw_loads(spec, rows, subject, arguments.plot)
        say(f"wrote {arguments.plot}")
    return 0


def _say_one(row: LoadMeasurement) -> None:
    say(f"{row.load.name:>8} {row.speed:>10,.1f} tokens/s {row.seconds:>8.1f} s {row.failed:>4} failed")


def _date() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _of_url(arguments: argparse.Namespace, spec: LoadSpec) -> tuple[list[LoadMeasurement], dict[str, Any]]:
    """The measurements, and what they are of."""
    _refuse(arguments, _ENGINE_OPTIONS, "is for an engine here: it does not go with --url")
    url = _base_url(arguments.url)
    if arguments.vocab_size is not None and arguments.vocab_size < 1:
        raise OptionError(f"--vocab-size must be 1 or more, got {arguments.vocab_size}")
    if importlib.util.find_spec("aiohttp") is None:
        raise OptionError("--url needs aiohttp: pip install 'ostinato[serve]'")
    key = None if arguments.api_key_file is None else _api_key(arguments.api_key_file)
    check_files(arguments)
    from ostinato.runner.bench.http_endpoint import HttpEndpoint

    async def measure() -> tuple[list[LoadMeasurement], str]:
        async with HttpEndpoint(url, arguments.model, key, spec.sampling, spec.turns > 1) as endpoint:
            vocabulary = arguments.vocab_size or endpoint.vocab_size
            if vocabulary is None:
                raise OptionError(f"{url} does not say how many token ids {endpoint.model} has: give --vocab-size")
            if endpoint.max_model_len is not None and spec.positions > endpoint.max_model_len:
                raise OptionError(
                    f"a conversation would have {spec.positions} tokens, {endpoint.model} takes {endpoint.max_model_len}: "
                    "ask for less"
                )
            say(f"sending to {url}")
            return await measure_loads(endpoint, spec, vocabulary, _say_one), endpoint.model

    rows, model = asyncio.run(measure())
    return rows, {"url": url, "model": model, "date": _date()}


def _base_url(text: str) -> str:
    """What stands before /v1 in the server's addresses."""
    try:
        parts = urlsplit(text)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment or not text.isprintable():
        raise OptionError(f"--url takes an address such as http://localhost:8000, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _api_key(path: Path) -> str:
    with path.open("rb") as file:
        key = file.read(_KEY_BYTES).decode("latin-1").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise OptionError(f"--api-key-file {path}: it must hold one key, a line of ASCII text")
    return key


def _of_artifact(arguments: argparse.Namespace, spec: LoadSpec) -> tuple[list[LoadMeasurement], dict[str, Any]]:
    """The measurements, and what they are of."""
    parsed = open_artifact(*artifact_paths(arguments.artifact), verify=False)[0]
    on_gpu = next(iter(parsed.methods.values())).target.device == "cuda"
    if META_VOCAB_SIZE not in parsed.metadata or META_MAX_SEQ_LEN not in parsed.metadata:
        raise ArtifactError(
            "bench --load needs to know the program's vocabulary and max_seq_len, which it lacks: export it with "
            f"{META_VOCAB_SIZE} and {META_MAX_SEQ_LEN} in `metadata`"
        )
    check_length(spec.positions, int(parsed.metadata[META_MAX_SEQ_LEN]))
    check_files(arguments)
    options = _engine_options(arguments, spec, parsed.metadata, on_gpu)
    if options["cuda_graph"] and not on_gpu:
        say(NO_GRAPH_NOTE)

    async def measure() -> tuple[list[LoadMeasurement], dict[str, Any]]:
        say(f"loading {arguments.artifact}")
        async with AsyncEngine(arguments.artifact, **options) as engine:
            endpoint = EngineEndpoint(engine, spec.sampling)
            rows = await measure_loads(endpoint, spec, int(parsed.metadata[META_VOCAB_SIZE]), _say_one)
            return rows, await engine.describe()

    rows, engine = asyncio.run(measure())
    return rows, {
        "artifact": arguments.artifact,
        "cuda_graph": options["cuda_graph"],
        "sessions": engine["capacity"]["slots"],
        "kv_tokens": max((group["pages"] for group in engine["capacity"]["groups"]), default=0)
        * engine["capacity"]["page_size"],
        "max_step_ms": arguments.max_step_ms,
        # The engine has given the device back: this process took nothing of it meanwhile.
        "device": device_name(torch.device("cuda" if on_gpu else "cpu")),
        "torch": torch.__version__,
        "date": _date(),
    }


def _spec(arguments: argparse.Namespace) -> LoadSpec:
    """Raises OptionError: options that do not fit together, or are out of range."""
    if arguments.url is None:
        _refuse(arguments, _URL_OPTIONS, "is an option of --url: give --url, too")
    for name in ("batch", "mixed", "n_depth"):
        if getattr(arguments, name) is not None:
            raise OptionError(f"--load does not go with {'-d' if name == 'n_depth' else f'--{name}'}")
    if arguments.cuda_graph is not None and len(arguments.cuda_graph) != 1:
        raise OptionError("--load takes --cuda_graph on or off, not both")
    if arguments.concurrency is not None and arguments.rate is not None:
        raise OptionError("--load takes --concurrency or --rate, not both")
    prompts = sizes("-p", arguments.n_prompt) or [_PROMPT]
    answers = sizes("-n", arguments.n_gen) or [_ANSWER]
    sampling = arguments.sampling or [{}]
    if len(prompts) != 1 or len(answers) != 1 or len(sampling) != 1:
        raise OptionError("with --load, -p, -n and --sampling are given once")
    check_sampling(sampling[0])
    max_waiting = DEFAULT_MAX_WAITING if arguments.max_waiting is None else arguments.max_waiting
    check_options(
        *(arguments.max_step_ms, max_waiting, arguments.host_cache_bytes or 0),
        ("--max-step-ms", "--max-waiting", "--host-cache-bytes"),
    )
    if arguments.rate is not None:
        loads = [Load(rate=rate) for rate in _rates(arguments.rate)]
    else:
        given = None if arguments.concurrency is None else [arguments.concurrency]
        loads = [Load(callers) for callers in sorted({*(sizes("--concurrency", given) or _CONCURRENCY)})]
    return LoadSpec(
        loads=tuple(loads),
        prompt=prompts[0],
        answer=answers[0],
        range_ratio=_RANGE_RATIO if arguments.range_ratio is None else arguments.range_ratio,
        requests=arguments.requests,
        duration=arguments.duration,
        turns=1 if arguments.turns is None else arguments.turns,
        shared_prefix=arguments.shared_prefix or 0,
        seed=arguments.seed or 0,
        sampling=sampling[0],
    )


def _rates(text: str) -> list[float]:
    try:
        return sorted({float(word) for word in text.split(",")})
    except ValueError:
        raise OptionError(f"--rate takes requests per second, separated by commas; got {text!r}") from None


def _engine_options(
    arguments: argparse.Namespace, spec: LoadSpec, metadata: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Options of `Engine.load`. By default there is room for what all callers can have at a time."""
    capacity, buckets = capacity_of(arguments), buckets_of(arguments)
    sessions = capacity.sessions or spec.max_concurrency or _SESSIONS_OF_RATE
    page_size = int(metadata.get(META_PAGE_SIZE, 1))
    # The scheduler leaves a page free for each session that steps. A warm-up captures a prompt of the longest bucket.
    pages = max(
        sessions * (-(-spec.positions // page_size) + 1),
        -(-min(max(buckets or PREFILL_BUCKETS), int(metadata[META_MAX_SEQ_LEN])) // page_size) + 1,
    )
    capacity = with_kv_tokens(replace(capacity, sessions=sessions), pages * page_size)
    if (spec.turns > 1 or spec.shared_prefix) and capacity.snapshots is None and capacity.gpu_memory_fraction is None:
        # The state behind each caller's last answer and its prompt, and behind what all share.
        capacity = replace(capacity, snapshots=2 * sessions + 2)
    options = {
        **asdict(capacity),
        "digest": arguments.digest,
        "cuda_graph": on_gpu if arguments.cuda_graph is None else arguments.cuda_graph[0],
        "prefault": arguments.prefault,
        "prefill_buckets": buckets,
        "max_step_ms": arguments.max_step_ms,
        "host_cache_bytes": arguments.host_cache_bytes or 0,
        "prefix_caching": not arguments.no_prefix_caching,
    }
    return options if arguments.max_waiting is None else options | {"max_waiting": arguments.max_waiting}
