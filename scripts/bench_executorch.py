"""Measure ExecuTorch's own Qwen3.5 MoE model on one NVIDIA GPU, and print ours beside it.

The network, its Triton kernels and its quantisation are the installed executorch's CUDA path
(executorch.examples.models.qwen3_5_moe). Of ostinato, only the table's writer runs here. Weights are random: int4 in groups,
and int8 for the embedding, as its export.py makes them with --qlinear 4w --qembedding 8w. Its KV cache has 4,096 positions.

tg64 decodes 64 tokens at batch 1 through torch.compile. Each token is sampled on the GPU by the model's own sampler, at the
temperature that its inference.py takes for greedy. The token is fed back and the position advanced on the device, so that no
step waits for the host. "graph": the step is one CUDA graph. "@ d4000": from position 4,000 on. pp512 is one call of its
prefill path. Figures are medians of 5 repetitions after warm-ups.

--ours takes what `ostinato bench ARTIFACT --output json` printed on the same machine. Then rows also have ours, and ours /
theirs; "their" means ExecuTorch's.

stdout carries the table (or JSON); progress, notes and errors go to stderr.
Exit status: 0 done, 1 a test failed (its reason stands in its row), 2 an error in the options, the files or the machine.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from executorch_model import EXAMPLE, KERNELS, PEER_VERSION, BenchError, Variant, build_model, peer, say
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from ostinato.runner.bench.tables import Side, table

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "tests" / "assets" / "configs" / "Qwen3.5-35B-A3B"

DECODE_TOKENS = 64
DEPTHS = (0, 4000)
RUNS = 5
WARMUPS = 3
# Default of ExecuTorch's export. Its attention goes over all positions at any depth, so a larger value would cost it time.
MAX_SEQ_LEN = 4096
# inference.py's stand-in for temperature 0.
GREEDY = 1e-6

T = TypeVar("T")


@dataclass
class Result:
    """Result of one test in one mode. `kind` is "tg" or "pp", `samples` has tokens/s of each repetition, `error` says why it
    is empty."""

    kind: str
    tokens: int
    depth: int
    cuda_graph: bool
    samples: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def test(self) -> str:
        """Name of the test in llama-bench's words: `tg64 @ d4000`."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def mode(self) -> str:
        return "graph" if self.cuda_graph else "no graph"

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


