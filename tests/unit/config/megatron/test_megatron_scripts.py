"""Handling of the flags that Megatron-LM's hybrid examples and functional tests pass."""

from pathlib import Path

from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN
from megatron_packed.config.parser.command_line import spellings
from megatron_packed.config.parser.parse import parse
from support.command_lines import argv_of, problems_of

LINES = (Path(__file__).parent / "megatron_hybrid_flags.txt").read_text().splitlines()
PASSED = {line.split()[0]: line.split()[1:] for line in LINES}
"""Flags of the scripts, each with the values that a script gives."""
NEEDS = {
    "--overlap-param-gather": ["--use-distributed-optimizer", "--overlap-grad-reduce"],
    "--optimizer-cuda-graph": ["--cuda-graph-impl", "full_iteration"],
    "--manual-gc-interval": ["--manual-gc"],
    "--group-query-attention": ["--num-query-groups", "2"],
    "--finetune": ["--load", "empty"],
    "--async-save": ["--save", "empty"],
    "--save-interval": ["--save", "empty"],
}
"""Flags that are valid only together with other flags, which the scripts also give."""


def test_no_flag_of_a_script_is_unknown(right) -> None:
    """At least 95 % of the flags are known: each is accepted, or refused with the reason for the
    flag or for its value.
    """
    unknown, accepted, refused = [], [], []
    for flag, values in PASSED.items():
        argv = argv_of(right, f"~{flag}")
        mine = [
            p for p in problems_of([*argv, *NEEDS.get(flag, []), flag, *values]) if p.option == flag
        ]
        if any(problem.rule == "is not a flag" for problem in mine):
            unknown.append(flag)
        elif flag in REFUSAL_OF and any(p.rule.startswith(REFUSAL_OF[flag].reason) for p in mine):
            assert [p.cure for p in mine] == [REFUSAL_OF[flag].nearest], mine
            refused.append(flag)
        else:
            assert flag in spellings() or flag in TAKEN
            accepted.append(flag)
    print(
        f"{len(PASSED)} flags: {len(accepted)} accepted, {len(refused)} refused, {len(unknown)} unknown"
    )
    assert len(PASSED) > 300 and len(accepted) + len(refused) >= 0.95 * len(PASSED)
    assert unknown == []


TRAINING = """
    --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --hybrid-layer-pattern M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --log-validation-ppl-to-tensorboard
    --log-timers-to-tensorboard --log-params-norm --log-num-zeros-in-grad --micro-batch-size 4
    --global-batch-size 32 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 50 --timing-log-level 0 --lr-decay-iters 320000 --save empty
    --load empty --distributed-backend gloo --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1 --save-interval 10000 --eval-iters 0
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --ckpt-fully-parallel-load --attention-softmax-in-fp32 --use-mcore-models --bf16
    --attention-backend unfused --log-memory-to-tensorboard --async-save --use-persistent-ckpt-worker
    --data-path train.jsonl --vocab-file train.jsonl --merge-file train.jsonl
    --ckpt-format torch_dist --no-gradient-accumulation-fusion
"""
"""Flags of Megatron's functional test of a hybrid model on one rank, without those in LEFT_OUT."""
LEFT_OUT = {
    "--split": "949,50,1",
    "--check-weight-hash-across-dp-replicas-interval": "10",
}


def test_a_functional_test_of_megatron_as_it_is(right) -> None:
    assert problems_of(TRAINING.split()) == ()
    # --max-position-embeddings equals --seq-length, which is enough: a document is at most one
    # sample long, also in micro-batches of several samples.
    assert problems_of([*TRAINING.split(), "--position-embedding-type", "rope"]) == ()
    rest = [word for flag, value in LEFT_OUT.items() for word in (flag, value) if word]
    found = problems_of([*TRAINING.split(), *rest])
    assert {problem.option for problem in found} >= {
        flag for flag in LEFT_OUT if flag in REFUSAL_OF
    }


def test_files_of_gpt2_alone_choose_its_tokenizer(right) -> None:
    files = ["--vocab-file", "train.jsonl", "--merge-file", "train.jsonl"]
    minimal = argv_of(right)
    chosen = parse([*minimal, *files])
    assert chosen.data.tokenizer_type == "GPT2BPETokenizer"
    assert parse(minimal).data.tokenizer_type == "ByteTokenizer"
    named = parse([*minimal, *files, "--tokenizer-type", "GPT2BPETokenizer"])
    assert named.data == chosen.data
