"""``megatron-packed plan``: its report, its refusals and its run time."""

import json
import os
import resource
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch.distributed as dist

from megatron_packed.checkpoint import load
from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.cli.main import main
from megatron_packed.cli.plan_time import in_usual_unit
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.serialise import to_dict
from megatron_packed.explain import op_requests
from megatron_packed.models.flops import FlopCounter
from support import commands
from support.json_lines import write_texts

SEED = shlex.split("""--sft --bf16 --sequence-parallel --cp-comm-type p2p --use-distributed-optimizer
    --cuda-graph-impl transformer_engine --cuda-graph-scope mamba attn --cuda-graph-max-packed-seqs 64
    --context-parallel-size 32 --tensor-model-parallel-size 8 --expert-model-parallel-size 64
    --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME
    --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --position-embedding-type none
    --mamba-num-heads 256 --num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688
    --moe-shared-expert-intermediate-size 5376 --moe-token-dispatcher-type alltoall --squared-relu
    --disable-bias-linear --normalization RMSNorm --vocab-size 131072 --untie-embeddings-and-output-weights
    --seq-length 131072""")
"""Flags with the layout of Megatron-LM's pull request 3869 (TP 8, CP 32, EP 64, capacity 64) and a
model of current size.
"""
SMALL = shlex.split("""--bf16 --hybrid-layer-pattern M-*- --hidden-size 256 --num-attention-heads 4
    --disable-bias-linear --normalization RMSNorm --seq-length 2048""")


def plan(capsys, *argv):
    return commands.report(capsys, "plan", *argv)


def refusal(capsys, *argv):
    code, said = commands.refusal(capsys, "plan", *argv)
    assert code in (2, 3)
    return said


def test_4096_ranks_in_ten_seconds():
    """The command takes at most ten seconds of processor time in a separate process, including
    imports. Wall time would depend on other tests.
    """
    # This backend saves the states of chunks, which the default kernels compute again. With heads
    # exchanged, as in Megatron-LM, the peak is in a Mamba layer.
    more = shlex.split(
        "--ssd-backend mamba_ssm --mamba-cp-comm-type heads --world-size 4096 --json"
    )
    command = [sys.executable, "-m", "megatron_packed.cli.main", "plan", *SEED, *more]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    found = json.loads(done.stdout)
    assert found["layout"] == {
        "world_size": 4096,
        "tp_size": 8,
        "cp_size": 32,
        "ep_size": 64,
        "expert_tp_size": 8,
    }
    assert found["documents"] == 64 and set(found["ranks"]) == {
        "balanced experts",
        "all tokens here",
    }
    rows = found["ranks"]["balanced experts"]["bytes"]
    # Parameters are bf16 and gradients fp32. A rank owns an eighth or a 512th of the masters and
    # moments.
    assert (
        rows["parameters"] * 1.8
        < rows["gradients"]
        < 2 * rows["parameters"]
        < 20 * rows["optimizer state"]
    )
    worst = found["ranks"]["all tokens here"]["bytes"]
    assert (
        worst["expert buffers"] > 10 * rows["expert buffers"]
        and worst["parameters"] == rows["parameters"]
    )
    assert all(
        rows[name] > 0
        for name in ("SSM states", "expert buffers", "communication buffers", "activations")
    )
    assert (
        0 < rows["of it the CUDA graphs' pool"] < rows["peak in torch's allocator"] < rows["total"]
    )


NEMOTRON_H_8B = shlex.split("""--sft --bf16 --sequence-parallel --use-distributed-optimizer
    --cuda-graph-impl local --cuda-graph-max-packed-seqs 64 --world-size 256
    --tensor-model-parallel-size 8 --context-parallel-size 32 --seq-length 1048576
    --hybrid-layer-pattern M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M- --hidden-size 4096
    --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --ffn-hidden-size 21504
    --mamba-num-heads 128 --mamba-head-dim 64 --mamba-num-groups 8 --mamba-state-dim 128
    --squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none
    --vocab-size 131072 --untie-embeddings-and-output-weights""")


