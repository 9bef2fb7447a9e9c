"""Invalid configurations: all problems are found at once, each with the option, the rule and a
cure.
"""

import re
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import parse
from support.command_lines import argv_of, problems_of, processes_of

MOE = "--hybrid-layer-pattern ME --num-experts 4 --disable-bias-linear"
GROUPS = "--moe-router-num-groups"
TIKTOKEN = "--tokenizer-type TikTokenizer --tokenizer-model train.jsonl"
SENTENCEPIECE = "--tokenizer-type SentencePieceTokenizer --tokenizer-model train.jsonl"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
# Changes of the valid command line, each with a dict of the options that are then reported as
# problems. The value of an option is a part of its rule or cure. A text is the value of the last flag
# of the change. In a change, ~ removes a flag, and ^N sets the number of processes.
INVALID = {
    "~--hidden-size": "required",
    "~--hybrid-layer-pattern ~--num-attention-heads --hidden-size 12": {
        "--hybrid-layer-pattern": "required"
    },
    "~--hybrid-layer-pattern --num-query-groups 3": {
        "--hybrid-layer-pattern": "required",
        "--num-query-groups": "1, 2, 4",
    },
    "~--train-iters ~--lr ~--seq-length": dict.fromkeys(
        ("--train-iters", "--lr", "--seq-length"), "required"
    ),
    "~--data-path": "no training data",
    "--hidden-size 0": ">= 1",
    "--hidden-size 99999999999": "32 bits",
    "--hidden-size 256.5": "whole number",
    "--train-iters 1e3": "write 1000",
    "--hidden-size 250 --kv-channels 64 --mamba-num-heads 6": {"--mamba-num-groups": "1, 2, 3, 6"},
    "--hidden-size 100 --mamba-head-dim 50 --mamba-num-groups 4 --num-attention-heads 3": {
        "--hidden-size": "(3)"
    },
    "--mamba-head-dim 48": "512",
    "--num-query-groups 3": "1, 2, 4",
    "--group-query-attention": "--num-query-groups",
    "--lora-rank 0": ">= 1",
    "--lora-rank 4 --lora-target-modules gdn": "the pattern has no gated delta net layer (G)",
    (
        "--lora-rank 4 --lora-dropout 0.1 --cuda-graph-impl local --recompute-granularity selective "
        "--recompute-modules mamba"
    ): {"--lora-dropout": "cannot draw the same numbers again"},
    (
        f"^2 {MOE} ~--num-attention-heads --tensor-model-parallel-size 2 --moe-latent-size 8 "
        "--expert-tensor-parallel-size 1 --lora-rank 4 --lora-dropout 0.1"
    ): {"--lora-dropout": "--moe-latent-size"},
    "--num-layers 4": "length",
    "~--hybrid-layer-pattern --num-layers 2": {
        "--hybrid-layer-pattern": "required",
        "--num-layers": "--hybrid-layer-pattern '*-*-'",
    },
    "~--hybrid-layer-pattern --num-layers 80 --num-experts 8": {
        "--hybrid-layer-pattern": "required",
        "--num-layers": "80 times '*E'",
    },
    "~--hybrid-layer-pattern --num-layers 123456789": {"--hybrid-layer-pattern": "required"},
    f"--hybrid-layer-pattern {'M' * 10_001}": "10,000 layers",
    "~--num-attention-heads": "attention layers",
    "--hybrid-layer-pattern MD*": "sparse",
    "--hybrid-layer-pattern MxM": "position 2",
    "--hybrid-layer-pattern": "needs a value",
    "--squared-relu --swiglu": {"--squared-relu": "--swiglu"},
    "--mamba-chunk-size 100": "64",
    "--mamba-state-dim 512": "<= 256",
    "--normalization BatchNorm": "LayerNorm",
    "--position-embedding-type yarn": "rope",
    "--position-embedding-type rope --rotary-percent 0.02": "even",
    "--position-embedding-type rope --max-position-embeddings 64": "128",
    "--max-document-length 129": "at most 128",
    "--max-document-length 257 --micro-batch-size 2": {"--max-document-length": "at most 256"},
    "--max-document-length 1": ">= 2",
    "--position-embedding-type rope --max-position-embeddings 128 --micro-batch-size 2 --max-document-length 256": {
        "--max-position-embeddings": "give --max-document-length 128"
    },
    "--norm-epsilon nan": "finite",
    "--hidden-dropout 1": "< 1",
    "--attention-dropout 0.1": "--hidden-dropout",
    "--attention-dropout 0.5 --hybrid-layer-pattern M-": {
        "--attention-dropout": "is not supported"
    },
    "^2 --context-parallel-size 2 --cp-comm-type p2p --cp-partition-mode zigzag --attention-backend flash": (
        "give auto, transformer_engine or reference, or --cp-comm-type a2a"
    ),
    "^2 --context-parallel-size 2 --cp-comm-type p2p --window-size foo": {"--window-size": "foo"},
    "^2 --context-parallel-size 2 --cp-comm-type p2p --window-size 8,0 --window-attn-skip-freq foo": {
        "--window-attn-skip-freq": "give a number, or a list"
    },
    "^2 --context-parallel-size 2 --cp-comm-type p2p --seq-length abc": {"--seq-length": "abc"},
    "^2 --context-parallel-size 2 --cp-comm-type p2p --attention-backend flex": (
        "give auto, flash_attn_4, flash_attn_2 or reference, or --cp-comm-type a2a"
    ),
    "^2 --context-parallel-size 2 --cp-comm-type p2p --cp-partition-mode contiguous --attention-backend flex": (
        "give auto, flash_attn_4, flash_attn_2 or reference, or --cp-comm-type a2a"
    ),
    (
        "^2 --context-parallel-size 2 --cp-comm-type p2p --cp-partition-mode contiguous --bf16 "
        "--transformer-impl transformer_engine"
    ): {
        "--cp-partition-mode": "add --attention-backend flash_attn_4 or flash_attn_2",
        "--transformer-impl": "give local",
    },
    "--cp-partition-mode blocks": "zigzag",
    "--hybrid-layer-pattern ME": {
        "--num-experts": "expert layers",
        "--hybrid-layer-pattern": "disable-bias-linear",
    },
    "--num-experts 4": "no expert layer",
    f"{MOE} --moe-router-topk 5": "1 to 4",
    f"{MOE} --moe-router-topk 1": "--moe-router-pre-softmax",
    f"{MOE} --moe-router-group-topk 1": "--moe-router-num-groups",
    f"{MOE} {GROUPS} 3 --moe-router-group-topk 1": {"--moe-router-num-groups": "1, 2, 4"},
    f"{MOE} {GROUPS} 2 --moe-router-group-topk 3": "1 to 2",
    f"{MOE} {GROUPS} 4 --moe-router-group-topk 1": "1 experts",
    f"{MOE} {GROUPS} 4 --moe-router-group-topk 3": "--moe-router-topk is 2",
    f"{MOE} --moe-router-enable-expert-bias": "sigmoid",
    f"{MOE} --moe-aux-loss-per-document --moe-router-load-balancing-type global_aux_loss": {
        "--moe-aux-loss-per-document": "seq_aux_loss"
    },
    f"{MOE} --moe-router-load-balancing-type sinkhorn": "aux_loss",
    "--skip-train": "--valid-data-path",
    "--log-progress": "give --save",
    "^2 --tensor-model-parallel-size 2 --vocab-size 1000 --padded-vocab-size 1152": (
        "is not 1024, to which 1000 tokens are padded as a multiple of 256"
    ),
    "--optimizer sgd --dataloader-type cyclic": {
        "--optimizer": "AdamW is the only optimizer",
        "--dataloader-type": "single data loader",
    },
    "--save empty --save-interval 4 --save-retain-interval 6": "give 4 or 8",
    f"{MOE} --moe-router-dtype fp64": "fp32",
    "--bf16 --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32": (
        "contradicts --main-grads-dtype bf16"
    ),
    "--main-grads-dtype fp16": "must be one of fp32, bf16",
    f"{MOE} --moe-flex-dispatcher-backend nvshmem": "must be deepep or hybridep or ncclep",
    "--mtp-hybrid-override-pattern *- M": {"--mtp-hybrid-override-pattern": "takes one value"},
    "--mtp-hybrid-override-pattern - --mtp-num-layers 99": {
        "--mtp-num-layers": "is not the number of parts",
        "--hybrid-layer-pattern": "at most 14 depths",
    },
    f"{MOE} --moe-pad-expert-input-to-capacity": "capacity-factor",
    (
        f"{MOE} --moe-expert-rank-capacity-factor auto --moe-token-dispatcher-type alltoall "
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    ): {"--moe-expert-rank-capacity-factor": "leave one of the two flags out"},
    f"{MOE} --moe-expert-rank-capacity-factor most": "must be a number or auto",
    f"{MOE} --seq-length 2000000000": {"--moe-router-topk": "4000000000"},
    "--seq-length 1": ">= 2",
    "--seq-length 65536 --micro-batch-size 65536": {"--seq-length": "4294967296"},
    "--micro-batch-size 4 --global-batch-size 6": "give 4 or 8",
    "^2 --micro-batch-size 2 --global-batch-size 6": "give 4 or 8",
    "--packing-method fist_fit": "sequential",
    "--overlong-policy wrap": "truncate",
    "--overlong-policy truncate_prompt": "add --sft",
    "--answer-end document": "add --sft",
    "--sft --sft-tokenizer-prompt-format default --answer-end document": (
        "contradicts --sft-tokenizer-prompt-format default"
    ),
    "--max-documents-per-pack 0": ">= 1",
    "--data-path absent.jsonl": "does not exist",
    "--data-args-path train.jsonl": {"--data-path": "contradicts --data-args-path"},
    "--split 1,1,1 --test-data-path valid.jsonl": {"--split": "contradicts --test-data-path"},
    "--test-data-path train.jsonl": "cannot test the model",
    "--data-path 0.5 train.jsonl valid.jsonl": "every path or no path must have a weight",
    "--data-path 0 train.jsonl 1 valid.jsonl": "the weight 0 must be more than 0",
    "--data-path 1e30 train.jsonl 1 valid.jsonl": "the weight 1e30 must be a number below 1e+18",
    "--data-path 1 train.jsonl inf valid.jsonl": "the weight inf must be a number below 1e+18",
    "--data-path 1e-999999999 train.jsonl 1 valid.jsonl": "the weight 1e-999999999 must be more than 0",
    "--data-path org/name": "hf download org/name --repo-type dataset --local-dir data/name` and give ",
    "--data-path https://huggingface.co/datasets/org/name/tree/main": "give `--data-path hf://datasets/org/name`",
    "--data-path hf://org/name": "write hf://datasets/ORGANISATION/NAME",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Org/Name-8B": (
        "hf download Org/Name-8B tokenizer.json tokenizer_config.json "
    ),
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model hf://datasets/org/name": (
        "is no path of a model on the Hugging Face Hub"
    ),
    "--pretrained-checkpoint Org/Name": "convert --from-hf hf://Org/Name --save checkpoints/Name`",
    "--data-path corpus_text.bin": "give the common prefix of both files, corpus_text",
    "--split 0,1,1": "the first must be above 0",
    "--split 9,1 --valid-data-path valid.jsonl --eval-interval 5": {"--split": "--valid-data-path"},
    "--split 1 --eval-interval 5 --skip-train": "no validation or test data",
    "--data-path empty": "no .jsonl, .json, .parquet or .txt",
    "--data-path empty/*.jsonl": "matches no file",
    "--data-path nothing.jsonl": "is empty",
    "--valid-data-path corpus_text --eval-interval 5": {
        "--valid-data-path": "its .idx file does not exist"
    },
    "--train-data-path valid.jsonl": {"--data-path": "--train-data-path"},
    "--valid-data-path valid.jsonl": "--eval-interval",
    "--valid-data-path train.jsonl --eval-interval 5": {"--valid-data-path": "training data"},
    "--eval-interval 5": "--valid-data-path",
    "--tokenizer-type HuggingFaceTokenizer": {"--tokenizer-model": "required"},
    "--tokenizer-type SFTTokenizer --tokenizer-model no.json": "does not exist",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model .": "no tokenizer.json",
    "--tokenizer-model train.jsonl": "does not use a model file",
    "--tokenizer-type BertWordPieceCase": "HuggingFaceTokenizer",
    "--tokenizer-type NullTokenizer": {
        "--vocab-size": "required with --tokenizer-type NullTokenizer"
    },
    "--tokenizer-type NullTokenizer --vocab-size 9 --null-tokenizer-eod-id 9": "give at most 8",
    "--null-tokenizer-eod-id 9": "give --tokenizer-type NullTokenizer",
    "--tokenizer-special-tokens <a>": "TikTokenizer or SentencePieceTokenizer",
    "--tokenizer-type GPT2BPETokenizer": {"--vocab-file": "required", "--merge-file": "required"},
    "--vocab-file train.jsonl": {"--merge-file": "required with --tokenizer-type GPT2BPET"},
    "--vocab-file train.jsonl --tokenizer-type ByteTokenizer": {
        "--vocab-file": "does not use this file"
    },
    "--chat-template chatml": "--sft",
    "--sft --chat-template no.jinja": "chatml",
    "--sft-tokenizer-prompt-format default": "--sft",
    "--sft --sft-tokenizer-prompt-format llama": "nemotron-h-aligned, nemotron-nano-v2, identity, default",
    "--sft --sft-tokenizer-prompt-format identity --chat-template chatml": (
        "contradicts --sft-tokenizer-prompt-format identity"
    ),
    "--max-bad-fraction 1.5": "<= 1",
    "--lr abc": "number",
    "--lr inf": "finite",
    "--lr -1e-3": ">= 0",
    "--lr": "needs a value",
    "--lr 1e-3 1e-4": "one value",
    "--min-lr 1": "0.001",
    "--adam-beta2 1": "< 1",
    "--adam-eps 0": "> 0",
    "--lr-warmup-iters 20": "at most 19",
    "--lr-warmup-fraction 1": "at most 19",
    "--lr-warmup-iters 20 --lr-decay-style constant": {"--lr-warmup-iters": "at most 19"},
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "one of the two",
    "--lr-decay-style WSD": {"--lr-wsd-decay-iters": "required"},
    "--validation-set-names a": "needs --multiple-validation-sets",
    "~--train-iters --train-samples 40 --rampup-batch-size 1 1": "needs three numbers",
    "--global-batch-size 8 --rampup-batch-size 2 2 9": "needs the length of the run and of its schedule in samples",
    (
        "~--train-iters --train-samples 40 --lr-warmup-iters 2 --global-batch-size 8 "
        "--rampup-batch-size 2 2 9"
    ): "needs the length of the run and of its schedule in samples",
    "~--train-iters --train-epochs 2 --global-batch-size 8 --rampup-batch-size 2 2 9": (
        "needs the length of the run and of its schedule in samples"
    ),
    "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 2 40": "fewer than 40",
    "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 4 9": (
        "does not reach --global-batch-size (8) from 2 in steps of 4"
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --micro-batch-size 2 "
        "--rampup-batch-size 3 1 9"
    ): "multiples of 2",
    "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 0 9": "two numbers above 0",
    "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 9 1 9": "give a START of at most 8",
    "--mock-data": {"--data-path": "contradicts --mock-data: both name the training data"},
    "~--data-path --mock-data --valid-data-path valid.jsonl --eval-interval 2": {
        "--valid-data-path": "contradicts --mock-data"
    },
    "--train-samples 21": "the samples give 21 iterations",
    "~--train-iters --train-samples 7 --global-batch-size 8": {"--train-iters": "required"},
    "--train-epochs 2": "contradicts --train-iters (20)",
    "~--train-iters --train-samples 40 --train-epochs 2": "contradicts --train-samples (40)",
    "~--train-iters --train-epochs 0": "> 0",
    "--lr-decay-iters 9 --lr-decay-samples 9": "one of the two",
    "--global-batch-size 2 --lr-warmup-samples 45": "22.5 iterations",
    "--lr-warmup-samples 2 --lr-warmup-fraction 0.1": "one of the two",
    "--load empty --finetune --pretrained-checkpoint empty": "contradicts --finetune",
    "--start-weight-decay 0.1 --end-weight-decay 0.2": dict.fromkeys(
        ("--start-weight-decay", "--end-weight-decay"), "incr-style constant"
    ),
    "--weight-decay-incr-style cosine --start-weight-decay 0.1": {
        "--end-weight-decay": "is required with --weight-decay-incr-style cosine"
    },
    "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1": (
        "at least --start-weight-decay (0.2)"
    ),
    "--weight-decay-incr-style square": "one of constant, linear",
    "--optimizer-cuda-graph": "full_iteration",
    "--check-for-spiky-loss --loss-spike-policy off": {
        "--check-for-spiky-loss": "--loss-spike-policy off"
    },
    "--loss-spike-policy stop": "one of off, warn, skip",
    "--loss-spike-factor 1": "> 1",
    "--eval-interval 5 --eval-iters -1": ">= 0",
    "--lr-decay-style inverse-square-root": "cosine",
    "--exp-avg-dtype bf16": "--use-precision-aware-optimizer",
    "--exp-avg-sq-dtype bf16": "--use-precision-aware-optimizer",
    "--use-precision-aware-optimizer --exp-avg-dtype fp16 --exp-avg-sq-dtype fp8": {
        "--exp-avg-dtype": "give bf16",
        "--exp-avg-sq-dtype": "give bf16",
    },
    "--use-precision-aware-optimizer --main-params-dtype fp16": {
        "--main-params-dtype": "give fp32"
    },
    "--train-iters 0": ">= 1",
    "--seed -1": ">= 0",
    "--attention-backend flash_atn_2": "flash_attn_2",
    "--device tpu": "cpu",
    "--device cpu --distributed-backend nccl": "gloo",
    "--bf16 true": "--no-bf16",
    "--save-interval 5": "--save",
    "--save-retain 0 --save ckpt": {"--save-retain": ">= 1"},
    "--save train.jsonl/ckpt": "is a file",
    "--save train.jsonl": "is a file",
    "--load absent": "--save",
    "--finetune": "--load",
    "--begin-phase b": "needs --load",
    "--load empty --begin-phase b --finetune": {"--begin-phase": "contradicts --finetune"},
    "--load empty --begin-phase ''": "1 to 64 of the characters",
    "--load empty --begin-phase a/../b": "give a name such as long-context",
    "--load empty --begin-phase \u00fc": "1 to 64 of the characters",
    f"--load empty --begin-phase {'a' * 65}": "1 to 64 of the characters",
    "--ckpt-step 3": "--load",
    "--ckpt-step newest --load empty": {"--ckpt-step": "N|best"},
    "--save-best": "needs --save",
    "--save-best --save ckpt": {"--save-best": "needs validations"},
    "--sft --valid-metric exact_match": "needs validations",
    "--data-path train.jsonl --split 90,10 --eval-interval 5 --valid-metric exact_match": "add --sft",
    "--sample-prompts absent.txt": "does not exist",
    "--early-stopping-patience 2": "--eval-interval N",
    "--log-jsonl train.jsonl/a/log.jsonl": "is a file",
    "--log-jsonl train.jsonl": "and would be overwritten",
    "--log-jsonl /dev/null": "names a device, a pipe or a standard stream",
    "--log-jsonl /dev/stdout": "names a device, a pipe or a standard stream",
    "--log-jsonl /dev/fd/9": "names a device, a pipe or a standard stream",
    "--log-jsonl loop": "Too many levels of symbolic links",
    "--save loop": "Too many levels of symbolic links",
    "--log-jsonl log.jsonl --report null.html": "names a device, a pipe or a standard stream",
    "--log-interval 0": ">= 1",
    "--report run.html": "--log-jsonl",
    "--report run.png --log-jsonl log.jsonl": {"--report": ".html"},
    "--tensor-model-parallel-size 2": "does not divide the 1 processes",
    "^6 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-attention-heads 0": {
        "--pipeline-model-parallel-size": "not supported yet",
        "--num-attention-heads": "required",
    },
    "^6 --tensor-model-parallel-size 4": "give 1, 2, 3 or 6",
    "--mamba-norm-groups 3": "(512)",
    "^4 --tensor-model-parallel-size 4 --mamba-norm-groups 6 --hidden-size 384 --mamba-num-groups 4": {
        "--tensor-model-parallel-size": "multiple of --mamba-norm-groups (6) choose from 1, 2"
    },
    "^3 --tensor-model-parallel-size 3 --mamba-num-heads 12 --mamba-num-groups 3 --ffn-hidden-size 99": {
        "--tensor-model-parallel-size": "(4) choose from 1"
    },
    "^4 --tensor-model-parallel-size 4 --num-attention-heads 12 --num-query-groups 3 --kv-channels 16": {
        "--tensor-model-parallel-size": "neither divides nor is a multiple of --num-query-groups (3) choose from 1"
    },
    "^16 --tensor-model-parallel-size 16 --num-attention-heads 16 --num-query-groups 2 --mamba-num-heads 8": {
        "--tensor-model-parallel-size": "--mamba-num-heads (8) choose from 1, 2, 4, 8"
    },
    "^2 --tensor-model-parallel-size 2 --ffn-hidden-size 1023 --hybrid-layer-pattern -": {
        "--tensor-model-parallel-size": "--ffn-hidden-size (1023) choose from 1, 3, 11"
    },
    f"^4 {MOE} --tensor-model-parallel-size 4 --moe-ffn-hidden-size 6 --moe-shared-expert-intermediate-size 8": {
        "--tensor-model-parallel-size": "--moe-ffn-hidden-size (6) choose from 1, 2"
    },
    f"^2 {MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --seq-length 127": {
        "--expert-tensor-parallel-size": "1, 127"
    },
    (
        f"^4 {MOE} --tensor-model-parallel-size 2 --context-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --seq-length 126"
    ): {"--expert-tensor-parallel-size": "(2) x --context-parallel-size (2) ranks"},
    "^4 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 3": "give 1, 2 or 4",
    f"^4 {MOE} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --moe-ffn-hidden-size 63": {
        "--expert-tensor-parallel-size": "does not divide --moe-ffn-hidden-size (63)"
    },
    "^2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 127": {
        "--sequence-parallel": "1, 127"
    },
    "^4 --tensor-model-parallel-size 2 --global-batch-size 3": "give 2 or 4",
    "^2 --expert-model-parallel-size 2": "no expert layer",
    f"{MOE} --expert-model-parallel-size 2": "does not divide the 1 processes",
    f"^3 {MOE} --expert-model-parallel-size 3": "(4) choose from 1, 2, 4",
    "--overlap-param-gather": "add --use-distributed-optimizer --overlap-grad-reduce",
    "--overlap-param-gather --overlap-grad-reduce": {
        "--overlap-param-gather": "add --use-distributed-optimizer, or"
    },
    "--overlap-param-gather --use-distributed-optimizer": {
        "--overlap-param-gather": "add --overlap-grad-reduce"
    },
    "--ddp-bucket-size 0": ">= 1",
    "^3 --tensor-model-parallel-size 3 --hybrid-layer-pattern G": {
        "--tensor-model-parallel-size": "--linear-num-key-heads (16) choose from 1, 2, 4, 8, 16"
    },
    (
        "^16 --tensor-model-parallel-size 4 --context-parallel-size 4 --hybrid-layer-pattern G "
        "--linear-num-key-heads 8 --cp-comm-type p2p --linear-cp-mode headwise"
    ): {
        "--context-parallel-size": "(2 of a tensor-parallel rank) choose from 1, 2, or give "
        "--linear-cp-mode chunkwise, which shares no heads"
    },
    "--experimental-attention-variant dsa": "attention",
    "--linear-attention-freq 4": "--hybrid-layer-pattern",
    "^2 --context-parallel-size 2 --linear-cp-mode ring": "headwise",
    "^2 --context-parallel-size 2 --hybrid-layer-pattern G --gated-delta-rule-backend fla": (
        "give --linear-cp-mode headwise"
    ),
    "^3 --context-parallel-size 2": "give 1 or 3",
    "^3 --context-parallel-size 3 --seq-length 126 --hybrid-layer-pattern *-": {
        "--context-parallel-size": "choose from 1, 2, 4"
    },
    "^3 --context-parallel-size 3 --hybrid-layer-pattern *- --seq-length 126": {
        "--context-parallel-size": "or give --cp-comm-type p2p"
    },
    (
        "^8 --context-parallel-size 8 --cp-comm-type p2p --cp-partition-mode zigzag "
        "--hybrid-layer-pattern - --pad-packed-seq-alignment 8"
    ): ("p2p choose from 16, 32, 64, 128"),
    "--pad-packed-seq-alignment 5": "choose from 1, 2, 4, 8",
    "^2 --context-parallel-size 2 --cp-comm-type p2p --cp-partition-mode zigzag --seq-length 126": {
        "--cp-comm-type": "--cp-partition-mode contiguous, or a --seq-length that is a multiple of 4"
    },
    "^4 --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 126": {
        "--sequence-parallel": "whose product divides"
    },
    "^8 --context-parallel-size 4 --tensor-model-parallel-size 2": {
        "--context-parallel-size": "(2 of a tensor-parallel rank)"
    },
    "^2 --context-parallel-size 2 --seq-length 127": {
        "--context-parallel-size": "choose from 1, 127"
    },
    "^2 --context-parallel-size 2 --cp-comm-type a2a+p2p": "give a2a",
    (
        "^8 --context-parallel-size 8 --hybrid-layer-pattern M --mamba-num-heads 4 "
        "--mamba-num-groups 4 --mamba-cp-comm-type heads"
    ): {"--context-parallel-size": "or give --mamba-cp-comm-type state, which shares no heads"},
    (
        "^3 --context-parallel-size 3 --seq-length 126 --hybrid-layer-pattern MG "
        "--linear-cp-mode headwise"
    ): {"--context-parallel-size": "--linear-num-key-heads (16) choose from"},
    "--mamba-cp-comm-type p2p": "heads",
    "--transformer-impl inference_optimized": "give local or transformer_engine",
    "--cuda-graph-impl full_iteration --cuda-graph-modules attn": "captures whole steps",
    "--cuda-graph-impl full_iteration --hidden-dropout 0.1": {
        "--cuda-graph-impl": "leave one of them out"
    },
    "--cuda-graph-modules full_iteration": "--cuda-graph-impl full_iteration",
    "--enable-cuda-graph yes": "write --enable-cuda-graph alone",
    "--cuda-graph-impl local --hidden-dropout 0.1": {
        "--cuda-graph-impl": "dropout inside captured modules"
    },
    "--cuda-graph-impl local --cuda-graph-modules attn mambo": "did you mean mamba?",
    "--cuda-graph-impl local --cuda-graph-modules full attn": "give full alone",
    "--cuda-graph-impl local --cuda-graph-max-packed-seqs 8 100000": "give at most",
    "--cuda-graph-impl local --cuda-graph-modules attn moe": "no E",
    "--cuda-graph-impl local --hybrid-layer-pattern M --cuda-graph-modules mlp": "no -",
    f"{MOE} --cuda-graph-impl local --cuda-graph-modules moe moe_router": "give moe or moe_router",
    "--cuda-graph-impl local --cuda-graph-max-packed-seqs 64 --pad-packed-seq-alignment 4": {
        "--cuda-graph-max-packed-seqs": "give at most 32"
    },
    "--cuda-graph-impl local --cuda-graph-max-packed-seqs 64 0": ">= 1",
    "--cuda-graph-impl local --cuda-graph-max-packed-seqs 8 auto": "auto alone",
    "--cuda-graph-impl local --cuda-graph-strict --cuda-graph-max-packed-seqs 64 16 --max-documents-per-pack 65": (
        "at most 64"
    ),
    "--cuda-graph-impl local --cuda-graph-warmup-steps -1": ">= 0",
    (
        "--cuda-graph-modules attn --cuda-graph-strict --cuda-graph-audit-interval 5 "
        "--cuda-graph-warmup-steps 1"
    ): dict.fromkeys(
        (
            "--cuda-graph-modules",
            "--cuda-graph-strict",
            "--cuda-graph-audit-interval",
            "--cuda-graph-warmup-steps",
        ),
        "give --cuda-graph-impl local",
    ),
    "--cuda-graph-max-packed-seqs": "50 has no effect",
    "--recompute-granularity full": {
        "--recompute-method": "give --recompute-method uniform|block",
        "--recompute-num-layers": "is required",
    },
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4": "give 1 to 3",
    "--recompute-granularity selective --recompute-num-layers 0": ">= 1",
    "--recompute-activations --hybrid-layer-pattern M-": {
        "--recompute-modules": "give other modules with"
    },
    "--recompute-activations --recompute-modules mamba moe_act": "no E",
    "--recompute-activations --recompute-modules mla_up_proj": "leave it out",
    "--recompute-activations --recompute-modules shared_experts": "give moe",
    "--recompute-granularity whole": "full, selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --cuda-graph-impl local": {
        "--recompute-num-layers": "give 1, or --cuda-graph-impl full_iteration"
    },
    (
        f"{MOE} --recompute-granularity full --recompute-method block --recompute-num-layers 2 --cuda-graph-impl local "
        "--cuda-graph-modules moe_router"
    ): "give moe, which captures whole layers",
    (
        f"{MOE} --recompute-activations --recompute-modules moe --cuda-graph-impl local "
        "--cuda-graph-modules moe_router"
    ): "a graph cannot run twice",
    "--distribute-saved-activations": "--sequence-parallel",
    "--moe-layer-recompute": "--recompute-modules moe",
    "--fine-grained-activation-offloading": {"--offload-modules": "is required"},
    "--offload-layer-inputs --offload-buffers 0": {
        "--offload-layer-inputs": "give --recompute-granularity full",
        "--offload-buffers": ">= 1",
    },
    f"{SHARED} --moe-shared-expert-overlap {OFFLOAD} mlp_norm": {
        "--moe-shared-expert-overlap": "which copies on streams of its own"
    },
    f"{OFFLOAD} moe_act mamba_nrom": "did you mean mamba_norm?",
    f"{OFFLOAD} mlp_norm moe_act": "no E",
    f"{OFFLOAD} mlp_norm --hybrid-layer-pattern M*M": {"--offload-modules": "no - (MLP) or E"},
    f"{OFFLOAD} core_attn mlp_fc1 --recompute-granularity full --recompute-method block --recompute-num-layers 2": {
        "--offload-modules": "or give --offload-layer-inputs"
    },
    f"{OFFLOAD} mamba_norm mamba_scan --recompute-activations --recompute-modules mamba": {
        "--offload-modules": "leave mamba out of --recompute-modules"
    },
    f"{OFFLOAD} attn_proj mlp_norm": "add core_attn",
    "--cpu-offloading-num-layers 2": "--recompute-method block",
    "--activation-offload-fraction 0.5": "give fewer",
    "--optimizer-cpu-offload": "stays on the device",
    "--profile --use-pytorch-profiler --profile-step-start 5 --profile-step-end 5": (
        "must be above --profile-step-start"
    ),
    "--profile --use-pytorch-profiler --profile-step-start 20 --profile-step-end 22": {
        "--profile-step-start": "is never reached"
    },
    "^2 --profile --use-pytorch-profiler --profile-step-start 1 --profile-ranks 0 2": (
        "is not one of the 2 ranks"
    ),
    "--device cpu --profile --profile-step-start 1": {
        "--profile": "sets the capture range of nsys"
    },
    "--device cpu --record-memory-history": {
        "--record-memory-history": "records the GPU memory allocator"
    },
    "--fp8-format hybrid --fp16": {"--fp8-format": "--bf16", "--fp16": "--bf16"},
    "--spec my.module my_spec": "hybrid_stack_spec",
    "--use-mcore-models yes": "takes no value",
    "--learning-rate 1": "--lr 1",
    "--no-such-flag 1": "--help-all",
    "--hiden-size 64": "--hidden-size",
    "--hidden_size 64": "--hidden-size",
    "@absent.args": {"@absent.args": "cannot be read"},
    "--config absent.yaml": "cannot be read",
    "--hidden-size 0 --lr x --bogus --normalization L --global-batch-size 0 --fp8-margin 1 --moe-router-topk 0": {
        "--hidden-size": "",
        "--lr": "",
        "--bogus": "",
        "--normalization": "",
        "--global-batch-size": "",
        "--fp8-margin": "",
        "--moe-router-topk": "",
    },
}


