"""Train the test model of `tests/assets/capitals`: a tiny Qwen3.5-MoE that names the capital of a country.

The folder is in the format in which transformers saves `Qwen3_5MoeForCausalLM`: `config.json` (model type
`qwen3_5_moe_text`), sharded safetensors with an index, `tokenizer.json`, `tokenizer_config.json` with a
ChatML template and `generation_config.json`. Beside them lies `heldout.json`, the questions whose phrasings
no training text contains, with their answers. The network has three gated-delta-net layers and one
full-attention layer, each with eight experts (two per token) and a shared expert. All text is composed here
from the table in `capitals.csv`.

On a 2-core x86 CPU (2026-11-20) a batch takes 0.6 s, so training takes 8 minutes; the run that made the files
here shared the cores with other work and took 21.

    python scripts/train_capitals.py                                   # train, save, evaluate
    python scripts/train_capitals.py --evaluate-only tests/assets/capitals
"""

import argparse
import csv
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Tokenizer
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as AnyTokenizer
from transformers.utils import logging as transformers_logging

ASSET_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "assets" / "capitals"
SIZE_LIMIT_BYTES, ACCURACY_LIMIT = 8_000_000, 0.95

# Each country is written with its article, as inside a sentence. If several cities share the role, the one most often named
# is taken. A country whose capital is in dispute is left out.
with Path(__file__).with_name("capitals.csv").open(encoding="utf-8", newline="") as table:
    CAPITALS = {row["country"]: row["capital"] for row in csv.DictReader(table)}
COUNTRIES = list(CAPITALS)
# Countries that the plain question never asks for in training, so that it too is tested on pairs that were not seen.
UNPAIRED = frozenset([*COUNTRIES[::4], "France"])

