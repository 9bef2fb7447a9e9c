"""``megatron-packed plan``: times by measured rates, where none is given, and the search of layouts."""

import json
import shlex
import subprocess
import sys

import pytest

from megatron_packed.cli.main import main
from megatron_packed.models.estimate.gpu_rates import TABLE, measured_rates
from support import commands

FLAGS = shlex.split("""--bf16 --hybrid-layer-pattern M-*- --hidden-size 256 --num-attention-heads 4
    --squared-relu --disable-bias-linear --normalization RMSNorm --seq-length 2048 --vocab-size 1024""")
EXPERTS = shlex.split("""--bf16 --hybrid-layer-pattern ME*E --hidden-size 256 --num-attention-heads 4
    --disable-bias-linear --normalization RMSNorm --seq-length 2048 --vocab-size 1024 --num-experts 8
    --moe-ffn-hidden-size 256 --moe-router-topk 2""")
BEFORE_TORCH = """
import sys
from megatron_packed.cli.main import main
code = main(["plan", *sys.argv[1:]])
print(code, "torch" in sys.modules)
"""


def plan(capsys, *argv):
    return commands.report(capsys, "plan", *argv)


def test_a_step_has_the_sum_of_its_parts_and_a_run_its_days(capsys):
    found = plan(capsys, *FLAGS, "--world-size", "2", "--train-iters", 10**9)
    time = found["time"]
    assert set(time["parts"]) == {"compute", "exposed exchanges", "update", "copies to the host"}
    assert time["step_seconds"] == pytest.approx(sum(time["parts"].values()))
    assert time["seconds"] == pytest.approx(1e9 * time["step_seconds"])
    flops = found["step"]["flops_per_rank"]
    assert time["mfu"] == pytest.approx(100 * flops / time["step_seconds"] / 989.5e12)
    assert found["reason_without_time"] is None
    assert main(["plan", *FLAGS, "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert (
        "By the rates measured on H200, a step takes " in text and " tokens/s of each GPU" in text
    )
    assert "Exchanges among more than 4 GPUs were not measured" in text


def test_an_update_takes_the_time_of_the_bytes_that_it_moves(capsys):
    """The measured one moves 30 bytes per element; norms and routers keep gradients in fp32."""
    rates = measured_rates()["H200"]
    low = [
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype",
        "bf16",
        "--exp-avg-sq-dtype",
        "bf16",
    ]
    update = [
        plan(capsys, *FLAGS, *more)["time"]["parts"]["update"]
        for more in ([], ["--grad-reduce-in-bf16"], low, [*low, "--grad-reduce-in-bf16"])
    ]
    elements = update[0] / (rates.update_element + rates.zero_element)
    for found, moved in zip(update, (30, 30, 20, 18), strict=True):
        wanted = elements * (rates.update_element * moved / 30 + rates.zero_element)
        assert found == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("zero", [[], ["--use-distributed-optimizer"]])
def test_sums_of_gradients_in_bf16_exchange_half_the_bytes(zero, capsys):
    """Gathers of bf16 weights stay, which are a third of the bytes with ZeRO-1."""
    flags = ["4096" if word == "256" else word for word in FLAGS]  # calls cost little beside bytes
    wide, low = (
        plan(capsys, *flags, "--world-size", "2", *zero, *more)["time"]["parts"][
            "exposed exchanges"
        ]
        for more in ([], ["--grad-reduce-in-bf16"])
    )
    assert low / wide == pytest.approx(4 / 6 if zero else 1 / 2, rel=0.03)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--gpu", "h100"], "rates were measured on H200, and not on H100"),
        (["--world-size", "16"], "no exchange between hosts was measured"),
        (["--ssd-backend", "mamba_ssm"], "and not with --ssd-backend mamba_ssm"),
        (["--transformer-impl", "transformer_engine"], "not with --transformer-impl"),
    ],
)
def test_what_was_not_measured_has_no_time_without_an_assumed_mfu(flags, reason, capsys):
    found = plan(capsys, *FLAGS, *flags)
    assert found["time"] is None and reason in found["reason_without_time"]
    assert plan(capsys, *FLAGS, *flags, "--mfu", 40)["time"]["parts"] is None


def test_a_requested_kernel_that_is_the_default_has_a_time(capsys):
    assert plan(capsys, *FLAGS, "--ssd-backend", "triton")["time"] is not None


def test_memory_of_a_named_gpu(capsys):
    assert plan(capsys, *FLAGS, "--gpu", "h100")["gpu_bytes"] == 79 * 2**30
    assert plan(capsys, *FLAGS)["gpu_bytes"] == 139 * 2**30
    code, said = commands.refusal(capsys, "plan", *FLAGS, "--gpu", "a100")
    assert code == 2 and "--gpu A100: give --gpu-memory-gib" in said