@pytest.mark.parametrize("change", INVALID)
def test_every_problem_is_reported(right, change: str) -> None:
    expected = INVALID[change]
    if isinstance(expected, str):
        *_, flag = (word.lstrip("~") for word in change.split() if "--" in word)
        expected = {flag: expected}
    problems = problems_of(argv_of(right, change), processes_of(change))
    assert {problem.option for problem in problems} == set(expected), problems
    for problem in problems:
        assert expected[problem.option] in f"{problem.value} {problem.rule} {problem.cure}", str(
            problem
        )
        assert problem.rule and problem.cure
    assert len(problems) == len(expected), problems


@pytest.fixture
def packages(monkeypatch):
    """Return a function that says whether all optional packages are installed."""

    def set_installed(installed: bool) -> None:
        spec = ModuleSpec("any", None, origin="somewhere") if installed else None
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)

    return set_installed


def outcome(argv: list[str], world_size: int | None = None) -> Any:
    """Return the configuration of a command line, or its only problem."""
    if problems := problems_of(argv, world_size):
        (problem,) = problems
        return problem
    return parse(argv, world_size)


@pytest.mark.parametrize(
    ("change", "installed", "rule", "cure"),
    [
        ("--bf16", False, "needs TransformerEngine, which is not installed", "or give local"),
        ("--bf16 --device cpu", True, "runs only on GPUs, and --device is cpu", "give local"),
        ("", True, "products are rounded to TF32", "add --bf16, or give local"),
        (
            "--bf16 --kv-channels 192",
            True,
            "multiple of 8 up to 128 channels, not of 192",
            "--attention-backend",
        ),
        ("--bf16 --lora-rank 4", True, "no layers with adapters (--lora-rank)", "give local"),
        ("--bf16 --kv-channels 36", True, "not of 36", "another --attention-backend"),
        ("--bf16 --kv-channels 192 --attention-backend flash_attn_2", True, "", ""),
        ("--bf16 --kv-channels 192 --hybrid-layer-pattern M-", True, "", ""),
        ("--bf16", True, "", ""),
    ],
)
def test_transformer_engine_layers(
    right, packages, change: str, installed: bool, rule: str, cure: str
) -> None:
    packages(installed)
    found = outcome(argv_of(right, f"--transformer-impl transformer_engine {change}"))
    if not rule:
        assert found.training.transformer_impl == "transformer_engine"
    else:
        assert found.option == "--transformer-impl" and rule in found.rule and cure in found.cure