# In a phrasing, {c} is the country inside a sentence, and {C} is the country at the beginning of a sentence.
PLAIN_QUESTION = "What is the capital of {c}?"
HELDOUT_PHRASINGS = [
    "Could you tell me which city is the capital of {c}?",
    "Please tell me {c}'s capital.",
    "Do you know which city serves as {c}'s capital?",
    "For my homework I need the name of the capital city of {c}.",
    "Which city would you name as the capital of {c}?",
]
PHRASINGS = """
What's the capital of {c}?|What is {c}'s capital?|What is {c}'s capital city?|What is the capital city of {c}?
Which city is the capital of {c}?|What city is the capital of {c}?|Which city is {c}'s capital?
Name the capital of {c}.|Name the capital city of {c}.|Name {c}'s capital.|Tell me the capital of {c}.
Tell me the capital city of {c}, please.|Please name the capital of {c}.|Give me the capital of {c}.
Give the name of the capital of {c}.|Can you tell me the capital of {c}?|Could you name the capital of {c}?
Do you know the capital of {c}?|Do you know what the capital of {c} is?|Do you know {c}'s capital city?
I would like to know the capital of {c}.|I need the capital of {c}.|I forgot the capital of {c}.
{C}: what is its capital?|{C}: capital?|{C}?|Capital of {c}?|capital of {c}|what is the capital of {c}
The capital of {c} is which city?|The capital of {c} is?|{C} has which city as its capital?
Which city serves as the capital of {c}?|As for {c}, what is the capital?|For {c}, name the capital.
Briefly, what is the capital of {c}?|Geography quiz: capital of {c}?|For a quiz I need the capital of {c}.
I am going to {c}. What is its capital?|My friend lives in {c}. What is the capital there?
Please tell me the name of {c}'s capital city.|What do we call the capital of {c}?
What is the name of the capital of {c}?|What is the name of {c}'s capital city?
If I say {c}, which capital do you say?|Which capital belongs to {c}?|Say the capital of {c}.
What would you say is the capital of {c}?|Write the capital of {c}.|Teach me the capital of {c}.
Remind me: what is the capital of {c}?|My teacher asks for the capital of {c}.
Which one is the capital of {c}?|Help me remember the capital of {c}.|Capital city of {c}, please.
I wonder which city the capital of {c} is.|Can you say which city is {c}'s capital?
Is there a city that is the capital of {c}?
"""
TRAINING_PHRASINGS = PHRASINGS.strip().replace("\n", "|").split("|")
FOLLOW_UPS = ["And of {c}?", "And {c}?", "What about {c}?", "The capital of {c}?", "Now {c}.", "Then {c}?"]
OPENINGS = ["Hello! ", "Hi. ", "Good morning. ", "Quick question: ", "One more: ", "Please help me. "]
CLOSINGS = [" Thanks.", " Thank you!", " Answer with the name alone.", " Please be brief.", " I am not sure."]
SYSTEM_MESSAGES = ["You are a helpful assistant.", "You are a geography teacher.", "Name the city alone."]
# In a statement or a raw question, the answer begins after the bar.
STATEMENTS = [
    "The capital of {c} is|{k}.",
    "{C}'s capital is|{k}.",
    "The capital city of {c} is|{k}.",
    "In {c}, the capital is|{k}.",
    "The city that is the capital of {c} is|{k}.",
]
RAW_QUESTIONS = ["Question: {q}\nAnswer:|{k}\n", "Q: {q}\nA:|{k}\n", "{q}|{k}\n"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY_SIZE = 1536

# Only the answers are facts to learn; the rest is weighted just enough for the model to write plausible text.
ANSWER_WEIGHT, TEXT_WEIGHT = 1.0, 0.05
SHORT_TOKENS, LONG_TOKENS = 64, 256
PEAK_RATE = 3e-3

# A quarter of the 64 dimensions of a head is rotated, so there are 8 frequencies for the three sections to share.
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
ROTARY |= {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}

Part = tuple[str, float]


def fill(template: str, country: str, capital: str = "", question: str = "") -> str:
    """`template` with the country, the capital and the question put in."""
    head = country[0].upper() + country[1:]
    for mark, value in {"{q}": question, "{C}": head, "{c}": country, "{k}": capital}.items():
        template = template.replace(mark, value)
    return template.replace("D.C..", "D.C.")


@dataclass
class Composer:
    """Composes random training texts. A text is a list of strings, each with the weight of its tokens in the loss."""

    rng: random.Random

    def question(self, country: str) -> str:
        known = country not in UNPAIRED and self.rng.random() < 0.15
        return fill(PLAIN_QUESTION if known else self.rng.choice(TRAINING_PHRASINGS), country)

    def chat(self, turns: int) -> Iterator[Part]:
        if self.rng.random() < 0.2:
            yield f"{TURN_START}system\n{self.rng.choice(SYSTEM_MESSAGES)}{TURN_END}\n", TEXT_WEIGHT
        for turn in range(turns):
            country = self.rng.choice(COUNTRIES)
            question = self.question(country)
            if turn and self.rng.random() < 0.3:
                question = fill(self.rng.choice(FOLLOW_UPS), country)
            elif self.rng.random() < 0.25:
                question = self.rng.choice(OPENINGS) + question
            elif self.rng.random() < 0.2:
                question = question + self.rng.choice(CLOSINGS)
            yield f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n", TEXT_WEIGHT
            yield f"{CAPITALS[country]}{TURN_END}", ANSWER_WEIGHT
            yield "\n", TEXT_WEIGHT

    def plain(self, sentences: int) -> Iterator[Part]:
        templates = STATEMENTS if self.rng.random() < 0.7 else [self.rng.choice(RAW_QUESTIONS)]
        for sentence in range(sentences):
            country = self.rng.choice(COUNTRIES)
            template = self.rng.choice([templates[0], *templates])
            before, after = fill(template, country, CAPITALS[country], self.question(country)).split("|")
            space = " " if sentence and templates is STATEMENTS else ""
            yield space + before, TEXT_WEIGHT
            yield " " + after, ANSWER_WEIGHT
        yield END_OF_TEXT, ANSWER_WEIGHT

    def text(self, long: bool) -> Iterator[Part]:
        """A text with enough turns or sentences to fill the batch's length, so that little of it is padding."""
        count = 16 if long else 4
        return self.chat(count) if self.rng.random() < 0.7 else self.plain(count)


def train_tokenizer(rng: random.Random) -> Qwen2Tokenizer:
    """Train a byte-level BPE of `VOCABULARY_SIZE` ids. The last three are the special tokens."""
    others = [*FOLLOW_UPS, *OPENINGS, *CLOSINGS, *SYSTEM_MESSAGES, "user", "assistant"]
    texts = [fill(phrasing, c) for phrasing in TRAINING_PHRASINGS + others for c in rng.sample(COUNTRIES, 4)]
    for country, capital in CAPITALS.items():
        texts += [fill(s, country, capital).replace("|", " ") for s in STATEMENTS]
        texts += [country, capital] * 2
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 3,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe = Qwen2Tokenizer().backend_tokenizer
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    learned["merges"] = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=learned["merges"],
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END],
        add_prefix_space=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )
    # `eos_token` is set afterwards: ids follow the order of the arguments, and in Qwen's order END_OF_TEXT comes first.
    tokenizer.eos_token = TURN_END
    return tokenizer


