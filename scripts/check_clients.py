#!/usr/bin/env python3
"""Ask a server of the capitals model with litellm, lm-eval and aiperf. See check_clients.sh, which installs them.

    python scripts/check_clients.py ARTIFACT --clients DIR

litellm asks for chats and completions, whole and as events. lm-eval takes log-probabilities of capitals after "The capital
of FRANCE is" (echo, prompts as token ids): the right one of four must be the likeliest; and has the sentence written to its
end. It has no tokenizer but the server's. aiperf sends requests of 64 and 32 tokens.

Exit status: 0 all was answered right, 1 something was not, 2 an error.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_commands import fail, told
from check_speed import Finding
from server_client import serving

HERE = Path(__file__).resolve().parent
CAPITALS = HERE / "capitals.csv"
CHOICES, REQUESTS = 4, 24
# JSON is YAML, too.
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "The capital of {{country}} is",
    "num_fewshot": 0,
}
BY_CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "right"}
BY_TEXT = {
    "output_type": "generate_until",
    "doc_to_target": "{{capital}}",
    "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 24},
    "filter_list": [{"name": "text", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, metavar="ARTIFACT")
    parser.add_argument("--clients", type=Path, required=True, metavar="DIR", help="environment of the clients")
    arguments = parser.parse_args(words)
    programs = arguments.clients / "bin"
    if not (programs / "aiperf").exists():
        fail(f"{arguments.clients} has no aiperf: see check_clients.sh")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        with serving(arguments.artifact, logs / "server.log", ["--served-model-name", "capitals"]) as server:
            found = [
                *litellm(programs, server.url),
                *lm_eval(programs, server.url, logs),
                *aiperf(programs, server.url, arguments.artifact, logs),
            ]
        log = (logs / "server.log").read_text()
    found.append(Finding("server: tracebacks", str(log.count("Traceback")), "Traceback" not in log, "0"))
    for one in found:
        print(f"{one.what:<48}{one.found}")
    return told(found)


def litellm(programs: Path, url: str) -> list[Finding]:
    """One finding for each thing that litellm is asked for."""
    # litellm prints advice before.
    answers = json.loads(run(programs / "python", HERE / "ask_litellm.py", url).splitlines()[-1])
    return [Finding(f"litellm: {what}", str(got), got == wanted, str(wanted)) for what, got, wanted in answers]


def lm_eval(programs: Path, url: str, folder: Path) -> list[Finding]:
    """How many capitals are right, by log-probability and as text."""
    data = folder / "capitals.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in questions()))
    for name, more, metrics in (
        ("capitals_choice", BY_CHOICE, ("acc", "acc_norm")),
        ("capitals_text", BY_TEXT, ("exact_match",)),
    ):
        kinds = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics]
        task = TASK | more | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}, "metric_list": kinds}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    run(
        *(programs / "lm_eval", "--model", "local-completions", "--include_path", folder),
        *("--model_args", f"base_url={url}/v1/completions,model=capitals,num_concurrent=8"),
        *("--tasks", "capitals_choice,capitals_text", "--output_path", folder / "lm_eval"),
    )
    (path,) = (folder / "lm_eval").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    return [
        Finding(f"lm-eval: {task}, {metric.partition(',')[0]}", f"{value:.3f}", value >= least, f"{least} or more")
        for task, least in (("capitals_choice", 1.0), ("capitals_text", 0.97))
        for metric, value in results[task].items()
        if metric.startswith(("acc,", "acc_norm,", "exact_match,"))
    ]


def questions() -> list[dict[str, Any]]:
    """One for each country: the right capital among others."""
    with CAPITALS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found, dice = [], random.Random(0)
    for row in rows:
        others = sorted({other["capital"] for other in rows} - {row["capital"]})
        choices = [row["capital"], *dice.sample(others, CHOICES - 1)]
        dice.shuffle(choices)
        found.append({**row, "choices": choices, "right": choices.index(row["capital"])})
    return found


def aiperf(programs: Path, url: str, artifact: Path, folder: Path) -> list[Finding]:
    """Whether all requests were answered with as many tokens as were asked for."""
    run(
        *(programs / "aiperf", "profile", "--model", "capitals", "--url", url, "--endpoint-type", "completions"),
        *("--streaming", "--tokenizer", artifact.resolve(), "--use-server-token-count", "--random-seed", 1),
        *("--concurrency", 4, "--request-count", REQUESTS, "--extra-inputs", "ignore_eos:true"),
        *("--synthetic-input-tokens-mean", 64, "--output-tokens-mean", 32),
        *("--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", folder / "aiperf"),
    )
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    count, tokens = (int(report[name]["avg"]) for name in ("request_count", "output_sequence_length"))
    speed, first = report["output_token_throughput"]["avg"], report["time_to_first_token"]["p50"]
    return [
        Finding("aiperf: requests answered", str(count), count == REQUESTS, str(REQUESTS)),
        Finding("aiperf: tokens of an answer", str(tokens), tokens == 32, "32"),
        Finding("aiperf: output", f"{speed:,.0f} tokens/s, first token after {first:.1f} ms", True, ""),
    ]


def run(*words: object) -> str:
    """Run a client, and return what it prints."""
    command = [str(word) for word in words]
    print(f"$ {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail(
            f"{command[0]} has failed with exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