FULL_RECOMPUTATION = "--recompute-granularity full --recompute-method"


@pytest.mark.parametrize("kernel", ["", "--attention-backend transformer_engine"])
@pytest.mark.parametrize("mode", ["", "--cp-partition-mode contiguous"], ids=["auto", "contiguous"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("--window-size 8,0", "no kernel for a zigzag of attention windows"),
        ("--seq-length 126", "4 chunks of a zigzag do not divide the 126 token slots of a pack"),
        ("--pad-packed-seq-alignment 2", "alignment 2 is no multiple of the 4 chunks of a zigzag"),
    ],
)
def test_where_no_partition_fits_the_cure_names_kernels_that_work(
    right, packages, change: str, rule: str, mode: str, kernel: str
) -> None:
    packages(True)
    layout = f"^2 --context-parallel-size 2 --cp-comm-type p2p {change} {mode} --bf16"
    words = f"{layout} --transformer-impl transformer_engine"
    problem = outcome(argv_of(right, f"{words} {kernel}"), 2)
    assert rule in problem.rule
    cure = re.fullmatch(r"(?:add --attention-backend|give) ([\w, ]+)", problem.cure)
    assert cure is not None, problem.cure
    for backend in re.split(", | or ", cure[1]):
        found = outcome(argv_of(right, f"{words} --attention-backend {backend}"), 2)
        assert found.parallel.cp_partition_mode == "contiguous", found
    if kernel:  # layers of this package choose among all kernels
        local = outcome(argv_of(right, f"{layout} {kernel}"), 2)
        assert local.cure.startswith("give auto, ")


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_graphs_of_layers_recompute_no_group_of_layers(right, packages, impl: str) -> None:
    packages(True)
    argv = argv_of(
        right, f"{FULL_RECOMPUTATION} uniform --recompute-num-layers 2 --cuda-graph-impl {impl}"
    )
    with pytest.raises(ConfigError, match=f"--cuda-graph-impl {impl} captures single layers"):
        parse(argv)


