"""`/metrics` with prometheus_client's own parser."""

from __future__ import annotations

import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from .conftest import QUESTION, Server


def metrics(server: Server) -> dict[str, float]:
    """Values by name; of histograms, those of their sums and counts."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["model_name"] == "capitals" for sample in samples)
    return {sample.name: sample.value for sample in samples if not sample.name.endswith(("_bucket", "_created"))}


def test_metrics(server: Server, client: Any) -> None:
    before = metrics(server)
    options: Any = {"model": "capitals", "messages": QUESTION, "temperature": 0}
    answer = client.chat.completions.create(**options)
    list(client.chat.completions.create(**options, stream=True))
    after = metrics(server)
    gained = {name: value - before[name] for name, value in after.items() if name in before}
    usage = answer.usage
    assert gained["vllm:prompt_tokens_total"] == 2 * usage.prompt_tokens
    assert gained["vllm:generation_tokens_total"] == 2 * usage.completion_tokens
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert gained[f"vllm:{name}_seconds_count"] == 2 and gained[f"vllm:{name}_seconds_sum"] > 0, name
    assert gained["vllm:request_prompt_tokens_count"] == 2
    assert gained["vllm:request_time_per_output_token_seconds_count"] == 2
    assert gained["vllm:prefix_cache_hits_total"] > 0
    assert (
        gained["vllm:prefix_cache_queries_total"]
        == gained["vllm:prefix_cache_hits_total"] + gained["ostinato:computed_prompt_tokens_total"]
    )
    assert gained["ostinato:steps_total"] >= 2 * (usage.completion_tokens - 1)
    assert after["ostinato:free_sessions"] == after["ostinato:sessions"] == 8
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert 0 < after["vllm:kv_cache_usage_perc"] < 1
