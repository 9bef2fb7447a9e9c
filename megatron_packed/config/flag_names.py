"""Spellings of the flags that messages of lower layers name.

A test compares them with the options, and fails if those layers spell a flag elsewhere.

A test compares them with the options, and finds flags that are spelt elsewhere in those layers.
"""

# Options of a run.
BF16 = "--bf16"
CHAT_TEMPLATE = "--chat-template"
CP_COMM_TYPE = "--cp-comm-type"
CUDA_GRAPH_IMPL = "--cuda-graph-impl"
CUDA_GRAPH_MAX_PACKED_SEQS = "--cuda-graph-max-packed-seqs"
CUDA_GRAPH_STRICT = "--cuda-graph-strict"
DATA_CACHE_PATH = "--data-cache-path"
DISTRIBUTED_BACKEND = "--distributed-backend"
LOAD = "--load"
LOG_JSONL = "--log-jsonl"
MAX_BAD_FRACTION = "--max-bad-fraction"
MAX_DOCUMENT_LENGTH = "--max-document-length"
MAX_DOCUMENTS_PER_PACK = "--max-documents-per-pack"
MAX_POSITION_EMBEDDINGS = "--max-position-embeddings"
MIN_OFFLOADED_TENSOR_SIZE = "--min-offloaded-tensor-size"
MOE_AUX_LOSS_COEFF = "--moe-aux-loss-coeff"
MOE_EXPERT_CAPACITY_FACTOR = "--moe-expert-capacity-factor"
OVERLONG_POLICY = "--overlong-policy"
PACKING_METHOD = "--packing-method"
PAD_PACKED_SEQ_ALIGNMENT = "--pad-packed-seq-alignment"
SAVE = "--save"
SFT = "--sft"
SFT_TOKENIZER_PROMPT_FORMAT = "--sft-tokenizer-prompt-format"
SPLIT = "--split"
TOKENIZER_MODEL = "--tokenizer-model"
TOKENIZER_TYPE = "--tokenizer-type"
TOKENIZER_VOCAB_SIZE = "--tokenizer-vocab-size"
TRANSFORMER_IMPL = "--transformer-impl"
VOCAB_SIZE = "--vocab-size"

# Flags of single commands.
APPEND_EOD = "--append-eod"
IGNORE_KEY = "--ignore-key"
JSON_KEYS = "--json-keys"
MEASURE = "--measure"
TO_HF = "--to-hf"
WORKERS = "--workers"