def test_passed_states_of_nemotron_h_8b_over_32_ranks(capsys):
    """An exchange of heads would have 32 ranks share the 16 heads of a tensor-parallel rank."""
    zigzag = [*NEMOTRON_H_8B, "--cp-comm-type", "p2p"]
    heads = (*zigzag, "--mamba-cp-comm-type", "heads")
    assert "or give --mamba-cp-comm-type state, which shares no heads" in refusal(capsys, *heads)
    found = plan(capsys, *zigzag)
    rows, columns = 1048576 // 32, 16 * 64 + 2 * 128
    assert found["passed_states"] == {
        "layers": {
            "M": {"states": 31 * 4 * 16 * (64 * 128 + 1), "halo": 31 * 3 * columns * 2},
        },
        # Two all-to-alls in each direction, each with 31 of 32 parts, of 4 heads and 1 key head.
        "reordering": 2 * 2 * rows * 31 * ((4 + 2) * 128 + 4 * 128) // 32,
    }
    assert all(found["fits"].values())
    gathered = [*NEMOTRON_H_8B, "--cp-comm-type", "all_gather"]
    assert plan(capsys, *gathered)["passed_states"] == found["passed_states"]
    shared = [*NEMOTRON_H_8B, "--cp-comm-type", "a2a"]
    wide = ("--num-attention-heads", 256, "--num-query-groups", 256)
    assert plan(capsys, *shared, *wide)["passed_states"]["reordering"] == 0
    assert plan(capsys, *SMALL)["passed_states"] is None


def test_passed_states_of_gated_delta_nets(capsys):
    """An exchange of heads would have 4 ranks share the 2 key heads of a tensor-parallel rank."""
    sizes = """--world-size 8 --tensor-model-parallel-size 2 --context-parallel-size 4 --seq-length 4096
        --hybrid-layer-pattern G*-M --hidden-size 64 --num-attention-heads 8 --cp-comm-type p2p
        --mamba-head-dim 8 --mamba-num-groups 8 --linear-num-key-heads 4 --linear-num-value-heads 8
        --linear-key-head-dim 16 --linear-value-head-dim 32 --linear-conv-kernel-dim 3 --bf16 --sft
        --vocab-size 1000 --ffn-hidden-size 128 --sequence-parallel"""
    words = shlex.split(sizes)
    heads = (*words, "--linear-cp-mode", "headwise")
    assert "or give --linear-cp-mode chunkwise, which shares no heads" in refusal(capsys, *heads)
    found = plan(capsys, *words, "--mamba-cp-comm-type", "heads")["passed_states"]
    # Each of 4 value heads has a state (16, 32) and a matrix (16, 16).
    states = 3 * 4 * 4 * 16 * (32 + 16)
    halo = 3 * 2 * (2 * 2 * 16 + 4 * 32) * 2
    assert found["layers"] == {"G": {"states": states, "halo": halo}} and found["reordering"] > 0
    both = plan(capsys, *words)
    assert list(both["passed_states"]["layers"]) == ["M", "G"]