@pytest.mark.parametrize(
    ("change", "installed", "rule", "cure"),
    [
        ("", False, "needs TransformerEngine, which is not installed", "or give local"),
        (
            "--device cpu",
            True,
            "captures graphs only on GPUs, and --device is cpu",
            "give local, which runs eagerly",
        ),
        ("--hidden-dropout 0.1", True, "dropout inside captured modules", "leave one of them out"),
        ("--recompute-activations --recompute-modules core_attn layernorm", True, "", ""),
        (f"{FULL_RECOMPUTATION} block --recompute-num-layers 2", True, "", ""),
        (f"{OFFLOAD} mlp_act", True, "in their own memory", "local or full_iteration"),
        ("--cuda-graph-modules mamba --cuda-graph-max-packed-seqs 16", True, "", ""),
        (
            "^4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
            True,
            "",
            "",
        ),
        (f"^2 {MOE} --expert-model-parallel-size 2", True, "", ""),
    ],
)
def test_transformer_engine_graphs(
    right, packages, change: str, installed: bool, rule: str, cure: str
) -> None:
    packages(installed)
    argv = argv_of(right, f"{change} --cuda-graph-impl transformer_engine")
    found = outcome(argv, processes_of(change))
    if not rule:
        assert found.cuda_graph.uses_transformer_engine
    else:
        assert found.option == "--cuda-graph-impl" and rule in found.rule and cure in found.cure


