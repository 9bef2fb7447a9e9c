"""Output of `--explain`, compared with the choices of the ops."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.explain import capabilities as rows_module
from megatron_packed.explain import kernel_reasons
from megatron_packed.explain.capabilities import (
    capabilities,
    graph_capabilities,
    parallel_capabilities,
)
from megatron_packed.explain.kernel_reasons import Kernel, chosen_kernels, kernel_row
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.explain.report import PlannedRun
from megatron_packed.inputs.known_data import known_data
from megatron_packed.inputs.open_documents import open_documents
from megatron_packed.models.run_model import backends_of, build_model
from megatron_packed.ops.backend_dispatch import Backend, Choices, Op
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.resume.allowed_changes import refusal_of_stored_model
from megatron_packed.training import pretrain
from support.explained import explain

ROOT = Path(__file__).parents[3]
FLAGS = [
    "--hybrid-layer-pattern",
    "M*-E",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--kv-channels",
    "16",
    "--mamba-num-heads",
    "4",
    "--mamba-head-dim",
    "16",
    "--mamba-num-groups",
    "1",
    "--mamba-state-dim",
    "16",
    "--num-experts",
    "4",
    "--squared-relu",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--position-embedding-type",
    "rope",
    "--seq-length",
    "128",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--train-data-path",
    str(ROOT / "README.md"),
    "--tokenizer-type",
    "ByteTokenizer",
    "--device",
    "cpu",
]
CPU = torch.device("cpu")
STATES = ("on", "partial", "off")


def rows(*flags, device=CPU):
    return {
        row.name.strip(): row for row in capabilities(parse([*FLAGS, *flags], world_size=1), device)
    }


def test_the_states_of_a_plain_run_on_a_cpu():
    """Plain PyTorch in place of kernels is partial, and what no option asks for is off."""
    found = rows()
    of_state = {state: {name for name in found if found[name].state == state} for state in STATES}
    kernels = {name for name in found if name.startswith("kernel ")}
    assert of_state["partial"] == {"device", *kernels} - {"kernel adamw"} and len(kernels) > 10
    running = {"precision", "determinism", "isolation self-test", "layers", "kernel adamw"}
    assert of_state["on"] == running
    outputs = {"validation", "checkpoints"}
    assert {"CUDA graphs", "offload", "data parallelism", *outputs} < of_state["off"]
    assert sum(map(len, of_state.values())) == len(found)


GATED = ["--attention-output-gate", "--qk-layernorm", "--apply-layernorm-1p"]


@pytest.mark.parametrize("flags", [[], GATED], ids=["plain", "gated attention"])
def test_op_requests_have_the_inputs_of_the_run(flags, monkeypatch):
    """`op_requests` equals the inputs of the ops in a forward and backward pass of the real model."""
    config = parse([*FLAGS, *flags], world_size=1)
    asked = {}

    def look_up(choices, key):
        op, (_, inputs) = choices._choose.__self__, key
        asked.setdefault(op.name, set()).add(inputs)
        return dict.__getitem__(choices, key)

    model = build_model(config, 32_768, "cpu")
    monkeypatch.setattr(Choices, "__getitem__", look_up)
    from megatron_packed.packed.micro_batch import MicroBatch

    model(MicroBatch.build([(torch.arange(128).numpy(), None)], 128)).loss.backward()
    told = {op.name: inputs for op, _, inputs in op_requests(config, CPU) if op.name != "adamw"}
    assert set(told) == set(asked)
    assert {name: inputs for name, inputs in told.items() if inputs not in asked[name]} == {}


def by_transformer_engine(**changes):
    config = parse(FLAGS, world_size=1)
    training = {"transformer_impl": "transformer_engine", "bf16": True, "device": "auto"} | changes
    return replace(config, training=replace(config.training, **training))


def test_layers_are_local_or_refused_where_transformer_engine_cannot_run():
    assert rows()["layers"].state == "on" and rows()["layers"].detail.startswith("local: ")
    found = {row.name: row for row in capabilities(by_transformer_engine(), CPU)}
    assert found["layers"].state == "off" and "GPUs only" in found["layers"].detail
    assert found["layers"].fix == "give local, which computes the same on a CPU"
    assert found["kernel varlen_attention"].state == "off" and "kernel rms_norm" not in found


def test_layers_by_transformer_engine(monkeypatch):
    monkeypatch.setattr(kernel_reasons, "transformer_engine_refusal", lambda device, dtype: None)
    assert (
        next(
            row for row in capabilities(by_transformer_engine(), CPU) if row.name == "layers"
        ).state
        == "on"
    )


def test_a_run_whose_layers_cannot_be_built_ends_before_ranks_meet(monkeypatch, capsys):
    def meet(*arguments, **options):
        raise AssertionError("ranks met")

    monkeypatch.setattr(pretrain.ParallelGroups, "create", meet)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pretrain.run_job(by_transformer_engine(), None) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said == (
        "--transformer-impl transformer_engine: TransformerEngine runs on CUDA GPUs only; give local, which computes "
        "the same on a CPU.\n"
    )


def test_attention_of_transformer_engine_is_checked():
    """The refusal names the option that selected the attention kernel."""
    with pytest.raises(
        ConfigError,
        match=r"^--transformer-impl transformer_engine: its attention cannot be used: .*name "
        r"another --attention-backend as well, or give local\.$",
    ):
        chosen_kernels(by_transformer_engine(), CPU)
    with pytest.raises(
        ConfigError, match=r"^--attention-backend flash_attn_2: cannot be used for attention: "
    ):
        chosen_kernels(by_transformer_engine(attention_backend="flash_attn_2"), CPU)


@pytest.mark.parametrize("capacity, refused", [(14, False), (15, True)])
def test_attention_is_checked_for_the_capacity_of_graphs(capacity, refused):
    """Attention that needs memory for every document of the capacity is refused at the start."""
    flags = ["--cuda-graph-impl", "local", "--cuda-graph-max-packed-seqs", "8", str(capacity)]
    config = parse([*("4096" if flag == "128" else flag for flag in FLAGS), *flags], world_size=1)
    chosen = {
        "deterministic_mode": True,
        "attention_backend": "transformer_engine",
        "device": "auto",
    }
    config = replace(config, training=replace(config.training, **chosen))
    told = {op.name: inputs for op, _, inputs in op_requests(config, CPU)}
    assert (
        bool(told["varlen_attention"].oversized_square) == refused
    )  # 2^30 / (4 heads x 4096^2) = 16 documents, the tail included


def test_context_parallelism_says_how_and_where_documents_lie():
    def said(*flags):
        config = parse([*FLAGS, "--context-parallel-size", "2", *flags], world_size=2)
        return {row.name.strip(): row for row in capabilities(config, CPU, 2)}

    assert rows()["context parallelism"].state == "off"
    reason = "the tokens of each pack are split over 2 ranks, by a2a"
    heads = ("--mamba-cp-comm-type", "heads")
    assert said(*heads)["context parallelism"].detail == reason
    zigzag = ("--cp-comm-type", "p2p", "--cp-partition-mode", "zigzag")
    chosen = said("--cp-comm-type", "p2p", *heads)["context parallelism"].detail
    assert chosen.endswith("over 2 ranks, by p2p of contiguous rows or of a zigzag")
    ring = said(*zigzag, *heads)
    assert ring["context parallelism"].detail.endswith(
        "by p2p; documents start at multiples of 4 tokens"
    )
    passed = said()["context parallelism"].detail
    assert passed == f"{reason}; Mamba layers pass states"
    delta = ("--hybrid-layer-pattern", "MG*E", "--linear-num-key-heads", "1")
    passed = said(*delta, *heads)["context parallelism"].detail
    assert passed == f"{reason}; gated delta net layers pass states"
    moved = said(*zigzag)
    assert moved["context parallelism"].detail.endswith(
        "pass states, and all-to-alls reorder the rows of attention"
    )
    parts = said("--cp-comm-overlap-parts", "2", *heads)["context parallelism"].detail
    assert parts == f"{reason}; parts in which heads travel: 2 for each * layer, 1 for each M layer"
    assert "kernel context_parallel_attention" in ring and "kernel varlen_attention" not in ring
    words = [*FLAGS, "--context-parallel-size", "2", "--cp-comm-type", "p2p", "--attention-backend"]
    asked = [
        backends_of(parse([*words, name], world_size=2)).get("context_parallel_attention")
        for name in ("auto", "reference")
    ]
    assert asked == ["auto", "reference"]


def test_replicas_are_those_of_the_processes_that_there_are():
    def said(world_size, *flags):
        config = parse([*FLAGS, *flags], world_size)
        found = {row.name.strip(): row for row in capabilities(config, CPU, world_size)}
        optimizer = found["distributed optimizer"]
        return found["data parallelism"][1:3], (optimizer.state, optimizer.detail, optimizer.fix)

    tensor = ("--tensor-model-parallel-size", "2")
    none = ("off", "no two ranks hold the same weights", "")
    assert said(1) == (("off", "one replica of 1 process"), none)
    assert said(2, *tensor) == (("off", "one replica of 2 processes"), none)
    replicas, optimizer = said(4, *tensor)
    assert replicas == ("on", "2 replicas of 2 processes; gradients are summed by all-reduce")
    everything = "every rank holds all of the fp32 master weights and moments"
    assert optimizer == ("off", everything, "--use-distributed-optimizer")
    replicas, optimizer = said(2, "--context-parallel-size", "2", "--use-distributed-optimizer")
    assert replicas == ("off", "one replica of 2 processes; gradients are summed by reduce-scatter")
    part = "every rank holds its part of the fp32 master weights and moments"
    assert optimizer == ("on", part, "")
    loads = ("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.1")
    replicas, _ = said(2, *loads)
    assert replicas[1].endswith("by all-reduce, and loads of experts once in each micro-batch")
    assert "loads" not in said(2, *tensor, *loads)[0][1]
    latent = parse([*FLAGS, "--expert-model-parallel-size", "2", "--moe-latent-size", "24"], 2)
    found = {row.name.strip(): row.detail for row in capabilities(latent, CPU, 2)}
    assert found["expert parallelism"].endswith(" by allgather, in rows of 24 channels")
    # With expert tensor parallelism of 1, two ranks hold the same experts.
    replicas, optimizer = said(2, *tensor, "--expert-tensor-parallel-size", "1")
    assert (
        replicas == ("off", "one replica of 2 processes; gradients are summed by all-reduce")
        and optimizer[1] == everything
    )


def test_graphs_are_on_off_or_partial_with_the_next_best_setting():
    assert (rows()["CUDA graphs"].state, rows()["CUDA graphs"].detail) == (
        "off",
        "--cuda-graph-impl none",
    )
    found = rows(
        "--cuda-graph-impl",
        "local",
        "--cuda-graph-modules",
        "attn",
        "mamba",
        "--cuda-graph-max-packed-seqs",
        "16",
        "64",
    )
    assert found["CUDA graphs"].state == "partial" and "need a GPU" in found["CUDA graphs"].detail
    assert found["mlp"].state == "off" and found["mlp"].fix == "add mlp to --cuda-graph-modules"
    assert found["capacities"].detail == "16 64 documents; a pack with more runs eagerly"
    strict = rows(
        "--cuda-graph-impl", "local", "--cuda-graph-strict", "--cuda-graph-max-packed-seqs", "16"
    )
    assert strict["CUDA graphs"].detail.endswith(
        "the results are the same. Because of --cuda-graph-strict the run ends."
    )
    assert strict["capacities"].detail == "16 documents; a pack with more ends the run"
    on_gpu = {row.name.strip(): row for row in _graph_rows_of_a_gpu()}
    assert on_gpu["CUDA graphs"].state == "on" and on_gpu["moe"].detail == "1 captured"


def test_whole_steps_have_no_modules_to_choose_from():
    found = {row.name.strip(): row for row in _graph_rows_of_a_gpu("full_iteration")}
    assert found["CUDA graphs"].state == "on"
    what = "full_iteration: whole micro-batches, and the optimizer update"
    assert found["CUDA graphs"].detail == what
    assert not {"attn", "mamba", "mlp", "moe"} & found.keys() and "capacities" in found


def test_routers_alone_leave_experts_eager():
    """With captured routers, the advice is to give moe instead of moe_router."""
    found = {row.name.strip(): row for row in _graph_rows_of_a_gpu(modules=("attn", "moe_router"))}
    assert (
        found["moe_router"].state == "on"
        and found["mamba"].fix == "add mamba to --cuda-graph-modules"
    )
    assert found["moe"].state == "off" and found["moe"].fix == (
        "give moe instead of moe_router in --cuda-graph-modules"
    )
    assert (
        found["the rest"].state == "off"
        and found["the rest"].fix == "--cuda-graph-impl full_iteration"
    )


def test_experts_that_ask_for_rows_get_advice_about_bounds():
    flags = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 2"
    )
    bounds = {
        "": "--moe-expert-rank-capacity-factor auto, or --moe-token-dispatcher-type allgather",
        "--cuda-graph-impl local --cuda-graph-modules attn moe": "",
        "--moe-expert-rank-capacity-factor auto": "",
    }
    for more, advice in bounds.items():
        config = parse([*FLAGS, *flags.split(), *more.split()], world_size=2)
        found = {row.name: row for row in parallel_capabilities(config, 2)}
        assert found["expert parallelism"].fix == advice, more


def test_the_shared_expert_says_when_it_runs_beside_the_dispatch():
    cuda, tensor = (
        torch.device("cuda"),
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size",
    )
    overlap = "--moe-shared-expert-overlap"
    cases = (
        ("", cuda, ("off", "the shared expert runs after the other experts")),
        (overlap, CPU, ("off", "streams need a GPU, and the device is cpu")),
        (f"{overlap} {tensor} 1", cuda, ("off", "tensor-parallel ranks dispatch different tokens")),
        (
            f"{overlap} --recompute-activations --recompute-modules layernorm",
            cuda,
            ("on", "the shared expert runs beside dispatch"),
        ),
        (f"{overlap} {tensor} 2", cuda, ("on", "the shared expert runs beside dispatch")),
    )
    for more, device, (state, reason) in cases:
        given = [*FLAGS, "--moe-shared-expert-intermediate-size", "32", *more.split()]
        rows = parallel_capabilities(parse(given, 2), 2, device)
        row = next(row for row in rows if row.name == "shared-expert overlap")
        assert row.state == state and row.detail.startswith(reason), more


def test_rows_in_parts_say_what_runs_while_they_travel():
    parts = ["--moe-comm-overlap-parts", "3", "--moe-shared-expert-intermediate-size", "32"]
    alltoall = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    travels, waits = "they travel in 3 parts", "while their last results travel"
    for more, said in ((alltoall, True), (alltoall[:2], False), (alltoall[2:], False)):
        found = parallel_capabilities(parse([*FLAGS, *parts, *more], 2), 2)
        details = {row.name: row.detail for row in found}
        assert (travels in details["expert parallelism"]) == said, more
        assert (waits in details["shared-expert overlap"]) == said, more


def test_graphs_by_transformer_engine_and_why_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    (row,) = _graph_rows_of_a_gpu("transformer_engine")
    assert (
        row.state == "off"
        and "TransformerEngine does not import" in row.detail
        and "or use local" in row.fix
    )
    monkeypatch.setattr(rows_module, "maker", lambda: None)
    found = {row.name.strip(): row for row in _graph_rows_of_a_gpu("transformer_engine")}
    how = "of each module, by TransformerEngine's make_graphed_callables"
    assert found["CUDA graphs"].detail.endswith(how)
    assert found["mamba"].state == "on"


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_graphs_of_ranks_whose_rows_lie_in_a_zigzag(comm):
    """With context parallelism by p2p or all_gather, no line about attention of whole packs
    appears.
    """
    flags = (
        "--context-parallel-size",
        "2",
        "--cp-comm-type",
        comm,
        "--cuda-graph-max-packed-seqs",
        "16",
    )
    found = {row.name.strip() for row in _graph_rows_of_a_gpu(flags=flags)}
    assert {"CUDA graphs", "attn", "capacities", "audit"} <= found


@pytest.mark.parametrize(
    ("flags", "state", "reason"),
    [
        ((), "off", "every activation"),
        (
            ("full", "--recompute-method", "uniform", "--recompute-num-layers", "3"),
            "on",
            "4 of 4 layers, in groups of 3: only the input of each group is saved",
        ),
        (
            ("full", "--recompute-method", "block", "--recompute-num-layers", "2"),
            "on",
            "2 of 4 layers, only the input of each is saved",
        ),
        (("selective",), "on", "core_attn of 1 layer; MFU does not count"),
        (
            ("selective", "--recompute-modules", "layernorm", "mamba"),
            "on",
            "layernorm of 4 layers, mamba of 1 layer;",
        ),
    ],
)
def test_recomputation(flags, state, reason):
    row = rows(*(("--recompute-granularity", *flags) if flags else ()))["recomputation"]
    assert row.state == state and row.detail.startswith(reason)


def test_offload():
    row = rows()["offload"]
    assert row.state == "off" and "--fine-grained" in row.fix
    whole = (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "3",
    )
    assert "--offload-layer-inputs" in rows(*whole)["offload"].fix
    row = rows(
        *whole,
        "--offload-layer-inputs",
        "--fine-grained-activation-offloading",
        "--offload-modules",
        "moe_act",
        "mlp_norm",
    )["offload"]
    assert row.state == "partial"
    assert row.detail.startswith(
        "the inputs of 3 layers, moe_act of 1 layer, mlp_norm of 1 layer: without a GPU"
    )


def _graph_rows_of_a_gpu(impl="local", flags=(), modules=()):
    config = parse([*FLAGS, "--cuda-graph-impl", "local", *flags], world_size=2 if flags else 1)
    config = replace(
        config,
        training=replace(config.training, device="auto"),
        cuda_graph=replace(config.cuda_graph, cuda_graph_impl=impl, cuda_graph_modules=modules),
    )
    return graph_capabilities(config, torch.device("cuda"))


@pytest.mark.parametrize(
    "chosen, capacity, said",
    [
        ("transformer_engine", 128, True),
        ("transformer_engine", 64, False),
        ("flash_attn_4", 128, False),
    ],
)
def test_an_attention_kernel_that_pays_for_room_says_so(monkeypatch, chosen, capacity, said):
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        Op, "select", lambda self, inputs, backend="auto": Backend(chosen, "nowhere")
    )
    command = [
        *FLAGS,
        "--cuda-graph-impl",
        "local",
        "--cuda-graph-max-packed-seqs",
        "16",
        str(capacity),
    ]
    found = [
        row
        for row in graph_capabilities(parse(command, world_size=1), torch.device("cuda"))
        if row.name.strip() == "attention"
    ]
    assert len(found) == said
    if said:
        assert (
            f"all {capacity} documents of the capacity" in found[0].detail
            and "--attention-backend flex" in found[0].fix
        )


def test_a_kernel_that_is_passed_over_says_why(monkeypatch):
    reasons = {"quick": ["a.b does not import: no a"], "good": [], "slow": []}
    monkeypatch.setattr(Backend, "reasons", lambda self, inputs: reasons[self.name])
    op = Op("thing", tuple(Backend(name, "math") for name in reasons))
    gpu = torch.device("cuda")
    found = kernel_row(chosen(op, 1), gpu)
    assert (
        found.state == "partial"
        and found.detail == "good; faster backends cannot be used: quick: a.b does not import: no a"
    )
    assert found.fix == "megatron-packed doctor finds the cause"
    assert kernel_row(chosen(op, 2, "slow"), gpu).detail == "slow, as requested"
    problem = Problem("--thing-backend", "quick", "cannot be used for thing: no a", "leave it out")
    off = kernel_row(Kernel(op, 3, "quick", problem=problem), gpu)
    assert (off.state, off.detail, off.fix) == ("off", problem.rule, "leave it out")
    reasons["quick"] = []
    assert kernel_row(chosen(op, 4), gpu).state == "on"


def chosen(op, inputs, backend="auto"):
    return Kernel(op, inputs, op.select(inputs, backend).name, backend=backend)


def test_a_plain_reference_on_a_gpu_is_partial_and_says_what_it_costs(monkeypatch):
    monkeypatch.setattr(
        Backend, "reasons", lambda self, inputs: [] if self.name == "reference" else ["too old"]
    )
    inputs = {
        op.name: (op, inputs) for op, _, inputs in op_requests(parse(FLAGS, world_size=1), CPU)
    }
    for asked in ("auto", "reference"):
        kernel = chosen(*inputs["ssd"], asked)
        found = kernel_row(kernel, torch.device("cuda"))
        assert (
            found.state == "partial"
            and "13 times as long as triton (measured on an H200)" in found.detail
        )
        assert "times as long" not in kernel_row(kernel, CPU).detail


def test_the_export_of_the_model_is_known_before_the_training():
    """The report names the family of the export, or the options that the nearest family lacks."""
    assert rows()["export to transformers"].state == "off"  # rotary positions, and softmax routing
    reason = rows("--moe-router-score-function", "sigmoid")["export to transformers"].detail
    assert reason.startswith("the nearest family, nemotron_h, cannot express ")
    assert "--position-embedding-type rope (the family has" in reason
    more = "--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 8"
    fits = rows(*more.split(), "--position-embedding-type", "none")["export to transformers"]
    assert fits.state == "on" and fits.detail.startswith("as a nemotron_h model")


def data_of(folder):
    """Write 20 documents of 10 bytes, and return the flags that train and validate on them."""
    path = folder / "documents.jsonl"
    path.write_text('{"text": "123456789"}\n' * 20)
    model = FLAGS[: FLAGS.index("--train-iters")]
    more = "--train-iters 30 --lr 1e-3 --device cpu --split 90,10 --data-path"
    return [*model, *more.split(), str(path)]


def said(argv):
    """Return the first lines of the report, without line breaks, by their title."""
    config = parse(argv, world_size=1)
    stored = refusal_of_stored_model(config)
    return dict(PlannedRun(config, CPU, 1, known_data(config), stored).lines())


def test_the_report_begins_with_the_verdict_and_the_run(tmp_path):
    """The report says in words: start, data, batch, steps and memory; numbers follow the data."""
    more = "--lr-warmup-fraction 0.1 --eval-interval 10 --save-interval 15 --global-batch-size 4"
    argv = [*data_of(tmp_path), *more.split(), "--save", str(tmp_path / "run")]
    text = explain(parse(argv, world_size=1))
    assert text.startswith("This run would start on 1 process (CPU), from scratch.\n\ndata    ")
    before = said(argv)
    assert "not tokenised yet" in before["data"] and "--split 90,10" in before["data"]
    assert before["batch"] == (
        "A step takes 4 packs of 128 tokens, 512 tokens in all. The model runs 4 packs one after "
        "the other and adds up the gradients."
    )
    assert before["steps"] == (
        "30 steps. The learning rate rises to 0.001 in 3 steps and falls to 0 by the end (linear)."
    )
    assert re.search(r"\nvalidation +on +every 10 steps \(3 in all\)\n", text)
    assert re.search(r"\ncheckpoints +on +every 15 steps \(2 in all\),", text)
    assert "of optimizer state" in before["memory"]
    config = parse(argv, world_size=1)
    open_documents(config.data, ByteTokenizer(), validates=False, show=False)
    after = said(argv)
    assert "18 documents with 180 tokens for training, 10 on average" in after["data"]
    assert "with about 51 documents" in after["batch"]
    assert "30 steps, about 85.3 epochs." in after["steps"]
    samples = [
        "--train-samples",
        "100",
        "--global-batch-size",
        "6",
        "--rampup-batch-size",
        "2",
        "2",
        "12",
    ]
    grows = said([*argv[: argv.index("--train-iters")], *argv[argv.index("--lr") :], *samples])
    assert grows["batch"].startswith(
        "The batch grows from 2 packs to 6 over the first 5 steps (14 samples). A later step takes "
        "6 packs of 128 tokens"
    )
    # 5 steps with 14 samples, and 14 steps of 6
    assert "19 steps, about 69.7 epochs." in grows["steps"]
    assert "rises to 0.001 in 10 samples and falls to 0 by the end (linear)." in grows["steps"]
    samples += ["--lr-decay-samples", "60"]
    grows = said([*argv[: argv.index("--train-iters")], *argv[argv.index("--lr") :], *samples])
    assert "rises to 0.001 in 6 samples and falls to 0 by 60 samples (linear)." in grows["steps"]
    rise = "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1"
    assert (
        "The weight decay rises from 0.01 to 0.1 by the end (cosine)."
        in said([*argv, *rise.split()])["steps"]
    )
    shorter = f"{rise} --weight-decay-incr-iters 20"
    assert "to 0.1 by step 20 (cosine)." in said([*argv, *shorter.split()])["steps"]
    epochs = said([flag for flag in argv if flag not in ("--train-iters", "30")] + EPOCHS)
    assert epochs["steps"].startswith("About 2 steps for 5 epochs.")


EPOCHS = ["--train-epochs", "5"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--sft"], "add --sft|remove --sft"),
        (["--load", "FOLDER", "--exit-on-missing-checkpoint"], "has no checkpoint"),
        (["--max-document-length", "5", "--overlong-policy", "error"], "longer than 5 tokens"),
    ],
)
def test_a_run_that_would_be_refused(flags, reason, tmp_path):
    """The verdict is the sentence with which the run would end."""
    argv = data_of(tmp_path) + [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    if "error" in flags:
        open_documents(parse(argv, world_size=1).data, ByteTokenizer(), validates=False, show=False)
    verdict = said(argv)[""]
    assert verdict.startswith("This run would be refused: ")
    assert re.search(reason, verdict), verdict


def test_depths_of_multi_token_prediction_are_named():
    assert "multi-token prediction" not in rows()
    depths = ("--hybrid-layer-pattern", "M*-E/*E/*E", "--mtp-loss-scaling-factor", "0.3")
    said = rows(*depths)["multi-token prediction"].detail
    assert said.startswith("2 depths of *E with their own weights; their mean loss counts 0.3; ")
    said = rows(*depths, "--mtp-use-repeated-layer")["multi-token prediction"].detail
    assert "with the same weights" in said
    said = rows("--hybrid-layer-pattern", "M*-E/-")["multi-token prediction"].detail
    assert said.startswith("one depth of -; its loss counts 0.1; ")


def test_the_table_is_for_people():
    text = explain(parse(FLAGS, world_size=1))
    assert max(map(len, text.splitlines())) <= 118
    assert "checkpoints              off" in text and "-> --save DIRECTORY" in text
    assert "context parallelism" in text and "not supported yet" in text


@pytest.mark.parametrize(
    ("command", "code"), [(["pretrain_hybrid.py"], 0), (["-m", "megatron_packed.cli.main"], 2)]
)
def test_the_flag_ends_the_program(command, code, quick_programs):
    words = [*command, *(["packing"] if code else []), *FLAGS, "--explain"]
    program = str(quick_programs / "python")
    done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (
        ("kernel ssd" in done.stdout)
        if code == 0
        else ("only works with megatron-packed train" in done.stderr)
    )


def test_gradients_in_bf16_say_how_they_are_summed():
    flags = [*FLAGS, "--bf16", "--grad-reduce-in-bf16"]
    rounded = "--no-ddp-reduce-scatter-with-fp32-accumulation"
    exact = ["--ddp-param-name-patterns-for-fp32-local-accumulation", "output.*", "embedding.*"]
    cases = (
        (flags, 1, "matrices accumulate their gradients in bf16"),
        (flags, 2, "add them in fp32 and round the sum once"),
        ([*flags, rounded], 2, "the collective rounds after each addition"),
        ([*flags, *exact], 1, "fp32 for output.*, embedding.*"),
    )
    for words, processes, reason in cases:
        rows = parallel_capabilities(parse(words, processes), processes)
        (row,) = (row for row in rows if row.name == "bf16 gradients")
        assert row.state == "on" and row.detail.endswith(reason), words
    for words in ([*FLAGS, "--grad-reduce-in-bf16"], [*FLAGS, "--bf16"]):
        rows = parallel_capabilities(parse(words, 2), 2)
        assert not any(row.name == "bf16 gradients" for row in rows)