@pytest.mark.parametrize("begun", [False, True], ids=["resumed", "new run"])
def test_a_resumed_run_is_planned_with_the_options_of_its_checkpoint(
    begun, capsys, tmp_path, monkeypatch
):
    """Layers of the checkpoint exchange heads, in any layout; a new run passes states."""
    flags = [*SMALL, "--vocab-size", "1024", "--mock-data", "--lr", "1e-3", "--train-iters", "4"]
    flags += ["--null-tokenizer-eod-id", "1023", "--tokenizer-type", "NullTokenizer"]
    layout = ["--context-parallel-size", "2", "--use-distributed-optimizer", "--world-size", "2"]
    expected = plan(capsys, *flags, *layout, "--mamba-cp-comm-type", "state" if begun else "heads")
    stored = to_dict(parse(flags, 1))
    del stored["parallel"]["mamba_cp_comm_type"]  # there was no such option
    metadata = {"config": stored, "progress": {"iteration": 3, "consumed_packs": 3}}
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: None if begun else metadata)
    flags += ["--load", str(tmp_path)]
    assert commands.exit_code("plan", *flags, *layout, "--json") == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["ranks"] == expected["ranks"] and found["time"] == expected["time"]
    assert (found["passed_states"] is None) == (not begun)
    assert ("--mamba-cp-comm-type heads" in printed.err) == (not begun)
    search = plan(capsys, *flags, "--search", "--world-size", "2")
    (layout_of_two,) = (each for each in search["layouts"] if each["flags"] == " ".join(layout[:3]))
    assert layout_of_two["step_seconds"] == expected["time"]["step_seconds"]


def test_a_checkpoint_that_cannot_be_read_is_not_planned(capsys, tmp_path, monkeypatch):
    def fail(*words, **options):
        raise CheckpointMismatchError("is of a newer version", path=tmp_path)

    monkeypatch.setattr(load, "newest_metadata", fail)
    found = commands.refusal(capsys, "plan", *SMALL, "--load", str(tmp_path))
    assert found[0] == 4 and "is of a newer version" in found[1]