def main() -> int:
    arguments = parse_arguments()
    variant = Variant(arguments.group_size, arguments.dense, arguments.topk)
    try:
        config = read_config(arguments.config, arguments.layers, arguments.group_size)
        ours = load_ours(arguments.ours, config.num_hidden_layers) if arguments.ours else []
        check_machine(ours)
        prefill = arguments.prefill if arguments.prefill and can_prefill() else 0
        results = measure_all(build_model(config, variant), variant, prefill)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    subject = {
        "system": f"executorch {importlib.metadata.version('executorch')} {EXAMPLE.rpartition('.')[2]}",
        "n_layers": config.num_hidden_layers,
        "max_seq_len": MAX_SEQ_LEN,
        **asdict(variant),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if arguments.output == "json":
        records = [as_record(result, our_record(result, ours)) | subject for result in results]
        print(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        print(render_table(subject, results, ours))
    return 1 if any(result.error for result in results) else 0


def parse_arguments() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--config", type=Path, default=DEFAULT_CONFIG, help="config.json, or its folder (default: %(default)s)")
    add("--layers", type=int, metavar="N", help="only the first N layers: to try the script, not to measure")
    sizes = (32, 64, 128, 256)
    add("--group-size", type=int, default=128, choices=sizes, help="weights to a scale (default: %(default)s)")
    add(
        "--dense",
        choices=("tinygemm", "dequant"),
        default="tinygemm",
        help="how its dense linears run, its export.py's --dense-prefill: tinygemm (its default), or its Triton "
        "matrix-vector product in decode and dequantisation with cuBLAS in prefill",
    )
    add(
        "--topk",
        choices=("triton", "aten"),
        default="triton",
        help="how experts are chosen: its Triton kernel, which its lowering puts in aten's place (default), or aten's",
    )
    add("--prefill", type=prompt_length, default=512, metavar="N", help="tokens to prefill; 0: none (default: 512)")
    add("--ours", type=Path, metavar="FILE.json", help="what `ostinato bench ARTIFACT --output json` printed")
    add("--output", choices=("table", "json"), default="table", help="what to print (default: table)")
    return parser.parse_args()


def prompt_length(word: str) -> int:
    # ExecuTorch's prefill begins at two tokens.
    if word.isdecimal() and int(word) != 1 and int(word) <= MAX_SEQ_LEN:
        return int(word)
    raise argparse.ArgumentTypeError(f"0, or 2 to {MAX_SEQ_LEN}, not {word!r}")


def read_config(path: Path, layers: int | None, group_size: int) -> Any:
    """ExecuTorch's Qwen35MoEConfig for the file, cut to `layers` if given."""
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read the config {path}: {error}") from error
    text = content.get("text_config", content) if isinstance(content, dict) else {}
    if "num_experts" not in text:
        # ExecuTorch's reader would take the 35B model's sizes for missing ones.
        raise BenchError(f"{path} has no num_experts: their model is of Qwen3.5's MoE family only")
    config = peer("model").Qwen35MoEConfig.from_hf_config(str(path))
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise BenchError(f"--layers takes 1 to {config.num_hidden_layers} with {path}, got {layers}")
        config.num_hidden_layers = layers
        config.layer_types = config.layer_types[:layers]
    config.max_seq_len = MAX_SEQ_LEN
    for name in ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name) % group_size:
            raise BenchError(f"{name} {getattr(config, name)} is not a multiple of --group-size {group_size}")
    return config


def load_ours(path: Path, n_layers: int) -> list[dict[str, Any]]:
    """The records of `ostinato bench --output json` that can be compared with ExecuTorch's."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read --ours {path}: {error}") from error
    keys = {"test", "n_prompt", "n_depth", "cuda_graph", "median_ts", "n_layers", "device", "artifact", "dtype"}
    if not isinstance(records, list) or not all(isinstance(one, dict) and keys <= one.keys() for one in records):
        raise BenchError(f"--ours {path} is not what `ostinato bench ARTIFACT --output json` prints")
    if others := {one["n_layers"] for one in records} - {n_layers, None}:
        raise BenchError(f"--ours {path} measured {others.pop()} layers, this run is of {n_layers}")
    failed = [one for one in records if one["cuda_graph"] and one.get("fallback_reason")]
    if failed:
        say(f"note: --ours has no graph to compare, its capture failed: {failed[0]['fallback_reason']}")
    return [one for one in records if one not in failed]


def check_machine(ours: list[dict[str, Any]]) -> None:
    if not torch.cuda.is_available():
        raise BenchError(f"their kernels need an NVIDIA GPU; torch {torch.__version__} sees none")
    if (version := importlib.metadata.version("executorch")) != PEER_VERSION:
        say(f"note: executorch {version} is installed; this script was written against {PEER_VERSION}")
    device = torch.cuda.get_device_name()
    if others := {one["device"] for one in ours if device not in one["device"]}:
        say(f"note: --ours was measured on {', '.join(sorted(others))}, not on this {device}")


def can_prefill() -> bool:
    """Whether ExecuTorch's chunked delta rule can be imported. Prints the reason if not."""
    try:
        importlib.import_module(f"{KERNELS}.chunk_gated_delta_rule")
    except Exception as error:  # fla inspects the machine when it is imported, and may raise anything
        say(f"note: no prefill: their chunk_gated_delta_rule, which needs fla-core 0.4.2, does not import: {error}")
        return False
    return True


class DecodeStep:
    """A decode step on static inputs. A call leaves the sampled token and the next position in them, on the device."""

    def __init__(self, network: Callable[..., Tensor], device: str = "cuda") -> None:
        self._network = network
        self._tokens = torch.zeros((1, 1), dtype=torch.long, device=device)
        self._input_pos = torch.zeros(1, dtype=torch.long, device=device)
        self._temperature = torch.full((1,), GREEDY, device=device)

    def __call__(self) -> None:
        # ExecuTorch's sampler returns the token as a float32 [1, 1], exact up to 2^24.
        self._tokens.copy_(self._network(self._tokens, self._input_pos, self._temperature))
        self._input_pos.add_(1)

    def start(self, depth: int) -> None:
        """Set the position to `depth`. At 0 ExecuTorch's model clears its recurrent state by itself."""
        self._tokens.fill_(1)
        self._input_pos.fill_(depth)


@torch.inference_mode()
def measure_all(model: nn.Module, variant: Variant, prefill: int) -> list[Result]:
    """Measure every test, in the order of the table. A test that fails says why, and the next one follows."""
    network = compiled(model, variant.topk)
    select_path(model, variant, prefill=False)
    say("compiling decode")
    results = measure_decode(DecodeStep(network), model)
    if prefill:
        select_path(model, variant, prefill=True)
        say("compiling prefill, and tuning fla's kernels")
        results.append(measured(Result("pp", prefill, 0, False), lambda: prefill_speeds(network, prefill)))
    return results


def compiled(model: nn.Module, topk: str) -> Callable[..., Tensor]:
    """Wrap the model in torch.compile's default mode, as ExecuTorch's inference.py does, but as one graph with fixed shapes.

    It is compiled at its first call.
    """
    backend: Any = inductor_with_triton_topk if topk == "triton" else "inductor"
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)