@pytest.mark.parametrize("words", [["@absent.args"], ["--config", "absent.yaml"]])
def test_what_a_file_that_cannot_be_read_would_have_said_is_not_missing(words: list[str]) -> None:
    found = problems_of([*words, "--lr", "x"])
    assert [problem.option for problem in found] == [words[0], "--lr"], found


@pytest.mark.parametrize("world_size", [1, 2])
def test_nccl_needs_gpus_whatever_the_number_of_processes(
    right, monkeypatch, world_size: int
) -> None:
    argv = argv_of(right, "--distributed-backend nccl")
    monkeypatch.setattr("megatron_packed.config.launch_checks.may_have_gpu", lambda environ: False)
    with pytest.raises(
        ConfigError,
        match="--distributed-backend nccl: runs only between GPUs, and no GPU is visible",
    ):
        parse(argv, world_size)
    monkeypatch.setattr("megatron_packed.config.launch_checks.may_have_gpu", lambda environ: True)
    assert parse(argv, world_size).parallel.distributed_backend == "nccl"


@pytest.mark.parametrize(
    ("change", "installed", "option", "said"),
    [
        (
            "--tokenizer-type TikTokenizer",
            True,
            "--tokenizer-model",
            "is required with --tokenizer-type TikTokenizer",
        ),
        ("--tokenizer-type Llama2Tokenizer", True, "--tokenizer-model", "a SentencePiece .model"),
        (f"{TIKTOKEN}", False, "--tokenizer-type", "needs tiktoken, which is not installed"),
        (
            f"{SENTENCEPIECE}",
            False,
            "--tokenizer-type",
            "needs sentencepiece, which is not installed",
        ),
        (
            f"{TIKTOKEN} --vocab-size 1000",
            True,
            "--vocab-size",
            "no entries after --tiktoken-num-special-tokens (1000)",
        ),
        (f"{TIKTOKEN} --tiktoken-pattern v3", True, "--tiktoken-pattern", "v1, v2"),
        (
            f"{TIKTOKEN} --tiktoken-num-special-tokens 6",
            True,
            "--tiktoken-num-special-tokens",
            "less than the 7",
        ),
        (
            f"{TIKTOKEN} --tiktoken-special-tokens <unk> <s>",
            True,
            "--tokenizer-special-tokens",
            "must include </s>",
        ),
        (
            f"{SENTENCEPIECE} --tokenizer-special-tokens <a> <a>",
            True,
            "--tokenizer-special-tokens",
            "a duplicate",
        ),
        (
            f"{TIKTOKEN} --tiktoken-pattern v1 --vocab-size 1257 --tiktoken-special-tokens <s> </s> <unk>",
            True,
            "",
            "",
        ),
        (f"{SENTENCEPIECE} --tokenizer-special-tokens <a>", True, "", ""),
    ],
)
def test_tokenizers_of_optional_packages(right, packages, change, installed, option, said) -> None:
    packages(installed)
    found = outcome(argv_of(right, change))
    if not option:
        assert found.data.tokenizer_model == "train.jsonl"
    else:
        assert found.option == option and said in f"{found.rule} {found.cure}"