def test_partitions_of_a_pack_are_compared(capsys, tmp_path):
    """Documents of 9 tokens are padded to 12 slots by a zigzag over two ranks."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("9\n" * 40)
    words = [*SMALL, "--world-size", 2, "--context-parallel-size", 2, "--lengths", lengths]
    work = plan(capsys, *words, "--cp-comm-type", "p2p")["step"]
    found = work["rows_of_ranks"]
    assert found["zigzag_padding"] == pytest.approx(3 / 9) and found["slowest_contiguous"] > 1
    share = work["flops"]["attention"] / sum(work["flops"].values())
    slowest = found["slowest_contiguous"]  # of packs that are almost full
    assert found["contiguous_flops"] == pytest.approx((slowest - 1) * share, rel=0.02)
    assert plan(capsys, *words, "--cp-comm-type", "a2a")["step"]["rows_of_ranks"] is None
    assert main(["plan", *map(str, words), "--cp-comm-type", "p2p"]) == 0
    assert "a zigzag pads these documents by 33.3 % of their tokens" in capsys.readouterr().out


def test_parameters_of_nemotron_3_super(capsys):
    """The published sizes are 120.6 billion parameters, of which a token uses 12.7 billion."""
    pattern = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*EMEMEMEME"
    changed = f"--hybrid-layer-pattern {pattern} --moe-latent-size 1024 --num-query-groups 2"
    changed += " --mamba-num-heads 128 --seq-length 8192"
    argv = [*SEED[: SEED.index("--cuda-graph-impl")], *SEED[SEED.index("--hybrid-layer-pattern") :]]
    assert main(["plan", *argv, *changed.split()]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "120,668,687,360 parameters (12,770,216,960 active), vocabulary 131,072;"
    )


def test_rows_add_up_to_the_peak(capsys):
    rows = plan(capsys, *SMALL)["ranks"]["every rank"]["bytes"]
    values = list(rows.values())
    peak = list(rows).index("peak in torch's allocator")
    assert (
        sum(values[:peak]) == values[peak]
        and values[peak] + rows["CUDA context, NCCL (assumed)"] == rows["total"]
    )
    assert not dist.is_initialized()


def test_table_for_people(capsys):
    assert main(["plan", *SMALL, "--world-size", "8", "--tensor-model-parallel-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks: TP 2 x CP 1 x DP 4" in text
    assert "every rank: the memory peak occurs during " in text
    assert "256 MiB for each of 2 NCCL communicators" in text
    assert (
        "\nFits: " in text
        and "documents of --seq-length (2048) tokens each: no data is given" in text
    )
    rows = {line.split("  ")[0] for line in text.splitlines()}
    assert rows >= {"parameters", "gradients", "optimizer state", "total"}


SQUARED = [*SMALL, "--squared-relu", "--vocab-size", "1024"]
EXPERTS = ["--hybrid-layer-pattern", "ME", "--num-experts", "4"]


@pytest.mark.parametrize(
    "flags, said",
    [
        (SQUARED, True),
        ([*SQUARED, *EXPERTS, "--tensor-model-parallel-size", "2"], True),
        # Kernels of other layers are the same without a Hopper GPU.
        ([*SQUARED, "--tensor-model-parallel-size", "2"], False),
        ([*SQUARED, "--transformer-impl", "transformer_engine"], False),
        ([*SQUARED, "--hybrid-layer-pattern", "M*"], False),
        ([flag for flag in SQUARED if flag != "--bf16"], False),
        ([flag for flag in SQUARED if flag != "--squared-relu"], False),
        ([flag for flag in [*SQUARED, *EXPERTS] if flag != "--squared-relu"], False),
    ],
)
def test_activations_that_other_kernels_do_not_save_are_named(capsys, monkeypatch, flags, said):
    line = (
        "Activations of squared ReLU are counted as saved, because this machine has no Hopper GPU"
    )
    monkeypatch.setattr(op_requests, "is_installed", lambda module: False)
    assert main(["plan", *flags]) == 0
    assert (line in capsys.readouterr().out) == said
    monkeypatch.setattr(op_requests, "is_installed", lambda module: True)
    for reasons in ([], ["found (10, 0)"]):
        monkeypatch.setattr(op_requests, "device_reasons", lambda kind, found=reasons: found)
        assert main(["plan", *flags]) == 0
        assert (line in capsys.readouterr().out) == (said and bool(reasons))


@pytest.mark.parametrize("gpu", ["H100", "h200"])
def test_a_named_gpu_has_its_default_kernels_on_any_machine(capsys, monkeypatch, gpu):
    monkeypatch.setattr(op_requests, "is_installed", lambda module: False)
    flags = [*SQUARED, *EXPERTS, "--hybrid-layer-pattern", "E-", "--seq-length", "8192"]
    here, named = plan(capsys, *flags), plan(capsys, *flags, "--gpu", gpu)
    before, after = (one["ranks"]["every rank"]["bytes"]["total"] for one in (here, named))
    assert after < before
    assert main(["plan", *flags, "--gpu", gpu]) == 0
    text = capsys.readouterr().out
    assert f"counted as not saved: {gpu.upper()} with quack-kernels is assumed" in text
    assert main(["plan", *SMALL, "--vocab-size", "1024", "--gpu", gpu]) == 0
    assert "quack-kernels" not in capsys.readouterr().out
    assert plan(capsys, *flags) == here  # the assumption ends with the command


def test_a_growing_batch_is_described(capsys):
    """The numbers of a step are those of the full batch; memory does not depend on the batch."""
    flags = [*SMALL, "--global-batch-size", "6", "--train-samples", "200"]
    ramp = [*flags, "--rampup-batch-size", "2", "2", "12", "--lr-decay-samples", "200"]
    full, grows = plan(capsys, *flags), plan(capsys, *ramp)
    assert full.pop("batch_stages") == [{"step": 0, "packs": 6}]
    steps = {0: 2, 3: 4, 5: 6}
    assert grows.pop("batch_stages") == [{"step": s, "packs": p} for s, p in steps.items()]
    assert full["time"].pop("steps") < grows["time"].pop("steps")
    assert full == grows
    assert main(["plan", *ramp]) == 0
    sentence = "The batch grows from 2 packs to 6 over the first 5 steps (14 samples).\n"
    assert sentence in capsys.readouterr().out


def test_what_to_change_is_found_by_estimating_again(capsys):
    flags = [*SMALL, "--world-size", 8, "--global-batch-size", 8]
    before = plan(capsys, *flags)["ranks"]["every rank"]["bytes"]["total"]
    limit = before / 2**30 - 0.01
    change, *rest = plan(capsys, *flags, "--gpu-memory-gib", limit)["changes"]
    assert not rest and change["flag"] == "--use-distributed-optimizer"
    again = plan(capsys, *flags, *change["flag"].split())["ranks"]["every rank"]["bytes"]["total"]
    assert again == change["total"] == before - change["saves"] < limit * 2**30
    assert main(["plan", *map(str, flags), "--gpu-memory-gib", "0.7"]) == 0
    text = capsys.readouterr().out
    assert "Does not fit: " in text and "helps most: --use-distributed-optimizer saves" in text
    assert main(["plan", *SMALL, "--gpu-memory-gib", "0.1"]) == 0
    assert "No option makes the run fit on this number of ranks" in capsys.readouterr().out


def test_recomputation_is_counted(capsys):
    layers = [word if word != "M-*-" else "*-*-" for word in SMALL]
    flags, bytes_of = [*layers, "--micro-batch-size", 32, "--position-embedding-type", "rope"], []
    for memory in (
        [],
        ["selective"],
        ["full", "--recompute-method", "uniform", "--recompute-num-layers", 1],
    ):
        asked = ["--recompute-granularity", *memory] if memory else []
        found = plan(capsys, *flags, *asked)
        bytes_of.append(found["ranks"]["every rank"]["bytes"]["activations"])
    assert bytes_of[0] > bytes_of[1] > bytes_of[2]
    limit = found["ranks"]["every rank"]["bytes"]["total"] / 2**30
    [change] = plan(capsys, *flags, "--gpu-memory-gib", limit)["changes"]
    assert change["flag"] == " ".join(["--recompute-granularity", *map(str, memory)])


def test_room_for_documents_is_counted(capsys, tmp_path):
    """The estimate grows with the capacity: attention's backward pass rounds each document up to
    128 rows of four heads of 64 and two statistics, in fp32.
    """
    flags = [word if word != "M-*-" else "***" for word in SMALL]
    file = tmp_path / "lengths.txt"
    file.write_text("16\n")
    graphs = ["--cuda-graph-impl", "full_iteration", "--cuda-graph-max-packed-seqs"]
    peaks = []
    for more in (["--lengths", file], [*graphs, 2], [*graphs, 192]):
        found = plan(capsys, *flags, *more)
        # 192 = 1.5 x 2048 / 16
        assert found["documents"] == (192 if more[-1] == file else more[-1])
        assert found["ranks"]["every rank"]["peak"].startswith("backward of varlen_attention")
        peaks.append(found["ranks"]["every rank"]["bytes"]["peak in torch's allocator"])
    assert peaks[0] == peaks[2] == peaks[1] + 190 * 128 * 4 * (64 + 2) * 4


def test_flops_follow_the_lengths(capsys, tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("100\n300\n\n5000\n")
    work = plan(capsys, *SMALL, "--lengths", file, "--world-size", 2)["step"]
    counter = FlopCounter(
        parse([*SMALL, "--data-path", str(file), "--lr", "0", "--train-iters", "1"]).model, 260
    )
    kept = np.array([100, 300, 2048, 2048, 904])  # the longest document is split
    assert work["tokens"] == 2 * 2048 and work["longest"] == 2048 and work["p50"] == 904
    assert work["total_flops"] == pytest.approx(counter.training(kept).total * 4096 / kept.sum())
    assert work["flops_per_rank"] == work["total_flops"] / 2


def test_data_is_used_if_it_is_tokenised_and_never_made(capsys, tmp_path):
    data, cache = tmp_path / "data.jsonl", tmp_path / "cache"
    write_texts(data, ("a" * n for n in (99, 49, 29)))
    flags = [*SMALL, "--data-path", data, "--data-cache-path", cache]
    found = plan(capsys, *flags)
    assert (
        "not tokenised yet" in found["lengths"]
        and found["step"]["mean"] == 2048
        and not cache.exists()
    )
    assert main(["packing", *map(str, flags)]) == 0
    capsys.readouterr()
    found = plan(capsys, *flags)
    assert (
        found["lengths"] == f"the tokenised documents of {data}" and found["step"]["mean"] == 60
    )  # 60 is the mean of the lengths 100, 50 and 30


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--world-size 0", "--world-size 0: must be at least 1 "),
        ("--world-size 1000000000000 --tensor-model-parallel-size 3", "and at most 1,048,576"),
        ("--world-size 6 --tensor-model-parallel-size 4", "does not divide the 6 processes"),
        ("--world-size 8 --global-batch-size 12", "must be a multiple of 8"),
        ("--gpu-memory-gib 0", "finite number above 0"),
        ("--gpu-memory-gib inf", "finite number above 0"),
        ("--lengths nowhere.txt", "--lengths nowhere.txt: No such file or directory"),
        ("--num-attention-heads 3", "--num-attention-heads"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere",
            "--vocab-size is required",
        ),
        ("--offload-everything", "--offload-everything"),
    ],
)
def test_refusals(capsys, flags, said):
    assert said in refusal(capsys, *SMALL, *flags.split())


@pytest.mark.parametrize("text", ["12\nx\n", "", "0\n", "99999999999999999999\n"])
def test_lengths_that_are_none(capsys, tmp_path, text):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert "every line must be a number of tokens" in refusal(capsys, *SMALL, "--lengths", file)


def test_paths_and_packages_of_the_training_machine_do_not_matter(capsys):
    elsewhere = "--save /nowhere/at/all --transformer-impl transformer_engine --vocab-size 1000"
    assert plan(capsys, *SMALL, *elsewhere.split())["vocab_size"] == 1000


def test_options_of_saving_need_no_save_here(capsys):
    """An @file may have them while the folder is chosen at the start of the run."""
    saving = ["--save-best", "--log-progress", "--save-interval", 5]
    validations = ["--eval-interval", 5, "--valid-data-path", "valid.jsonl"]
    flags = [*SMALL, *saving, *validations, "--vocab-size", 1000]
    assert plan(capsys, *flags)["vocab_size"] == 1000


def test_offload_is_counted_and_offered_for_what_recomputation_keeps(capsys):
    whole = shlex.split(
        "--vocab-size 1024 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --seq-length 32768"
    )
    flags = [*SMALL[: SMALL.index("--seq-length")], *whole]
    flags[flags.index("M-*-")] = 4 * "-*--"
    kept = plan(capsys, *flags)["ranks"]["every rank"]["bytes"]
    limit = (kept["total"] - 1) / 2**30
    assert (
        plan(capsys, *flags, "--gpu-memory-gib", limit)["changes"][0]["flag"]
        == "--offload-layer-inputs"
    )
    left = plan(capsys, *flags, "--offload-layer-inputs", "--offload-buffers", 1)["ranks"][
        "every rank"
    ]["bytes"]
    inputs = 16 * 32768 * 256 * 2
    assert (kept["pinned on the host, beside it"], left["pinned on the host, beside it"]) == (
        0,
        inputs,
    )
    assert kept["total"] - left["total"] == 15 * inputs // 16


def test_offload_that_would_move_nothing_is_said(capsys):
    """The plan reports, as a run does, that hidden states of 2,048 tokens are too small to offload."""
    offload = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    offload += " --offload-layer-inputs --min-offloaded-tensor-size"
    for least, said in ((2048 * 256 + 1, True), (2048 * 256, False)):
        assert main(["plan", *SMALL, *offload.split(), str(least)]) == 0
        text = capsys.readouterr().out
        assert (
            f"Nothing would be offloaded: no selected tensor has {least:,} elements" in text
        ) == said
        assert ("pinned on the host" in text) != said and "memory contains CUDA's context" in text


TWO_DEPTHS = ["--hybrid-layer-pattern", "M*-/*-/*-", "--vocab-size", "1024"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        TWO_DEPTHS,
        [*TWO_DEPTHS, "--mtp-use-repeated-layer"],
        [*TWO_DEPTHS, "--lora-rank", "8"],
    ],
)
def test_the_parts_that_6_n_t_leaves_out_make_up_the_difference(capsys, more):
    """Only norms are in N and in no product, so the shares are 100 % up to their number."""
    flags = [*SMALL, "--vocab-size", "1024", "--squared-relu", *more]
    step = plan(capsys, *flags)["step"]
    left_out = step["flops"]["attention"] + step["flops"]["scan"] + step["repeated"]
    assert step["six_n_t"] + left_out == pytest.approx(step["total_flops"], rel=5e-3)
    all_parameters, frozen = step["multiplied_parameters"], step["multiplied_frozen"]
    assert step["six_n_t"] == (6 * all_parameters - 2 * frozen) * step["tokens"]
    assert (frozen > 0) == ("--lora-rank" in more)
    assert (step["repeated"] > 0) == bool(more)
    assert main(["plan", *flags]) == 0
    text = capsys.readouterr().out
    share = 100 * step["six_n_t"] / step["total_flops"]
    terms = "4 F T + 6 N T" if frozen else "6 N T"
    assert (
        f"The approximation {terms} gives {step['six_n_t']:.4g} FLOPs, {share:.1f} % of that"
        in text
    )
    assert (f"4 for each of F = {frozen:,} frozen parameters" in text) == (frozen > 0)
    assert ("MFU counts frozen weights in the same way." in text) == (frozen > 0)
    assert ("by multi-token prediction (" in text) == bool(more)


def test_the_time_of_a_step_states_its_assumption(capsys):
    flags = [*SMALL, "--vocab-size", "1024", "--world-size", "2", "--global-batch-size", "4"]
    a100 = ("--gpu", "a100", "--gpu-memory-gib", 80)
    found = plan(capsys, *flags, *a100, "--mfu", 25, "--train-iters", 10**9)
    seconds = found["step"]["flops_per_rank"] / (0.25 * 312e12)
    assert found["time"] == {
        "gpu": "A100",
        "peak_flops": 312e12,
        "mfu": 25,
        "step_seconds": pytest.approx(seconds),
        "steps": 10**9,
        "seconds": pytest.approx(1e9 * seconds),
        "parts": None,
    }
    assert main(["plan", *flags, "--mfu", "40", "--train-iters", "1"]) == 0
    text = capsys.readouterr().out
    assert "At 40 % MFU, of 989.5 TFLOP/s in bf16 of each H200, a step takes " in text
    assert " ms, and the run of 1 step " in text
    # Without a length of the run, only a step has a time; without bf16, there is no peak.
    without = plan(capsys, *flags)["time"]
    assert without["steps"] is without["seconds"] is None
    assert plan(capsys, *[flag for flag in flags if flag != "--bf16"])["time"] is None
    assert "--gpu H1000: has no known peak FLOP/s; choose one of GB300" in refusal(
        capsys, *flags, "--gpu", "H1000"
    )
    assert "--mfu 0: must be above 0" in refusal(capsys, *flags, "--mfu", "0")


@pytest.mark.parametrize(
    "seconds, text",
    [
        (2.2e6, "25 days"),
        (1.7e5, "47 hours"),
        (7000, "117 minutes"),
        (27.4, "27 s"),
        (1.02, "1 s"),
        (0.0421, "42 ms"),
        (1e-5, "0.01 ms"),
    ],
)
def test_times_have_usual_units(seconds, text):
    assert in_usual_unit(seconds) == text
