"""Invalid configurations: all problems are found at once, each with the option, the rule and a
cure.
"""

from importlib.machinery import ModuleSpec

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import parse

MOE = "--hybrid-layer-pattern ME --num-experts 4 --disable-bias-linear"
GROUPS = "--moe-router-num-groups"
TIKTOKEN = "--tokenizer-type TikTokenizer --tokenizer-model train.jsonl"
SENTENCEPIECE = "--tokenizer-type SentencePieceTokenizer --tokenizer-model train.jsonl"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
# Each entry is a change of the valid command line, and a dict of the options that are then reported
# as problems. The value of an option is a part of its rule or cure. In a change, ~ removes a flag,
# and ^N sets the number of processes.
INVALID = [
    ("~--hidden-size", {"--hidden-size": "required"}),
    ("~--hybrid-layer-pattern", {"--hybrid-layer-pattern": "required"}),
    (
        "~--hybrid-layer-pattern ~--num-attention-heads --hidden-size 12",
        {"--hybrid-layer-pattern": "required"},
    ),
    (
        "~--hybrid-layer-pattern --num-query-groups 3",
        {"--hybrid-layer-pattern": "required", "--num-query-groups": "1, 2, 4"},
    ),
    (
        "~--train-iters ~--lr ~--seq-length",
        dict.fromkeys(("--train-iters", "--lr", "--seq-length"), "required"),
    ),
    ("~--data-path", {"--data-path": "no training data"}),
    ("--hidden-size 0", {"--hidden-size": ">= 1"}),
    ("--hidden-size -64", {"--hidden-size": ">= 1"}),
    ("--hidden-size 99999999999", {"--hidden-size": "32 bits"}),
    ("--hidden-size 256.5", {"--hidden-size": "whole number"}),
    ("--train-iters 1e3", {"--train-iters": "write 1000"}),
    (
        "--hidden-size 250 --kv-channels 64 --mamba-num-heads 6",
        {"--mamba-num-groups": "1, 2, 3, 6"},
    ),
    (
        "--hidden-size 100 --mamba-head-dim 50 --mamba-num-groups 4 --num-attention-heads 3",
        {"--hidden-size": "(3)"},
    ),
    ("--mamba-head-dim 48", {"--mamba-head-dim": "512"}),
    ("--num-query-groups 3", {"--num-query-groups": "1, 2, 4"}),
    ("--group-query-attention", {"--group-query-attention": "--num-query-groups"}),
    ("--num-layers 4", {"--num-layers": "length"}),
    (
        "~--hybrid-layer-pattern --num-layers 2",
        {"--hybrid-layer-pattern": "required", "--num-layers": "--hybrid-layer-pattern '*-*-'"},
    ),
    (
        "~--hybrid-layer-pattern --num-layers 80 --num-experts 8",
        {"--hybrid-layer-pattern": "required", "--num-layers": "80 times '*E'"},
    ),
    (
        "~--hybrid-layer-pattern --num-layers 123456789",
        {"--hybrid-layer-pattern": "required"},
    ),
    ("~--num-attention-heads", {"--num-attention-heads": "attention layers"}),
    ("--hybrid-layer-pattern MD*", {"--hybrid-layer-pattern": "sparse"}),
    ("--hybrid-layer-pattern MxM", {"--hybrid-layer-pattern": "position 2"}),
    ("--hybrid-layer-pattern", {"--hybrid-layer-pattern": "needs a value"}),
    ("--squared-relu --swiglu", {"--squared-relu": "--swiglu"}),
    ("--mamba-chunk-size 100", {"--mamba-chunk-size": "64"}),
    ("--mamba-state-dim 512", {"--mamba-state-dim": "<= 256"}),
    ("--normalization BatchNorm", {"--normalization": "LayerNorm"}),
    ("--position-embedding-type yarn", {"--position-embedding-type": "rope"}),
    ("--position-embedding-type rope --rotary-percent 0.02", {"--rotary-percent": "even"}),
    (
        "--position-embedding-type rope --max-position-embeddings 64",
        {"--max-position-embeddings": "128"},
    ),
    ("--max-document-length 129", {"--max-document-length": "at most 128"}),
    ("--max-document-length 257 --micro-batch-size 2", {"--max-document-length": "at most 256"}),
    ("--max-document-length 1", {"--max-document-length": ">= 2"}),
    (
        "--position-embedding-type rope --max-position-embeddings 128 --micro-batch-size 2 --max-document-length 256",
        {"--max-position-embeddings": "give --max-document-length 128"},
    ),
    ("--norm-epsilon nan", {"--norm-epsilon": "finite"}),
    ("--hidden-dropout 1", {"--hidden-dropout": "< 1"}),
    ("--attention-dropout 0.1", {"--attention-dropout": "--hidden-dropout"}),
    (
        "--attention-dropout 0.5 --hybrid-layer-pattern M-",
        {"--attention-dropout": "is not supported"},
    ),
    (
        "^2 --context-parallel-size 2 --cp-comm-type p2p --attention-backend flash",
        {
            "--attention-backend": "give auto or transformer_engine or reference, or --cp-comm-type a2a"
        },
    ),
    (
        "--hybrid-layer-pattern ME",
        {"--num-experts": "expert layers", "--hybrid-layer-pattern": "disable-bias-linear"},
    ),
    ("--num-experts 4", {"--num-experts": "no expert layer"}),
    (f"{MOE} --moe-router-topk 5", {"--moe-router-topk": "1 to 4"}),
    (f"{MOE} --moe-router-topk 1", {"--moe-router-topk": "--moe-router-pre-softmax"}),
    (f"{MOE} --moe-router-group-topk 1", {"--moe-router-group-topk": "--moe-router-num-groups"}),
    (f"{MOE} {GROUPS} 3 --moe-router-group-topk 1", {"--moe-router-num-groups": "1, 2, 4"}),
    (f"{MOE} {GROUPS} 2 --moe-router-group-topk 3", {"--moe-router-group-topk": "1 to 2"}),
    (f"{MOE} {GROUPS} 4 --moe-router-group-topk 1", {"--moe-router-group-topk": "1 experts"}),
    (
        f"{MOE} {GROUPS} 4 --moe-router-group-topk 3",
        {"--moe-router-group-topk": "--moe-router-topk is 2"},
    ),
    (f"{MOE} --moe-router-enable-expert-bias", {"--moe-router-enable-expert-bias": "sigmoid"}),
    (
        f"{MOE} --moe-aux-loss-per-document --moe-router-load-balancing-type global_aux_loss",
        {"--moe-aux-loss-per-document": "seq_aux_loss"},
    ),
    (
        f"{MOE} --moe-router-load-balancing-type sinkhorn",
        {"--moe-router-load-balancing-type": "aux_loss"},
    ),
    ("--skip-train", {"--skip-train": "--valid-data-path"}),
    ("--log-progress", {"--log-progress": "give --save"}),
    (
        "^2 --tensor-model-parallel-size 2 --vocab-size 1000 --padded-vocab-size 1152",
        {
            "--padded-vocab-size": "is not 1024, to which 1000 tokens are padded as a multiple of 256"
        },
    ),
    (
        "--optimizer sgd --dataloader-type cyclic",
        {"--optimizer": "AdamW with fp32 states", "--dataloader-type": "single data loader"},
    ),
    (
        "--save empty --save-interval 4 --save-retain-interval 6",
        {"--save-retain-interval": "give 4 or 8"},
    ),
    (f"{MOE} --moe-router-dtype fp64", {"--moe-router-dtype": "fp32"}),
    (f"{MOE} --moe-token-dispatcher-type flex", {"--moe-token-dispatcher-type": "allgather"}),
    (
        f"{MOE} --moe-pad-expert-input-to-capacity",
        {"--moe-pad-expert-input-to-capacity": "capacity-factor"},
    ),
    (
        f"{MOE} --moe-expert-rank-capacity-factor auto --moe-token-dispatcher-type alltoall "
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        {"--moe-expert-rank-capacity-factor": "leave one of the two flags out"},
    ),
    (
        f"{MOE} --moe-expert-rank-capacity-factor most",
        {"--moe-expert-rank-capacity-factor": "must be a number or auto"},
    ),
    (f"{MOE} --seq-length 2000000000", {"--moe-router-topk": "4000000000"}),
    ("--seq-length 1", {"--seq-length": ">= 2"}),
    ("--seq-length 65536 --micro-batch-size 65536", {"--seq-length": "4294967296"}),
    ("--micro-batch-size 4 --global-batch-size 6", {"--global-batch-size": "give 4 or 8"}),
    ("^2 --micro-batch-size 2 --global-batch-size 6", {"--global-batch-size": "give 4 or 8"}),
    ("--packing-method fist_fit", {"--packing-method": "sequential"}),
    ("--overlong-policy wrap", {"--overlong-policy": "truncate"}),
    ("--overlong-policy truncate_prompt", {"--overlong-policy": "add --sft"}),
    ("--answer-end document", {"--answer-end": "add --sft"}),
    (
        "--sft --sft-tokenizer-prompt-format default --answer-end document",
        {"--answer-end": "contradicts --sft-tokenizer-prompt-format default"},
    ),
    ("--max-documents-per-pack 0", {"--max-documents-per-pack": ">= 1"}),
    ("--data-path absent.jsonl", {"--data-path": "does not exist"}),
    ("--data-args-path train.jsonl", {"--data-path": "contradicts --data-args-path"}),
    (
        "--split 1,1,1 --test-data-path valid.jsonl",
        {"--split": "contradicts --test-data-path"},
    ),
    ("--test-data-path train.jsonl", {"--test-data-path": "cannot test the model"}),
    (
        "--data-path 0.5 train.jsonl valid.jsonl",
        {"--data-path": "every path or no path must have a weight"},
    ),
    (
        "--data-path 0 train.jsonl 1 valid.jsonl",
        {"--data-path": "the weight 0 must be more than 0"},
    ),
    (
        "--data-path 1e30 train.jsonl 1 valid.jsonl",
        {"--data-path": "the weight 1e30 must be a number below 1e+18"},
    ),
    (
        "--data-path 1 train.jsonl inf valid.jsonl",
        {"--data-path": "the weight inf must be a number below 1e+18"},
    ),
    (
        "--data-path 1e-999999999 train.jsonl 1 valid.jsonl",
        {"--data-path": "the weight 1e-999999999 must be more than 0"},
    ),
    (
        "--data-path org/name",
        {
            "--data-path": "hf download org/name --repo-type dataset --local-dir data/name` and give "
        },
    ),
    (
        "--data-path https://huggingface.co/datasets/org/name/tree/main",
        {"--data-path": "give `--data-path hf://datasets/org/name`"},
    ),
    ("--data-path hf://org/name", {"--data-path": "write hf://datasets/ORGANISATION/NAME"}),
    (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model Org/Name-8B",
        {"--tokenizer-model": "hf download Org/Name-8B tokenizer.json tokenizer_config.json "},
    ),
    (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model hf://datasets/org/name",
        {"--tokenizer-model": "is no path of a model on the Hugging Face Hub"},
    ),
    (
        "--pretrained-checkpoint Org/Name",
        {"--pretrained-checkpoint": "convert --from-hf hf://Org/Name --save checkpoints/Name`"},
    ),
    (
        "--data-path corpus_text.bin",
        {"--data-path": "give the common prefix of both files, corpus_text"},
    ),
    ("--split 0,1,1", {"--split": "the first must be above 0"}),
    (
        "--split 9,1 --valid-data-path valid.jsonl --eval-interval 5",
        {"--split": "--valid-data-path"},
    ),
    ("--split 1 --eval-interval 5 --skip-train", {"--skip-train": "no validation or test data"}),
    ("--data-path empty", {"--data-path": "no .jsonl, .json, .parquet or .txt"}),
    ("--data-path empty/*.jsonl", {"--data-path": "matches no file"}),
    ("--data-path nothing.jsonl", {"--data-path": "is empty"}),
    (
        "--valid-data-path corpus_text --eval-interval 5",
        {"--valid-data-path": "its .idx file does not exist"},
    ),
    ("--train-data-path valid.jsonl", {"--data-path": "--train-data-path"}),
    ("--valid-data-path valid.jsonl", {"--valid-data-path": "--eval-interval"}),
    ("--valid-data-path train.jsonl --eval-interval 5", {"--valid-data-path": "training data"}),
    ("--eval-interval 5", {"--eval-interval": "--valid-data-path"}),
    ("--tokenizer-type HuggingFaceTokenizer", {"--tokenizer-model": "required"}),
    (
        "--tokenizer-type SFTTokenizer --tokenizer-model no.json",
        {"--tokenizer-model": "does not exist"},
    ),
    (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model .",
        {"--tokenizer-model": "no tokenizer.json"},
    ),
    ("--tokenizer-model train.jsonl", {"--tokenizer-model": "does not use a model file"}),
    ("--tokenizer-type BertWordPieceCase", {"--tokenizer-type": "HuggingFaceTokenizer"}),
    (
        "--tokenizer-type NullTokenizer",
        {"--vocab-size": "required with --tokenizer-type NullTokenizer"},
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 9 --null-tokenizer-eod-id 9",
        {"--null-tokenizer-eod-id": "give at most 8"},
    ),
    (
        "--null-tokenizer-eod-id 9",
        {"--null-tokenizer-eod-id": "give --tokenizer-type NullTokenizer"},
    ),
    (
        "--tokenizer-special-tokens <a>",
        {"--tokenizer-special-tokens": "TikTokenizer or SentencePieceTokenizer"},
    ),
    ("--tokenizer-type GPT2BPETokenizer", {"--vocab-file": "required", "--merge-file": "required"}),
    ("--vocab-file train.jsonl", {"--merge-file": "required with --tokenizer-type GPT2BPET"}),
    (
        "--vocab-file train.jsonl --tokenizer-type ByteTokenizer",
        {"--vocab-file": "does not use this file"},
    ),
    ("--chat-template chatml", {"--chat-template": "--sft"}),
    ("--sft --chat-template no.jinja", {"--chat-template": "chatml"}),
    ("--sft-tokenizer-prompt-format default", {"--sft-tokenizer-prompt-format": "--sft"}),
    (
        "--sft --sft-tokenizer-prompt-format llama",
        {
            "--sft-tokenizer-prompt-format": "nemotron-h-aligned, nemotron-nano-v2, identity, default"
        },
    ),
    (
        "--sft --sft-tokenizer-prompt-format identity --chat-template chatml",
        {"--chat-template": "contradicts --sft-tokenizer-prompt-format identity"},
    ),
    ("--max-bad-fraction 1.5", {"--max-bad-fraction": "<= 1"}),
    ("--lr abc", {"--lr": "number"}),
    ("--lr inf", {"--lr": "finite"}),
    ("--lr -1e-3", {"--lr": ">= 0"}),
    ("--lr", {"--lr": "needs a value"}),
    ("--lr 1e-3 1e-4", {"--lr": "one value"}),
    ("--min-lr 1", {"--min-lr": "0.001"}),
    ("--adam-beta2 1", {"--adam-beta2": "< 1"}),
    ("--adam-eps 0", {"--adam-eps": "> 0"}),
    ("--lr-warmup-iters 20", {"--lr-warmup-iters": "at most 19"}),
    ("--lr-warmup-fraction 1", {"--lr-warmup-fraction": "at most 19"}),
    ("--lr-warmup-iters 20 --lr-decay-style constant", {"--lr-warmup-iters": "at most 19"}),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", {"--lr-warmup-fraction": "one of the two"}),
    ("--lr-decay-style WSD", {"--lr-wsd-decay-iters": "required"}),
    (
        "--validation-set-names a",
        {"--validation-set-names": "needs --multiple-validation-sets"},
    ),
    (
        "~--train-iters --train-samples 40 --rampup-batch-size 1 1",
        {"--rampup-batch-size": "needs three numbers"},
    ),
    (
        "--global-batch-size 8 --rampup-batch-size 2 2 9",
        {"--rampup-batch-size": "needs the length of the run and of its schedule in samples"},
    ),
    (
        "~--train-iters --train-samples 40 --lr-warmup-iters 2 --global-batch-size 8 "
        "--rampup-batch-size 2 2 9",
        {"--rampup-batch-size": "needs the length of the run and of its schedule in samples"},
    ),
    (
        "~--train-iters --train-epochs 2 --global-batch-size 8 --rampup-batch-size 2 2 9",
        {"--rampup-batch-size": "needs the length of the run and of its schedule in samples"},
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 2 40",
        {"--rampup-batch-size": "fewer than 40"},
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 4 9",
        {"--rampup-batch-size": "does not reach --global-batch-size (8) from 2 in steps of 4"},
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --micro-batch-size 2 "
        "--rampup-batch-size 3 1 9",
        {"--rampup-batch-size": "multiples of 2"},
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 2 0 9",
        {"--rampup-batch-size": "two numbers above 0"},
    ),
    (
        "~--train-iters --train-samples 40 --global-batch-size 8 --rampup-batch-size 9 1 9",
        {"--rampup-batch-size": "give a START of at most 8"},
    ),
    ("--mock-data", {"--data-path": "contradicts --mock-data: both name the training data"}),
    (
        "~--data-path --mock-data --valid-data-path valid.jsonl --eval-interval 2",
        {"--valid-data-path": "contradicts --mock-data"},
    ),
    ("--train-samples 21", {"--train-samples": "the samples give 21 iterations"}),
    ("~--train-iters --train-samples 7 --global-batch-size 8", {"--train-iters": "required"}),
    ("--train-epochs 2", {"--train-epochs": "contradicts --train-iters (20)"}),
    (
        "~--train-iters --train-samples 40 --train-epochs 2",
        {"--train-epochs": "contradicts --train-samples (40)"},
    ),
    ("~--train-iters --train-epochs 0", {"--train-epochs": "> 0"}),
    ("--lr-decay-iters 9 --lr-decay-samples 9", {"--lr-decay-samples": "one of the two"}),
    ("--global-batch-size 2 --lr-warmup-samples 45", {"--lr-warmup-samples": "22.5 iterations"}),
    ("--lr-warmup-samples 2 --lr-warmup-fraction 0.1", {"--lr-warmup-fraction": "one of the two"}),
    (
        "--load empty --finetune --pretrained-checkpoint empty",
        {"--pretrained-checkpoint": "contradicts --finetune"},
    ),
    (
        "--start-weight-decay 0.1 --end-weight-decay 0.2",
        dict.fromkeys(("--start-weight-decay", "--end-weight-decay"), "incr-style constant"),
    ),
    (
        "--weight-decay-incr-style cosine --start-weight-decay 0.1",
        {"--end-weight-decay": "is required with --weight-decay-incr-style cosine"},
    ),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
        {"--end-weight-decay": "at least --start-weight-decay (0.2)"},
    ),
    ("--weight-decay-incr-style square", {"--weight-decay-incr-style": "one of constant, linear"}),
    ("--optimizer-cuda-graph", {"--optimizer-cuda-graph": "full_iteration"}),
    (
        "--check-for-spiky-loss --loss-spike-policy off",
        {"--check-for-spiky-loss": "--loss-spike-policy off"},
    ),
    ("--loss-spike-policy stop", {"--loss-spike-policy": "one of off, warn, skip"}),
    ("--loss-spike-factor 1", {"--loss-spike-factor": "> 1"}),
    ("--eval-interval 5 --eval-iters -1", {"--eval-iters": ">= 0"}),
    ("--lr-decay-style inverse-square-root", {"--lr-decay-style": "cosine"}),
    ("--optimizer muon", {"--optimizer": "AdamW"}),
    ("--train-iters 0", {"--train-iters": ">= 1"}),
    ("--seed -1", {"--seed": ">= 0"}),
    ("--attention-backend flash_atn_2", {"--attention-backend": "flash_attn_2"}),
    ("--device tpu", {"--device": "cpu"}),
    ("--device cpu --distributed-backend nccl", {"--distributed-backend": "gloo"}),
    ("--bf16 true", {"--bf16": "--no-bf16"}),
    ("--save-interval 5", {"--save-interval": "--save"}),
    ("--save-retain 0 --save ckpt", {"--save-retain": ">= 1"}),
    ("--save train.jsonl/ckpt", {"--save": "is a file"}),
    ("--save train.jsonl", {"--save": "is a file"}),
    ("--load absent", {"--load": "--save"}),
    ("--finetune", {"--finetune": "--load"}),
    ("--begin-phase b", {"--begin-phase": "needs --load"}),
    ("--load empty --begin-phase b --finetune", {"--begin-phase": "contradicts --finetune"}),
    ("--load empty --begin-phase ''", {"--begin-phase": "1 to 64 of the characters"}),
    ("--load empty --begin-phase a/../b", {"--begin-phase": "give a name such as long-context"}),
    ("--load empty --begin-phase \u00fc", {"--begin-phase": "1 to 64 of the characters"}),
    (f"--load empty --begin-phase {'a' * 65}", {"--begin-phase": "1 to 64 of the characters"}),
    ("--ckpt-step 3", {"--ckpt-step": "--load"}),
    ("--ckpt-step newest --load empty", {"--ckpt-step": "N|best"}),
    ("--save-best", {"--save-best": "needs --save"}),
    ("--save-best --save ckpt", {"--save-best": "needs validations"}),
    ("--sft --valid-metric exact_match", {"--valid-metric": "needs validations"}),
    (
        "--data-path train.jsonl --split 90,10 --eval-interval 5 --valid-metric exact_match",
        {"--valid-metric": "add --sft"},
    ),
    ("--sample-prompts absent.txt", {"--sample-prompts": "does not exist"}),
    ("--early-stopping-patience 2", {"--early-stopping-patience": "--eval-interval N"}),
    ("--log-jsonl train.jsonl/a/log.jsonl", {"--log-jsonl": "is a file"}),
    ("--log-jsonl train.jsonl", {"--log-jsonl": "and would be overwritten"}),
    ("--log-jsonl /dev/null", {"--log-jsonl": "names a device, a pipe or a standard stream"}),
    ("--log-jsonl /dev/stdout", {"--log-jsonl": "names a device, a pipe or a standard stream"}),
    ("--log-jsonl /dev/fd/9", {"--log-jsonl": "names a device, a pipe or a standard stream"}),
    ("--log-jsonl loop", {"--log-jsonl": "Too many levels of symbolic links"}),
    ("--save loop", {"--save": "Too many levels of symbolic links"}),
    (
        "--log-jsonl log.jsonl --report null.html",
        {"--report": "names a device, a pipe or a standard stream"},
    ),
    ("--log-interval 0", {"--log-interval": ">= 1"}),
    ("--report run.html", {"--report": "--log-jsonl"}),
    ("--report run.png --log-jsonl log.jsonl", {"--report": ".html"}),
    (
        "--tensor-model-parallel-size 2",
        {"--tensor-model-parallel-size": "does not divide the 1 processes"},
    ),
    (
        "^6 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-attention-heads 0",
        {
            "--pipeline-model-parallel-size": "not supported yet",
            "--num-attention-heads": "required",
        },
    ),
    ("^6 --tensor-model-parallel-size 4", {"--tensor-model-parallel-size": "give 1, 2, 3 or 6"}),
    ("--mamba-norm-groups 3", {"--mamba-norm-groups": "(512)"}),
    (
        "^4 --tensor-model-parallel-size 4 --mamba-norm-groups 6 --hidden-size 384 --mamba-num-groups 4",
        {"--tensor-model-parallel-size": "multiple of --mamba-norm-groups (6) choose from 1, 2"},
    ),
    (
        "^3 --tensor-model-parallel-size 3 --mamba-num-heads 12 --mamba-num-groups 3 --ffn-hidden-size 99",
        {"--tensor-model-parallel-size": "(4) choose from 1"},
    ),
    (
        "^4 --tensor-model-parallel-size 4 --num-attention-heads 12 --num-query-groups 3 --kv-channels 16",
        {
            "--tensor-model-parallel-size": "neither divides nor is a multiple of --num-query-groups (3) choose from 1"
        },
    ),
    (
        "^16 --tensor-model-parallel-size 16 --num-attention-heads 16 --num-query-groups 2 --mamba-num-heads 8",
        {"--tensor-model-parallel-size": "--mamba-num-heads (8) choose from 1, 2, 4, 8"},
    ),
    (
        "^2 --tensor-model-parallel-size 2 --ffn-hidden-size 1023 --hybrid-layer-pattern -",
        {"--tensor-model-parallel-size": "--ffn-hidden-size (1023) choose from 1, 3, 11"},
    ),
    (
        f"^4 {MOE} --tensor-model-parallel-size 4 --moe-ffn-hidden-size 6 --moe-shared-expert-intermediate-size 8",
        {"--tensor-model-parallel-size": "--moe-ffn-hidden-size (6) choose from 1, 2"},
    ),
    (
        f"^2 {MOE} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --seq-length 127",
        {"--expert-tensor-parallel-size": "1, 127"},
    ),
    (
        f"^4 {MOE} --tensor-model-parallel-size 2 --context-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --seq-length 126",
        {"--expert-tensor-parallel-size": "(2) x --context-parallel-size (2) ranks"},
    ),
    (
        "^4 --tensor-model-parallel-size 4 --expert-tensor-parallel-size 3",
        {"--expert-tensor-parallel-size": "give 1, 2 or 4"},
    ),
    (
        f"^4 {MOE} --tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --moe-ffn-hidden-size 63",
        {"--expert-tensor-parallel-size": "does not divide --moe-ffn-hidden-size (63)"},
    ),
    (
        "^2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 127",
        {"--sequence-parallel": "1, 127"},
    ),
    (
        "^4 --tensor-model-parallel-size 2 --global-batch-size 3",
        {"--global-batch-size": "give 2 or 4"},
    ),
    ("^2 --expert-model-parallel-size 2", {"--expert-model-parallel-size": "no expert layer"}),
    (
        f"{MOE} --expert-model-parallel-size 2",
        {"--expert-model-parallel-size": "does not divide the 1 processes"},
    ),
    (
        f"^3 {MOE} --expert-model-parallel-size 3",
        {"--expert-model-parallel-size": "(4) choose from 1, 2, 4"},
    ),
    (
        "--overlap-param-gather",
        {"--overlap-param-gather": "add --use-distributed-optimizer --overlap-grad-reduce"},
    ),
    (
        "--overlap-param-gather --overlap-grad-reduce",
        {"--overlap-param-gather": "add --use-distributed-optimizer, or"},
    ),
    (
        "--overlap-param-gather --use-distributed-optimizer",
        {"--overlap-param-gather": "add --overlap-grad-reduce"},
    ),
    ("--ddp-bucket-size 0", {"--ddp-bucket-size": ">= 1"}),
    (
        "^3 --tensor-model-parallel-size 3 --hybrid-layer-pattern G",
        {"--tensor-model-parallel-size": "--linear-num-key-heads (16) choose from 1, 2, 4, 8, 16"},
    ),
    (
        "^16 --tensor-model-parallel-size 4 --context-parallel-size 4 --hybrid-layer-pattern G "
        "--linear-num-key-heads 8 --cp-comm-type p2p",
        {"--context-parallel-size": "(2 of a tensor-parallel rank) choose from 1, 2"},
    ),
    ("--experimental-attention-variant dsa", {"--experimental-attention-variant": "attention"}),
    ("--linear-attention-freq 4", {"--linear-attention-freq": "--hybrid-layer-pattern"}),
    ("--linear-cp-mode chunkwise", {"--linear-cp-mode": "exchange the heads"}),
    ("^3 --context-parallel-size 2", {"--context-parallel-size": "give 1 or 3"}),
    (
        "^3 --context-parallel-size 3 --seq-length 126 --hybrid-layer-pattern *-",
        {"--context-parallel-size": "choose from 1, 2, 4"},
    ),
    (
        "^8 --context-parallel-size 8 --cp-comm-type p2p --hybrid-layer-pattern - --pad-packed-seq-alignment 8",
        {"--pad-packed-seq-alignment": "p2p choose from 16, 32, 64, 128"},
    ),
    ("--pad-packed-seq-alignment 5", {"--pad-packed-seq-alignment": "choose from 1, 2, 4, 8"}),
    (
        "^2 --context-parallel-size 2 --cp-comm-type p2p --seq-length 126",
        {"--cp-comm-type": "multiple of 4"},
    ),
    (
        "^4 --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 126",
        {"--sequence-parallel": "whose product divides"},
    ),
    (
        "^8 --context-parallel-size 4 --tensor-model-parallel-size 2",
        {"--context-parallel-size": "(2 of a tensor-parallel rank)"},
    ),
    (
        "^3 --context-parallel-size 3 --seq-length 126 --hybrid-layer-pattern *-",
        {"--context-parallel-size": "or give --cp-comm-type p2p"},
    ),
    (
        "^2 --context-parallel-size 2 --seq-length 127",
        {"--context-parallel-size": "choose from 1, 127"},
    ),
    ("^2 --context-parallel-size 2 --cp-comm-type a2a+p2p", {"--cp-comm-type": "give a2a"}),
    (
        "^8 --context-parallel-size 8 --hybrid-layer-pattern M --mamba-num-heads 4 "
        "--mamba-num-groups 4",
        {"--context-parallel-size": "or give --mamba-cp-comm-type state, which shares no heads"},
    ),
    (
        "^3 --context-parallel-size 3 --seq-length 126 --hybrid-layer-pattern MG "
        "--mamba-cp-comm-type state",
        {"--context-parallel-size": "--linear-num-key-heads (16) choose from"},
    ),
    ("--mamba-cp-comm-type p2p", {"--mamba-cp-comm-type": "heads"}),
    ("--pipeline-model-parallel-size 2", {"--pipeline-model-parallel-size": "not supported"}),
    (
        "--transformer-impl inference_optimized",
        {"--transformer-impl": "give local or transformer_engine"},
    ),
    (
        "--cuda-graph-impl full_iteration --cuda-graph-modules attn",
        {"--cuda-graph-modules": "captures whole steps"},
    ),
    (
        "--cuda-graph-impl full_iteration --hidden-dropout 0.1",
        {"--cuda-graph-impl": "leave one of them out"},
    ),
    (
        "--cuda-graph-modules full_iteration",
        {"--cuda-graph-modules": "--cuda-graph-impl full_iteration"},
    ),
    ("--enable-cuda-graph yes", {"--enable-cuda-graph": "write --enable-cuda-graph alone"}),
    (
        "--cuda-graph-impl local --hidden-dropout 0.1",
        {"--cuda-graph-impl": "dropout inside captured modules"},
    ),
    ("--cuda-graph-impl local --attention-dropout 0.1", {"--attention-dropout": "not supported"}),
    (
        "--cuda-graph-impl local --cuda-graph-modules attn mambo",
        {"--cuda-graph-modules": "did you mean mamba?"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-modules full attn",
        {"--cuda-graph-modules": "give full alone"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-max-packed-seqs 8 100000",
        {"--cuda-graph-max-packed-seqs": "give at most"},
    ),
    ("--cuda-graph-impl local --cuda-graph-modules attn moe", {"--cuda-graph-modules": "no E"}),
    (
        "--cuda-graph-impl local --hybrid-layer-pattern M --cuda-graph-modules mlp",
        {"--cuda-graph-modules": "no -"},
    ),
    (
        f"{MOE} --cuda-graph-impl local --cuda-graph-modules moe moe_router",
        {"--cuda-graph-modules": "give moe or moe_router"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-max-packed-seqs 64 --pad-packed-seq-alignment 4",
        {"--cuda-graph-max-packed-seqs": "give at most 32"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-max-packed-seqs 64 0",
        {"--cuda-graph-max-packed-seqs": ">= 1"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-max-packed-seqs 8 auto",
        {"--cuda-graph-max-packed-seqs": "auto alone"},
    ),
    (
        "--cuda-graph-impl local --cuda-graph-strict --cuda-graph-max-packed-seqs 64 16 --max-documents-per-pack 65",
        {"--max-documents-per-pack": "at most 64"},
    ),
    ("--cuda-graph-impl local --cuda-graph-warmup-steps -1", {"--cuda-graph-warmup-steps": ">= 0"}),
    (
        "--cuda-graph-modules attn --cuda-graph-strict --cuda-graph-audit-interval 5 --cuda-graph-warmup-steps 1",
        dict.fromkeys(
            (
                "--cuda-graph-modules",
                "--cuda-graph-strict",
                "--cuda-graph-audit-interval",
                "--cuda-graph-warmup-steps",
            ),
            "give --cuda-graph-impl local",
        ),
    ),
    ("--cuda-graph-max-packed-seqs", {"--cuda-graph-max-packed-seqs": "50 has no effect"}),
    (
        "--recompute-granularity full",
        {
            "--recompute-method": "give --recompute-method uniform|block",
            "--recompute-num-layers": "is required",
        },
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        {"--recompute-num-layers": "give 1 to 3"},
    ),
    (
        "--recompute-granularity selective --recompute-num-layers 0",
        {"--recompute-num-layers": ">= 1"},
    ),
    (
        "--recompute-activations --hybrid-layer-pattern M-",
        {"--recompute-modules": "give other modules with"},
    ),
    ("--recompute-activations --recompute-modules mamba moe_act", {"--recompute-modules": "no E"}),
    (
        "--recompute-activations --recompute-modules mla_up_proj",
        {"--recompute-modules": "leave it out"},
    ),
    (
        "--recompute-activations --recompute-modules shared_experts",
        {"--recompute-modules": "give moe"},
    ),
    ("--recompute-granularity whole", {"--recompute-granularity": "full, selective"}),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --cuda-graph-impl local",
        {"--recompute-num-layers": "give 1, or --cuda-graph-impl full_iteration"},
    ),
    (
        f"{MOE} --recompute-granularity full --recompute-method block --recompute-num-layers 2 --cuda-graph-impl local "
        "--cuda-graph-modules moe_router",
        {"--cuda-graph-modules": "give moe, which captures whole layers"},
    ),
    (
        f"{MOE} --recompute-activations --recompute-modules moe --cuda-graph-impl local "
        "--cuda-graph-modules moe_router",
        {"--cuda-graph-modules": "a graph cannot run twice"},
    ),
    ("--distribute-saved-activations", {"--distribute-saved-activations": "--sequence-parallel"}),
    ("--moe-layer-recompute", {"--moe-layer-recompute": "--recompute-modules moe"}),
    ("--fine-grained-activation-offloading", {"--offload-modules": "is required"}),
    (
        "--offload-layer-inputs --offload-buffers 0",
        {
            "--offload-layer-inputs": "give --recompute-granularity full",
            "--offload-buffers": ">= 1",
        },
    ),
    (
        f"{SHARED} --moe-shared-expert-overlap {OFFLOAD} mlp_norm",
        {"--moe-shared-expert-overlap": "which copies on streams of its own"},
    ),
    (
        f"{SHARED} --moe-shared-expert-overlap --recompute-activations --recompute-modules layernorm",
        {"--moe-shared-expert-overlap": "or recompute moe instead of layernorm"},
    ),
    (f"{OFFLOAD} moe_act mamba_nrom", {"--offload-modules": "did you mean mamba_norm?"}),
    (f"{OFFLOAD} mlp_norm moe_act", {"--offload-modules": "no E"}),
    (f"{OFFLOAD} mlp_norm --hybrid-layer-pattern M*M", {"--offload-modules": "no - (MLP) or E"}),
    (
        f"{OFFLOAD} core_attn mlp_fc1 --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        {"--offload-modules": "or give --offload-layer-inputs"},
    ),
    (
        f"{OFFLOAD} mamba_norm mamba_scan --recompute-activations --recompute-modules mamba",
        {"--offload-modules": "leave mamba out of --recompute-modules"},
    ),
    (f"{OFFLOAD} attn_proj mlp_norm", {"--offload-modules": "add core_attn"}),
    ("--cpu-offloading-num-layers 2", {"--cpu-offloading-num-layers": "--recompute-method block"}),
    ("--activation-offload-fraction 0.5", {"--activation-offload-fraction": "give fewer"}),
    ("--optimizer-cpu-offload", {"--optimizer-cpu-offload": "stays on the device"}),
    ("--fp8-format hybrid --fp16", {"--fp8-format": "--bf16", "--fp16": "--bf16"}),
    ("--spec my.module my_spec", {"--spec": "hybrid_stack_spec"}),
    ("--use-mcore-models yes", {"--use-mcore-models": "takes no value"}),
    ("--learning-rate 1", {"--learning-rate": "--lr 1"}),
    ("--no-such-flag 1", {"--no-such-flag": "--help-all"}),
    ("--hiden-size 64", {"--hiden-size": "--hidden-size"}),
    ("--hidden_size 64", {"--hidden_size": "--hidden-size"}),
    ("@absent.args", {"@absent.args": "cannot be read"}),
    ("--config absent.yaml", {"--config": "cannot be read"}),
    (
        "--hidden-size 0 --lr x --bogus --normalization L --global-batch-size 0 --fp8-margin 1 --moe-router-topk 0",
        {
            "--hidden-size": "",
            "--lr": "",
            "--bogus": "",
            "--normalization": "",
            "--global-batch-size": "",
            "--fp8-margin": "",
            "--moe-router-topk": "",
        },
    ),
]


def command_line(right: dict[str, str | None], change: str) -> tuple[list[str], int]:
    """Return the valid command line with a change: a flag of the change replaces the original one."""
    words, world_size, kept = change.split(), 1, dict(right)
    for word in words:
        kept.pop(word.lstrip("~"), None)
        world_size = int(word[1:]) if word.startswith("^") else world_size
    argv = [part for pair in kept.items() for part in pair]
    return [*argv, *(word for word in words if word[0] not in "~^")], world_size


@pytest.mark.parametrize(("change", "expected"), INVALID, ids=[change for change, _ in INVALID])
def test_every_problem_is_reported(right, change: str, expected: dict[str, str]) -> None:
    argv, world_size = command_line(right, change)
    with pytest.raises(ConfigError) as caught:
        parse(argv, world_size)
    problems = caught.value.problems
    assert {problem.option for problem in problems} == set(expected), str(caught.value)
    for problem in problems:
        assert expected[problem.option] in f"{problem.value} {problem.rule} {problem.cure}", str(
            problem
        )
        assert problem.rule and problem.cure
    assert len(problems) == len(expected), str(caught.value)


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
        ("--bf16 --kv-channels 36", True, "not of 36", "another --attention-backend"),
        ("--bf16 --kv-channels 192 --attention-backend flash_attn_2", True, "", ""),
        ("--bf16 --kv-channels 192 --hybrid-layer-pattern M-", True, "", ""),
        ("--bf16", True, "", ""),
    ],
)
def test_transformer_engine_layers(
    right, monkeypatch, change: str, installed: bool, rule: str, cure: str
) -> None:
    spec = ModuleSpec("any", None, origin="somewhere") if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    argv, _ = command_line(right, f"--transformer-impl transformer_engine {change}")
    if not rule:
        assert parse(argv).training.transformer_impl == "transformer_engine"
        return
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    (problem,) = caught.value.problems
    assert (
        problem.option == "--transformer-impl" and rule in problem.rule and cure in problem.cure
    ), str(problem)


FULL_RECOMPUTATION = "--recompute-granularity full --recompute-method"


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_graphs_of_layers_recompute_no_group_of_layers(right, monkeypatch, impl: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec("any", None))
    argv, _ = command_line(
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
    right, monkeypatch, change: str, installed: bool, rule: str, cure: str
) -> None:
    spec = ModuleSpec("any", None, origin="somewhere") if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    argv, world_size = command_line(right, f"{change} --cuda-graph-impl transformer_engine")
    if not rule:
        assert parse(argv, world_size).cuda_graph.uses_transformer_engine
        return
    with pytest.raises(ConfigError) as caught:
        parse(argv, world_size)
    (problem,) = caught.value.problems
    assert (
        problem.option == "--cuda-graph-impl" and rule in problem.rule and cure in problem.cure
    ), str(problem)


@pytest.mark.parametrize("words", [["@absent.args"], ["--config", "absent.yaml"]])
def test_what_a_file_that_cannot_be_read_would_have_said_is_not_missing(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*words, "--lr", "x"])
    assert [problem.option for problem in caught.value.problems] == [words[0], "--lr"], str(
        caught.value
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_nccl_needs_gpus_whatever_the_number_of_processes(
    right, monkeypatch, world_size: int
) -> None:
    argv, _ = command_line(right, "--distributed-backend nccl")
    monkeypatch.setattr("megatron_packed.config.launch_checks.may_have_gpu", lambda environ: False)
    with pytest.raises(
        ConfigError,
        match="--distributed-backend nccl: runs only between GPUs, and no GPU is visible",
    ):
        parse(argv, world_size)
    monkeypatch.setattr("megatron_packed.config.launch_checks.may_have_gpu", lambda environ: True)
    assert parse(argv, world_size).parallel.distributed_backend == "nccl"


def test_the_right_command_line_is_right(right) -> None:
    argv, _ = command_line(right, "")
    assert parse(argv).model.num_layers == 3


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
def test_tokenizers_of_optional_packages(
    right, monkeypatch, change, installed, option, said
) -> None:
    spec = ModuleSpec("any", None, origin="somewhere") if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    argv, _ = command_line(right, change)
    if not option:
        assert parse(argv).data.tokenizer_model == "train.jsonl"
        return
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    (problem,) = caught.value.problems
    assert problem.option == option and said in f"{problem.rule} {problem.cure}", str(problem)