def inductor_with_triton_topk(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Compile with Inductor, after replacing top-k as ExecuTorch's lowering does in ReplaceEdgeOpWithTritonOpPass."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.topk):
        node.target = torch.ops.triton.topk.default
    graph.recompile()
    return compile_fx(graph, list(inputs))


def select_path(model: nn.Module, variant: Variant, *, prefill: bool) -> None:
    """Switch the model to the kernels of prefill or decode, as ExecuTorch's export does before it traces each."""
    export = peer("export")
    export._set_batched_moe(model, prefill)
    export._set_dequant_prefill(model, prefill and variant.dense == "dequant")


def measure_decode(step: DecodeStep, model: nn.Module) -> list[Result]:
    """Measure both modes at each depth. They share the compiled step: if it fails, both fail."""
    results = []
    run, error = attempt(lambda: warmed_up(step, model))
    for cuda_graph in (False, True):
        if cuda_graph and run:
            run, error = attempt(lambda: captured(step))
        for depth in DEPTHS:
            result = Result("tg", DECODE_TOKENS, depth, cuda_graph, error=error)
            results.append(measured(result, lambda: decode_speeds(step, run, depth)) if run else result)  # noqa: B023
    return results


def warmed_up(step: DecodeStep, model: nn.Module) -> Callable[[], None]:
    """Return the step after warm-up: compiled, and with its kernels tuned. Raises BenchError if its state is not finite."""
    step.start(0)
    for _ in range(WARMUPS):
        step()
    for name, buffer in model.named_buffers():
        if name.endswith(("_state", "_cache")) and not buffer.isfinite().all():
            raise BenchError(f"their model computed what is not finite: {name}")
    return step


def captured(step: DecodeStep) -> Callable[[], None]:
    """Capture the step in a CUDA graph. The step must have run before."""
    step.start(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def decode_speeds(step: DecodeStep, run: Callable[[], None], depth: int) -> list[float]:
    """Tokens per second of each repetition. One repetition more comes first, and is not counted."""
    speeds = []
    for _ in range(1 + RUNS):
        step.start(depth)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            run()
        torch.cuda.synchronize()
        speeds.append(DECODE_TOKENS / (time.perf_counter() - begin))
    return speeds[1:]


def prefill_speeds(network: Callable[..., Tensor], tokens: int, device: str = "cuda") -> list[float]:
    """Tokens per second of each call from position 0, after warm-ups. There is no graph: ExecuTorch captures decode only."""
    input_pos = torch.arange(tokens, device=device)
    temperature = torch.full((1,), GREEDY, device=device)
    speeds = []
    for _ in range(WARMUPS + RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        network(input_pos[None], input_pos, temperature)
        torch.cuda.synchronize()
        speeds.append(tokens / (time.perf_counter() - begin))
    return speeds[WARMUPS:]


def measured(result: Result, speeds: Callable[[], list[float]]) -> Result:
    """Fill the result with its samples, or with the reason why there are none."""
    samples, result.error = attempt(speeds)
    result.samples = samples or []
    speed = f"{result.median:,.1f} tokens/s" if result.median else f"failed: {result.error}"
    say(f"{result.test}, {result.mode}: {speed}")
    return result


def attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or the reason why it failed. stderr gets the whole traceback."""
    try:
        return work(), None
    except Exception as error:  # from ExecuTorch's code, torch's compiler or the driver: the table shows its message
        traceback.print_exc()
        # On one line: the compiler's errors begin with the backend's name, and say what happened in the next line.
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def our_record(result: Result, ours: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Our record of the same kind, depth and mode. For a prompt: of the same length, in any mode, since ExecuTorch has no
    graph for it."""
    prompt = result.tokens if result.kind == "pp" else 0
    alike = [one for one in ours if one["n_depth"] == result.depth and one["n_prompt"] == prompt]
    return next((one for one in alike if prompt or one["cuda_graph"] == result.cuda_graph), None)


def ratio(result: Result, our: dict[str, Any] | None) -> float | None:
    return our["median_ts"] / result.median if our and result.median else None


def as_record(result: Result, our: dict[str, Any] | None) -> dict[str, Any]:
    """The result as a record with llama-bench's names, like those of `ostinato bench`. `_ts` means tokens/s."""
    return {
        "test": result.test,
        "n_prompt": result.tokens if result.kind == "pp" else 0,
        "n_gen": result.tokens if result.kind == "tg" else 0,
        "n_depth": result.depth,
        "cuda_graph": result.cuda_graph,
        "median_ts": result.median,
        "min_ts": min(result.samples, default=None),
        "max_ts": max(result.samples, default=None),
        "samples_ts": result.samples,
        "error": result.error,
        "ours_test": our["test"] if our else None,
        "ours_ts": our["median_ts"] if our else None,
        "ratio": ratio(result, our),
    }


def render_table(subject: dict[str, Any], results: list[Result], ours: list[dict[str, Any]]) -> str:
    kind = f"{subject['n_layers']} layers, random int4 weights in groups of {subject['group_size']}"
    lines = [
        f"theirs    {subject['system']}, {kind}, dense {subject['dense']}, top-k {subject['topk']}",
        f"machine   {subject['device']}, torch {subject['torch']}, {subject['date'][:10]}",
        "",
    ]
    if ours:
        lines.insert(1, f"ours      {ours[0]['artifact']}, {ours[0]['dtype']}, {ours[0]['device']}")
    columns: dict[str, Side] = {"test": "left", "mode": "left"}
    columns |= dict.fromkeys(("theirs, tokens/s", "min .. max", "ms/token"), "right")
    columns |= dict.fromkeys(("ours, tokens/s", "our test", "ours/theirs") if ours else (), "right")
    rows = [cells(result, our_record(result, ours))[: len(columns)] for result in results]
    lines.append(table(columns, rows))
    lines += ["", f"tokens/s: median of {RUNS} runs, after a warm-up"]
    lines += [f"{result.test}, {result.mode}, failed: {result.error}" for result in results if result.error]
    return "\n".join(lines)


def cells(result: Result, our: dict[str, Any] | None) -> list[str]:
    """A row of the table, with our columns at its end."""
    row = [result.test, result.mode]
    if result.median:
        spread = f"{min(result.samples):,.1f} .. {max(result.samples):,.1f}"
        row += [f"{result.median:,.1f}", spread, f"{1e3 / result.median:.2f}" if result.kind == "tg" else ""]
    else:
        row += ["failed", "", ""]
    row += [f"{our['median_ts']:,.1f}", our["test"]] if our else ["", ""]
    times = ratio(result, our)
    return [*row, f"{times:.2f}" if times else ""]


if __name__ == "__main__":
    sys.exit(main())
