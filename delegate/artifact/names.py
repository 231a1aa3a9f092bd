"""Names that export and runtime must agree on: files, keys, methods, metadata and marks of kernels.

An artifact is a folder::

    model.pte   ExecuTorch program; the compiled code of each method is named data in it. Behind it the seal
    model.ptd   FlatTensor: every constant once under its fully qualified name, and the manifest
    config.json, tokenizer.json, tokenizer_config.json, ...   copied from the checkpoint
"""

from __future__ import annotations

FORMAT_VERSION = 16

PROGRAM_FILE = "model.pte"
CONSTANTS_FILE = "model.ptd"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# What is copied from the checkpoint: what says how text becomes tokens, and what `ostinato recompile` takes.
COPIED_FILES = (
    CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TEMPLATE_FILE,
)

# ExecuTorch finds a backend by its class name; export/artifact/assemble.py writes this name into programs.
BACKEND_ID = "OstinatoBackend"

SPEC_TARGET = "target"

# Methods of a language model; see export/models/methods.py. Methods that sample leave the next token in a mutable buffer.
PREFILL = "prefill"
PREFILL_STREAMED = "prefill_streamed"
DECODE = "decode"
SAMPLE = "sample"
LOGPROBS = "logprobs"
DECODE_SAMPLE = "decode_sample"
ROWS = "rows"
TWO_ROWS = "two_rows"
FOUR_ROWS = "four_rows"
STEP_ROWS = "step_rows"
FEW_ROWS = "few_rows"
MANY_ROWS = "many_rows"
# For small batches first. A device with kernels for any number of rows has ROWS alone.
ROWS_METHODS = (TWO_ROWS, FOUR_ROWS, STEP_ROWS, FEW_ROWS, ROWS, MANY_ROWS)
# In place of MANY_ROWS, with experts on the host.
ROWS_STREAMED = "rows_streamed"
ROWS_HIDDEN = "rows_hidden"

# Constant methods. They have ExecuTorch's own names where such names exist.
META_MAX_SEQ_LEN = "get_max_seq_len"
META_VOCAB_SIZE = "get_vocab_size"
META_N_LAYERS = "get_n_layers"
META_EOS_IDS = "get_eos_ids"
META_USE_KV_CACHE = "use_kv_cache"
META_USE_SDPA = "use_sdpa_with_kv_cache"
META_DYNAMIC_SHAPE = "enable_dynamic_shape"
META_MUTABLE_BUFFERS = "get_mutable_buffer_metadata"
META_MODEL_TYPE = "get_model_type"
META_DTYPE = "get_activation_dtype"
META_QUANTIZATION = "get_quantization"
# int: layers whose routed experts stay on the host, counted from the first.
META_CPU_MOE = "get_n_cpu_moe"
# bool: whether `prefill` takes rows of padding after the last token. They have its position and change nothing.
META_PADDED_PREFILL = "enable_padded_prefill"
# int: bytes that a decode step must read or write at least once: weights that one token uses, and state of fixed size.
META_DECODE_BYTES = "get_decode_bytes"
# int: bytes that a decode step reads in addition for each position in the KV caches.
META_KV_BYTES = "get_kv_bytes_per_token"
# int: positions in a page of the KV caches.
META_PAGE_SIZE = "get_page_size"
# str: JSON of export/artifact/options.py, by which the code can be compiled again.
META_EXPORT_OPTIONS = "get_export_options"

# Text in the names of GPU kernels that may start while the kernel ahead still runs. graphs/nodes.py has the rules for them.
EARLY_KERNEL = "_early"
# Text in the names of early kernels that are for several rows alone.
ROWS_KERNEL = "rows_early"
# Text in the name of an early kernel -> text in the name of the kernel ahead. The early kernel may start early only directly
# behind such a kernel (rule R5 in graphs/nodes.py).
REQUIRED_AHEAD = {
    "experts_down_early": "experts_gate_up_early",
    "down_fixed_rows_early": "gate_up_fixed_rows_early",
}

# `Segment.device` of segments that run on the host.
HOST = "cpu"

MANIFEST_KEY = "ostinato.manifest"
CODE_KEY_PREFIX = "ostinato.code."
# The file name of the kernel library follows.
KERNELS_KEY_PREFIX = "ostinato.kernels."
EXTERN_KEY_PREFIX = "ostinato.extern."