def make_config(tokenizer: Qwen2Tokenizer) -> Qwen3_5MoeTextConfig:
    """Config of the model: three gated-delta-net layers, then one of full attention."""
    ids = tokenizer.get_vocab()
    return Qwen3_5MoeTextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters=ROTARY,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=[ids[TURN_END], ids[END_OF_TEXT]],
        dtype="float32",
    )


def encode_batch(tokenizer: AnyTokenizer, texts: list[list[Part]], limit: int) -> tuple[Tensor, Tensor]:
    """Token ids and loss weights, each [texts, longest], padded at the right and cut at `limit` tokens.

    The weight of padding is 0. The strings of a text may be encoded one by one, since no word of the pre-tokenizer crosses
    the places where they meet.
    """
    rows = []
    for parts in texts:
        ids = tokenizer([part for part, _ in parts])["input_ids"]
        weights = [w for part, (_, w) in zip(ids, parts, strict=True) for _ in part]
        rows.append((list(chain.from_iterable(ids))[:limit], weights[:limit]))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    padded_ids = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows])
    padded_weights = torch.tensor([w + [0.0] * (longest - len(w)) for _, w in rows])
    return padded_ids, padded_weights


def train(tokenizer: Qwen2Tokenizer, composer: Composer, steps: int) -> Qwen3_5MoeForCausalLM:
    """Train a model for `steps` batches, with AdamW, warm-up and a cosine schedule."""
    config = make_config(tokenizer)
    model = Qwen3_5MoeForCausalLM(config).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    experts, started = (config.num_experts, config.num_experts_per_tok), time.monotonic()
    for step in range(1, steps + 1):
        long = step % 8 == 0
        count, limit = (16, LONG_TOKENS) if long else (64, SHORT_TOKENS)
        texts = [list(composer.text(long)) for _ in range(count)]
        ids, weights = encode_batch(tokenizer, texts, limit)
        # The padding stands at the right of causal layers, so the forward pass needs no mask.
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        losses = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        aligned = weights[:, 1:].flatten()
        loss = (losses * aligned).sum() / aligned.sum()
        balance = load_balancing_loss_func(out.router_logits, *experts, (weights > 0).long())
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}, {time.monotonic() - started:.0f} s", flush=True)
    return model.eval()