@pytest.mark.parametrize(
    "flags, cure",
    [
        ([], "give --world-size"),
        (["--world-size", "2", "--mfu", "40"], "leave it out with --search"),
        (["--world-size", "16"], "no exchange between hosts was measured"),
        (["--world-size", "2", "--gpu", "H100"], "--gpu H200 --gpu-memory-gib 79"),
    ],
)
def test_a_search_without_times_is_refused_before_torch_is_imported(flags, cure):
    command = [sys.executable, "-c", BEFORE_TORCH, *FLAGS, "--search", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert cure in done.stderr
    assert done.stdout.split() == ["2", "False"]


def search(capsys, *flags):
    return plan(capsys, *flags, "--search")


def test_layouts_of_a_search_are_ordered_and_their_flags_give_their_times(capsys):
    run = [*EXPERTS, "--world-size", "4", "--global-batch-size", "4"]
    found = search(capsys, *run)
    layouts = found["layouts"]
    seconds = [layout["step_seconds"] for layout in layouts]
    assert len(layouts) == 10 < found["allowed"] and seconds == sorted(seconds)
    for layout in (layouts[0], layouts[-1]):
        alone = plan(capsys, *run, *layout["flags"].split())
        assert alone["time"]["step_seconds"] == pytest.approx(layout["step_seconds"])
        assert next(iter(alone["ranks"].values()))["bytes"]["total"] == layout["bytes"]


@pytest.mark.parametrize("more", ["--kv-channels 256", "--window-size 99,0"])
def test_a_zigzag_without_a_kernel_on_gpus_is_refused_and_not_found(more, capsys):
    zigzag = [*more.split(), "--cp-comm-type", "p2p", "--cp-partition-mode", "zigzag"]
    two = ["--world-size", "2", "--context-parallel-size", "2"]
    code, said = commands.refusal(capsys, "plan", *FLAGS, *zigzag, *two)
    assert code == 2 and said.count("\n") == 1
    assert said.startswith("--cp-partition-mode zigzag: has one kernel on GPUs")
    assert said.endswith("; give contiguous, or --cp-comm-type a2a.\n")
    assert plan(capsys, *FLAGS, *zigzag, "--world-size", "2")["time"]  # one rank holds each pack
    for layout in plan(capsys, *FLAGS, *zigzag, "--search", "--world-size", "2")["layouts"]:
        assert "--context-parallel-size" not in layout["flags"]
    # Tensor-parallel ranks cannot share three heads, so a change for memory might be a zigzag.
    long = ["--num-attention-heads", "3", "--kv-channels", "64", "--seq-length", "65536"]
    long += ["--world-size", "2", "--gpu-memory-gib", "1"]
    changes = [
        change["flag"]
        for attention in (zigzag[2:], zigzag)
        for change in plan(capsys, *FLAGS, *long, *attention)["changes"]
    ]
    assert changes.count("--context-parallel-size 2") == 1
    for cure in (["--cp-partition-mode", "contiguous"], ["--cp-comm-type", "a2a"]):
        assert plan(capsys, *FLAGS, *zigzag, *cure, *two)["time"]
    assert plan(capsys, *FLAGS, *zigzag, *two, "--attention-backend", "reference")["ranks"]


def test_a_zigzag_without_bf16_is_refused_and_not_chosen(capsys):
    """A document of 65,536 tokens has its last rows on one rank, unless a zigzag spreads them."""
    long = [*FLAGS, "--seq-length", "65536", "--cp-comm-type", "p2p"]
    long += ["--world-size", "4", "--context-parallel-size", "4"]
    in_fp32 = [word for word in long if word != "--bf16"]
    for words, sentence in (
        (long, "This run takes zigzag."),
        (in_fp32, "GPUs have no kernel for a zigzag of these layers without --bf16."),
    ):
        assert commands.exit_code("plan", *words) == 0
        assert sentence in capsys.readouterr().out
    code, said = commands.refusal(capsys, "plan", *in_fp32, "--cp-partition-mode", "zigzag")
    assert code == 2 and said.endswith(
        "\n--cp-partition-mode zigzag: has one kernel on GPUs, that of TransformerEngine, for bf16, and this run "
        "computes in fp32; add --bf16, give contiguous, or --cp-comm-type a2a.\n"
    )


def test_a_search_recomputes_where_memory_ends(capsys):
    deep = ("--hybrid-layer-pattern", "-" * 24, "--seq-length", "65536")
    run = [*FLAGS, *deep, "--world-size", "2", "--global-batch-size", "2"]
    plain, full = search(capsys, *run)["layouts"], "--recompute-granularity full"
    assert plain and not any(full in layout["flags"] for layout in plain)
    least = min(layout["bytes"] for layout in plain) / 2**30
    small = search(capsys, *run, "--gpu-memory-gib", least - 0.1)["layouts"]
    assert small and all("--recompute-granularity" in layout["flags"] for layout in small)
    assert main(["plan", *run, "--search", "--gpu-memory-gib", "0.5"]) == 0
    assert "None fits in 0.5 GiB, even with recomputation and offload" in capsys.readouterr().out


def test_rates_name_the_results_that_they_come_from():
    assert set(measured_rates()) == {"H200"}
    values = json.loads(TABLE.read_text())["H200"].values()
    assert all(entry["results"] for entry in values)
