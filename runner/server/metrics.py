"""Metrics for `/metrics`, in Prometheus's format: with vLLM's names where it has them, so that its dashboards show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Upper bounds of what is counted together, in seconds: to the first token, between tokens, and of whole requests.
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(2**power for power in range(20))

# Name -> what it is, and where `Engine.describe` has it.
_GAUGES = {
    "vllm:num_requests_running": ("answers that have a session", "scheduler", "running"),
    "vllm:num_requests_waiting": ("answers that wait for a session", "scheduler", "waiting"),
    "vllm:kv_cache_usage_perc": ("share of the pages that is taken, prefixes included; 1 is all", "capacity", "usage"),
    "ostinato:sessions": ("sessions that there is room for", "capacity", "slots"),
    "ostinato:free_sessions": ("sessions that nobody has", "capacity", "free_slots"),
    "ostinato:free_pages": ("pages that nobody has, in the group with the fewest", "capacity", "free_pages"),
    "ostinato:prefix_cache_device_bytes": ("state of prefixes on the device", "prefix_cache", "device_bytes"),
    "ostinato:prefix_cache_host_bytes": ("state of prefixes in the host's memory", "prefix_cache", "host_bytes"),
    "ostinato:captured_plans": ("plans that were captured and can be replayed", "methods", "plans"),
}
_COUNTERS = {
    "vllm:num_preemptions": ("answers that lost their place on the device", "scheduler", "put_back"),
    "vllm:prefix_cache_queries": ("prompt tokens that were looked up in the prefix cache", "scheduler", "queries"),
    "vllm:prefix_cache_hits": ("prompt tokens that were there", "scheduler", "reused_tokens"),
    "ostinato:steps": ("steps of the model", "scheduler", "steps"),
    "ostinato:computed_prompt_tokens": ("prompt tokens that were computed", "scheduler", "prompt_tokens"),
    "ostinato:refused_requests": ("requests that found too many others waiting", "scheduler", "refused"),
    "ostinato:state_files_written": ("states that prefixes had no room for, in files now", "state_files", "written"),
    "ostinato:state_files_read": ("states that came back from files", "state_files", "read"),
    "ostinato:state_files_given_up": (
        "states that were forgotten, as they could not be written",
        "state_files",
        "given_up",
    ),
    "ostinato:graph_replays": ("calls that replayed a captured graph", "methods", "replays"),
    "ostinato:graph_fallbacks": ("captures that failed", "methods", "fallbacks"),
}


class Metrics:
    """Counts of a server, and of the engine behind it.

    Args:
        model: the model's name, a label of all of them.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, text, list(labels), registry=self._registry, buckets=buckets).labels(**labels)

        def counter(name: str, text: str) -> Any:
            return Counter(name, text, list(labels), registry=self._registry).labels(**labels)

        self._first = histogram("vllm:time_to_first_token_seconds", "from a request to its first token", _FIRST)
        self._between = histogram("vllm:inter_token_latency_seconds", "between two tokens of an answer", _BETWEEN)
        self._each = histogram("vllm:request_time_per_output_token_seconds", "per token after the first", _BETWEEN)
        self._queue = histogram("vllm:request_queue_time_seconds", "until an answer has a session", _WHOLE)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "from a request to its last token", _WHOLE)
        self._prompts = histogram("vllm:request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._answers = histogram("vllm:request_generation_tokens", "tokens of an answer", _TOKENS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "prompt tokens of requests")
        self._output_tokens = counter("vllm:generation_tokens", "tokens of answers")
        self._ended = Counter(
            "vllm:request_success", "answers by why they ended", [*labels, "finished_reason"], registry=self._registry
        )
        self._labels = labels
        self._engine = {
            name: Gauge(name, text, list(labels), registry=self._registry).labels(**labels)
            for name, (text, _, _) in _GAUGES.items()
        }
        self._counted = {name: (counter(name, text), 0.0) for name, (text, _, _) in _COUNTERS.items()}

    def begin(self, prompt_tokens: int) -> None:
        """Count a request."""
        self._prompts.observe(prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)

    def first(self, seconds: float, queue_seconds: float) -> None:
        """Count an answer's first token, which came so many seconds after the request."""
        self._first.observe(seconds)
        self._queue.observe(queue_seconds)

    def more(self, seconds: float, tokens: int) -> None:
        """Count tokens that came together, so many seconds after those before them."""
        self._between.observe(seconds / tokens)

    def end(self, seconds: float, decode_seconds: float, tokens: int, reason: str) -> None:
        """Count an answer that has ended.

        Args:
            seconds: since the request.
            decode_seconds: since the first token.
            tokens: number of tokens of the answer.
            reason: why it has ended.
        """
        self._whole.observe(seconds)
        self._answers.observe(tokens)
        self._output_tokens.inc(tokens)
        if tokens > 1:
            self._each.observe(decode_seconds / (tokens - 1))
        self._ended.labels(**self._labels, finished_reason=reason).inc()

    def text(self, described: Mapping[str, Any]) -> bytes:
        """All metrics in Prometheus's text format. `described`: what `Engine.describe` returns."""
        found = _numbers(described)
        for name, (_, part, key) in _GAUGES.items():
            self._engine[name].set(found[part][key])
        for name, (_, part, key) in _COUNTERS.items():
            mine, before = self._counted[name]
            # Another program's counts begin anew.
            mine.inc(max(0.0, found[part][key] - before))
            self._counted[name] = mine, found[part][key]
        return generate_latest(self._registry)


def _numbers(described: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    scheduler, capacity = described["scheduler"], described["capacity"]
    groups = [group for group in capacity["groups"] if group["pages"]]
    methods = described["methods"].values()
    return {
        "scheduler": scheduler
        | {
            "running": scheduler["prefilling"] + scheduler["decoding"],
            "queries": scheduler["prompt_tokens"] + scheduler["reused_tokens"],
        },
        "capacity": capacity
        | {
            "free_pages": min((group["free_pages"] for group in groups), default=0),
            "usage": max((1 - group["free_pages"] / group["pages"] for group in groups), default=0.0),
        },
        "prefix_cache": described["prefix_cache"],
        "state_files": described["state_files"],
        "methods": {
            "plans": sum(len(one["plans"]) for one in methods),
            "replays": sum(one["replays"] for one in methods),
            "fallbacks": sum(one["fallbacks"] for one in methods),
        },
    }