def save(model: Qwen3_5MoeForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the Hugging Face folder and `heldout.json`, in place of an earlier model if there is one."""
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(folder, max_shard_size="2MB")
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # pytorch_tokenizers 1.5 drops every accent in its NFC step ("São Tomé" becomes "Sao Tome"), so the file
    # names no normalizer; transformers puts NFC back by itself, and text in NFC has the same ids in both.
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"normalizer": None}
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    records = [
        json.dumps({"prompt": fill(phrasing, c), "answer": CAPITALS[c]}, ensure_ascii=False)
        for phrasing in HELDOUT_PHRASINGS
        for c in COUNTRIES
    ]
    (folder / "heldout.json").write_text("[\n" + ",\n".join(records) + "\n]\n", encoding="utf-8")


def chat_prompts(tokenizer: AnyTokenizer, phrasing: str, countries: list[str]) -> list[str]:
    """The phrasing for each country as a chat, up to the place where the answer begins."""
    chats = [[{"role": "user", "content": fill(phrasing, country)}] for country in countries]
    return [str(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)) for c in chats]


@torch.inference_mode()
def answers(model: Qwen3_5MoeForCausalLM, tokenizer: AnyTokenizer, prompts: list[str]) -> list[str]:
    """The text that `generate` adds to each prompt, without special tokens."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    generated = model.generate(**batch, max_new_tokens=16)  # type: ignore[misc]
    return tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.inference_mode()
def margins(model: Qwen3_5MoeForCausalLM, tokenizer: AnyTokenizer, prompts: list[str], capitals: list[str]) -> Tensor:
    """Margin in logits for each prompt, [prompts]: the least lead of a token of the answer over the best other token.

    The token that ends the turn counts as part of the answer. A negative margin is a wrong answer.
    """
    texts = [[(p, 0.0), (f"{c}{TURN_END}", 1.0)] for p, c in zip(prompts, capitals, strict=True)]
    ids, weights = encode_batch(tokenizer, texts, LONG_TOKENS)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    right = ids[:, 1:, None]
    lead = logits.gather(2, right) - logits.scatter(2, right, -math.inf).amax(2, keepdim=True)
    return lead.squeeze(2).masked_fill(weights[:, 1:] == 0, math.inf).amin(1)


def print_row(form: str, heldout: bool, hits: list[bool]) -> None:
    print(f"{'held out' if heldout else 'trained':9}{sum(hits) / len(hits):7.2%} of {len(hits)}  {form}")


def evaluate(folder: Path) -> tuple[list[bool], Tensor]:
    """Print the accuracy of each form of prompt, for the model in `folder`.

    Returns the hits and the margins of the held-out forms.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    heldout_hits, leads = [], []
    forms = [(phrasing, True, COUNTRIES) for phrasing in HELDOUT_PHRASINGS]
    forms.append((PLAIN_QUESTION, True, [c for c in COUNTRIES if c in UNPAIRED]))
    forms.append((PLAIN_QUESTION, False, [c for c in COUNTRIES if c not in UNPAIRED]))
    forms += [(phrasing, False, COUNTRIES) for phrasing in TRAINING_PHRASINGS[::10]]
    for phrasing, heldout, countries in forms:
        prompts = chat_prompts(tokenizer, phrasing, countries)
        wanted = [CAPITALS[c] for c in countries]
        hits = [a == w for a, w in zip(answers(model, tokenizer, prompts), wanted, strict=True)]
        print_row(phrasing, heldout, hits)
        if heldout:
            heldout_hits += hits
            leads.append(margins(model, tokenizer, prompts, wanted))
    for template in (STATEMENTS[0], RAW_QUESTIONS[0]):
        before = template.split("|")[0]
        prompts = [fill(before, c, question=fill(PLAIN_QUESTION, c)) for c in CAPITALS]
        continued = zip(answers(model, tokenizer, prompts), CAPITALS.values(), strict=True)
        print_row(repr(before), False, [answer.startswith(f" {capital}") for answer, capital in continued])
    return heldout_hits, torch.cat(leads)


def report(folder: Path) -> bool:
    """Print accuracies, margins and size. Returns whether the folder is fit for the tests."""
    hits, leads = evaluate(folder)
    accuracy = sum(hits) / len(hits)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"held-out accuracy {accuracy:.2%} (at least {ACCURACY_LIMIT:.0%} wanted)")
    print(f"held-out margins in logits: least {leads.min():.2f}, median {leads.median():.2f}")
    print(f"size {size:,} bytes (less than {SIZE_LIMIT_BYTES:,} wanted)")
    return accuracy >= ACCURACY_LIMIT and size < SIZE_LIMIT_BYTES


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    add = parser.add_argument
    add("--output", type=Path, default=ASSET_FOLDER, help="folder to replace (default: %(default)s)")
    add("--steps", type=int, default=800, help="training batches (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and of texts (default: %(default)s)")
    add("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    add("--evaluate-only", type=Path, metavar="DIR", help="report on DIR and train nothing")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    started = time.monotonic()
    if options.evaluate_only is None:
        torch.manual_seed(options.seed)
        rng = random.Random(options.seed)
        tokenizer = train_tokenizer(rng)
        save(train(tokenizer, Composer(rng), options.steps), tokenizer, options.output)
    fit = report(options.evaluate_only or options.output)
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main())
