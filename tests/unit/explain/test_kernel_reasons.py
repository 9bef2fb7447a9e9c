"""Kernels that a run prints at its start: choice, cost of slow kernels, and refusals."""

import json
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.kernel_options import ON_ANY_DEVICE, PLAIN
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain import kernel_reasons, run_description
from megatron_packed.explain.kernel_reasons import (
    LABELS,
    MEASURED,
    Kernel,
    check_kernels,
    chosen_kernels,
    kernel_block,
    kernel_names,
    kernel_row,
    slow_kernel_warnings,
    with_usable_partition,
)
from megatron_packed.explain.op_requests import op_requests, served_by
from megatron_packed.inputs.run_data import most_documents
from megatron_packed.models.trace import Imagined
from megatron_packed.ops.backend_dispatch import Backend, Op
from megatron_packed.ops.grouped_mlp import reference as experts
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.training import pretrain
from support.kernel_calls import ACROSS, called_in_a_step, config_of

ROOT = Path(__file__).parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
PRODUCTS = ("quack_joined", "quack", "grouped_mm")
"""Kernels of the grouped product for GPUs."""


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("M*-E", ()),
        ("M*-E", ("--attention-backend", "sdpa", "--swiglu")),
        ("*", ("--position-embedding-type", "none", "--optimizer-backend", "torch")),
        ("*M", ("--attention-output-gate", "--qk-layernorm")),
        ("ME", ()),
        ("GM", ()),
        ("G-", ("--conv-backend", "reference", "--linear-allow-neg-eigval")),
        ("G", ()),
        ("MG-", ("--linear-conv-kernel-dim", "3")),
        ("E-", ("--moe-shared-expert-intermediate-size", "32", "--conv-backend", "reference")),
    ],
)
def test_what_is_named_is_what_runs(monkeypatch, pattern, flags):
    """A step calls exactly the kernels that the run prints."""
    config = config_of(pattern, flags)
    called = called_in_a_step(monkeypatch, config, CPU)
    chosen = {kernel.op.name: {kernel.name} for kernel in chosen_kernels(config, CPU)}
    assert called == chosen
    names = kernel_names(config, chosen_kernels(config, CPU))
    assert set(names) == {kernel.label for kernel in chosen_kernels(config, CPU)}


def test_calls_on_the_meta_device_are_not_noted(monkeypatch):
    """A list of kernels may run the model on the meta device, where plain PyTorch stands for all."""
    config = config_of("M")
    called = called_in_a_step(monkeypatch, config, CPU)
    called.clear()
    op_requests(config, CPU, documents=3)
    assert called == {}


def test_a_model_is_traced_once_for_all_who_ask(monkeypatch):
    config = config_of("M")
    requests = op_requests(config, CPU)
    monkeypatch.setattr(Imagined, "in_groups", None)
    assert op_requests(config, CPU, None) is op_requests(config, CPU, documents=1) is requests


def test_calls_of_partial_functions_are_noted(monkeypatch):
    """Steps of the grouped product are partial functions in its backends for GPUs."""
    for name in ("fc1", "activate", "fc2"):
        monkeypatch.setattr(experts, name, partial(getattr(experts, name)))
    called = called_in_a_step(monkeypatch, config_of("E"), CPU)
    assert called["grouped_mlp"] == {"reference"}


@pytest.mark.parametrize(
    "field",
    [
        "attention_backend",
        "ssd_backend",
        "gated_delta_rule_backend",
        "conv_backend",
        "optimizer_backend",
    ],
)
def test_what_the_options_exclude_on_a_cpu_is_what_the_ops_refuse(field):
    """Backend rules that are checked before torch is imported agree with the rules of the ops."""
    config = config_of("GM*-E", device="auto")
    section = "optim" if field == "optimizer_backend" else "training"
    op_name = {
        "attention_backend": "varlen_attention",
        "ssd_backend": "ssd",
        "gated_delta_rule_backend": "gated_delta_rule",
        "conv_backend": "causal_conv1d",
        "optimizer_backend": "adamw",
    }[field]
    op, _, inputs = next(one for one in op_requests(config, CPU) if one.op.name == op_name)
    # Backends that no option can name.
    oracles = {"adamw": "reference", "ssd": "recurrence", "gated_delta_rule": "recurrence"}
    for backend in (backend for backend in op.backends if backend.name != oracles.get(op_name)):
        changed = replace(
            config, **{section: replace(getattr(config, section), **{field: backend.name})}
        )
        assert (backend.name in ON_ANY_DEVICE) == (not backend.reasons(inputs))
        assert (backend.name in PLAIN) == Kernel(op, inputs, backend.name, "").is_plain
        if backend.reasons(inputs):
            with pytest.raises(
                ConfigError,
                match=f"^--{field.replace('_', '-')} {backend.name}: cannot be used for ",
            ):
                chosen_kernels(changed, CPU)
        else:
            assert backend.name in {kernel.name for kernel in chosen_kernels(changed, CPU)}


def test_the_gate_of_attention_is_not_part_of_the_reference_of_experts():
    requests = op_requests(config_of("*E", ("--attention-output-gate",)), CPU)
    served = {
        request.inputs.kind: served_by(request, requests)
        for request in requests
        if request.op.name == "activation"
    }
    assert served == {"sigmoid_gate": "auto", "squared_relu": "reference"}


def test_a_kernel_that_cannot_serve_ends_the_run_with_code_2_before_data_is_opened(
    monkeypatch, capsys, tmp_path
):
    def open_data(*arguments, **options):
        raise AssertionError("data was opened")

    monkeypatch.setattr(pretrain, "build_data", open_data)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    named = {"attention_backend": "flash_attn_2", "ssd_backend": "mamba_ssm"}
    config = config_of(flags=("--save", str(tmp_path / "run")), device="auto", **named)
    assert pretrain.run_job(config, None) == ExitCode.USAGE
    assert not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert said.startswith(
        "configuration error: --attention-backend flash_attn_2: cannot be used for attention: "
    )
    assert "--ssd-backend mamba_ssm: cannot be used for scan: " in said
    assert said.count("; leave it out, or name another.") == 2
    assert "Traceback" not in said


def test_kernels_are_chosen_for_packs_of_many_documents(monkeypatch):
    """After packing, kernels are chosen again for the most documents of a pack or a capacity."""
    many = {
        op.name: inputs for op, _, inputs in op_requests(config_of("*", bf16=True), CPU, 200_000)
    }
    few = {op.name: inputs for op, _, inputs in op_requests(config_of("*", bf16=True), CPU)}
    assert (
        many["varlen_attention"].oversized_backward
        > 0
        == few["varlen_attention"].oversized_backward
    )
    asked = []

    def check(config, device, documents):
        asked.append(documents)
        return chosen_kernels(config, device, documents)

    monkeypatch.setattr(run_description, "check_kernels", check)
    warnings: list[str] = []
    printers = {"detail": lambda text: None, "warn": warnings.append}
    groups = SimpleNamespace(device=CPU, world_size=1)
    for capture_sizes in (None, SimpleNamespace(largest=8), SimpleNamespace(largest=64)):
        data = SimpleNamespace(
            capture_sizes=capture_sizes, packing=SimpleNamespace(documents_max=30)
        )
        assert (
            run_description.name_kernels(config_of("*"), groups, most_documents(data), **printers)[
                "attention"
            ]
            == "reference"
        )
    assert asked == [30, 30, 64]
    warnings.clear()
    forced = config_of("E", ("--moe-router-force-load-balancing",))
    run_description.name_kernels(forced, groups, most_documents(data), **printers)
    assert [text for text in warnings if "does not learn to route" in text] == warnings != []
    assert warnings[0].endswith("; leave --moe-router-force-load-balancing out")


@pytest.mark.parametrize(
    ("pattern", "flags", "warned"),
    [
        ("*-", "", True),
        ("*-", "--position-embedding-type none", False),
        ("*-", "--position-embedding-type rope", False),
        ("M*-", "", False),
        ("G*-", "", False),
        ("-", "", False),
    ],
)
def test_attention_without_positions_is_a_warning_unless_it_is_chosen(pattern, flags, warned):
    """A command line of Megatron-LM without the flag has learned positions there."""
    least = f"--hybrid-layer-pattern {pattern} --hidden-size 16 --num-attention-heads 2 --lr 1 --mamba-num-groups 1 "
    least += "--mamba-head-dim 8 --seq-length 16 --train-iters 1 --mock-data "
    config = RunConfig.from_args((least + flags).split())
    rows = run_description.warned_capabilities(config, CPU, 1)
    assert [row.name for row in rows if row.state == "partial"] == ["positions"] * warned
    # A program that creates a configuration has chosen all values.
    rows = run_description.warned_capabilities(replace(config, origins=None), CPU, 1)
    assert [row.name for row in rows] == ["recomputation"]


def test_many_additions_in_bf16_are_a_warning():
    least = "--hybrid-layer-pattern - --hidden-size 16 --lr 1 --seq-length 16 --train-iters 1 --mock-data"
    words = [*least.split(), "--global-batch-size", "512"]
    low = RunConfig.from_args([*words, "--bf16", "--grad-reduce-in-bf16"], global_batch_size=512)

    def said(config, processes):
        rows = run_description.warned_capabilities(config, CPU, processes)
        return [row.text for row in rows if row.name == "sums of gradients"]

    assert "512 micro-batches in bf16" in said(low, 1)[0]
    assert "128 micro-batches in bf16" in said(low, 4)[0]
    assert not said(low, 8)
    for more in (["--bf16"], ["--grad-reduce-in-bf16"]):
        assert not said(RunConfig.from_args([*words, *more]), 1)


def test_the_block_is_short_and_names_come_in_order():
    config = config_of("GM*-E", ("--lora-rank", "2"))
    names = kernel_names(config, chosen_kernels(config, CPU))
    on_gpus = (LABELS["dense_mlp"], LABELS["residual_projection"])
    listed = [x for x in dict.fromkeys(LABELS.values()) if x not in on_gpus]
    assert list(names) == listed
    lines = kernel_block(names).splitlines()
    assert lines[0].startswith(
        "kernels: attention reference · rope reference · convolution reference · "
    )
    assert len(lines) <= 3 and max(map(len, lines)) <= 118
    assert all(
        line.endswith(" ·") for line in lines[:-1]
    )  # no line break between an op and its kernel
    assert " ".join(line.strip() for line in lines).count("·") == len(names) - 1


def test_norms_and_context_parallelism_are_named():
    config = config_of("*", ACROSS)
    assert kernel_names(config, chosen_kernels(config, CPU))["attention"] == "reference (p2p)"
    config = config_of("M", ("--normalization", "LayerNorm"))
    assert kernel_names(config, chosen_kernels(config, CPU))["norm"] == "torch"
    config = config_of(device="auto", bf16=True, transformer_impl="transformer_engine")
    assert kernel_names(config, []) == {"norm": "transformer_engine"}


is_plain = attrgetter("is_plain")
OUR_SCAN = "megatron_packed.ops.ssd.triton_kernels"


@pytest.fixture
def h200(monkeypatch):
    """Simulate an H200: packages and modules in ``missing`` are not there, all other kernels can be
    used.
    """
    missing = set()
    monkeypatch.setattr(varlen_attention, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        Backend,
        "reasons",
        lambda self, inputs: (
            [f"{self.module} does not import: ModuleNotFoundError: No module named {self.name!r}"]
            if self.name in missing or self.module in missing
            else []
        ),
    )
    monkeypatch.setattr(
        Op, "select", lambda self, inputs, backend="auto": self._choose(backend, inputs)
    )
    monkeypatch.setattr(
        kernel_reasons,
        "is_installed",
        lambda module: module.split(".")[0] not in ("flash_attn", "mamba_ssm"),
    )
    return missing


def test_a_plain_reference_on_a_gpu_is_a_warning_with_its_factor_and_the_cure(h200, monkeypatch):
    monkeypatch.setattr("megatron_packed.explain.kernel_reasons.is_installed", lambda module: False)
    config = config_of(bf16=True, device="auto")
    assert slow_kernel_warnings(chosen_kernels(config, GPU), GPU) == []
    h200 |= {
        OUR_SCAN,
        "mamba_ssm",
        "flash_attn_4",
        "transformer_engine",
        "flex",
        "flash_attn_2",
        "torch_varlen",
    }
    attention, scan = slow_kernel_warnings(chosen_kernels(config, GPU), GPU)
    assert attention == (
        "attention runs reference, plain PyTorch, taking 56 times as long as flash_attn_4 (measured on an H200); "
        "faster backends cannot be used: flash_attn_4: No module named 'flash_attn_4'; "
        "transformer_engine: No module named 'transformer_engine'; flex: No module named 'flex'; "
        "flash_attn_2: No module named 'flash_attn_2'; torch_varlen: No module named "
        "'torch_varlen'; pip install --pre flash-attn-4."
    )
    assert scan == (
        "scan runs reference, plain PyTorch, taking 13 times as long as triton (measured on an H200); "
        "faster backends cannot be used: triton: No module named 'triton'; mamba_ssm: No module "
        "named 'mamba_ssm'; pip install triton."
    )
    # No warnings on a CPU, where the references are the intended kernels.
    assert slow_kernel_warnings(chosen_kernels(config, GPU), CPU) == []
    # --explain says the same.
    for kernel, warning in zip(filter(is_plain, chosen_kernels(config, GPU)), (attention, scan)):
        assert warning == f"{kernel.label} runs {kernel_row(kernel, GPU).text}."


def test_a_reference_that_an_option_names_is_slow_too(h200):
    config = config_of(bf16=True, device="auto", attention_backend="sdpa", deterministic_mode=True)
    (said,) = slow_kernel_warnings(chosen_kernels(config, GPU), GPU)
    assert said.endswith(
        "is not measured; --attention-backend selects it; leave --attention-backend out."
    )
    config = replace(config, training=replace(config.training, deterministic_mode=False))
    (said,) = slow_kernel_warnings(chosen_kernels(config, GPU), GPU)
    assert "sdpa, plain PyTorch, taking 16 times as long as flash_attn_4" in said


def test_a_run_in_float32_is_advised_bf16(h200, monkeypatch):
    """For float32, the advice is --bf16, since no package has kernels for attention and experts."""
    monkeypatch.setattr(
        Backend,
        "reasons",
        lambda self, inputs: (
            []
            if self.name == "reference" or self.name == "triton"
            else ["a.b does not import: ModuleNotFoundError: none"]
            if self.name in ("flash_attn_4", "mamba_ssm")
            else [f"it takes bfloat16, not {inputs.dtype}"]
            if hasattr(inputs, "head_dim") or self.name in PRODUCTS
            else []
        ),
    )
    config = config_of("*E", device="auto")
    attention, product, act = slow_kernel_warnings(chosen_kernels(config, GPU), GPU)
    assert attention.endswith("; torch_varlen: it takes bfloat16, not torch.float32; add --bf16.")
    assert product.endswith("; grouped_mm: it takes bfloat16, not torch.float32; add --bf16.")
    assert act.endswith(
        "7.8 times as long as triton (measured on an H200); it is a part of the reference of the grouped product."
    )


def test_fast_kernels_can_be_required(h200):
    config = config_of(bf16=True, device="auto", require_fast_kernels=True)
    check_kernels(config, GPU)
    h200 |= {*PRODUCTS, "mamba_ssm"}
    check = config_of("M", bf16=True, device="auto", require_fast_kernels=True)
    check_kernels(check, GPU)  # Our kernels need no package.
    h200.add(OUR_SCAN)
    with pytest.raises(ConfigError) as caught:
        check_kernels(config, GPU)
    scan, product = caught.value.problems
    assert str(scan).startswith(
        "--require-fast-kernels: scan runs reference, plain PyTorch, taking 13 times as long"
    )
    assert str(scan).endswith("; MAX_JOBS=8 pip install --no-build-isolation mamba-ssm.")
    assert "grouped product runs reference" in str(product)
    with pytest.raises(
        ConfigError, match=r"^--require-fast-kernels: needs a GPU, but torch sees none here"
    ):
        check_kernels(config, CPU)


def test_attention_across_ranks_needs_transformer_engine_on_a_gpu(h200):
    config = config_of("*", ACROSS, bf16=True, device="auto")
    assert (
        kernel_names(config, chosen_kernels(config, GPU))["attention"] == "transformer_engine (p2p)"
    )
    h200.add("transformer_engine")
    with pytest.raises(
        ConfigError,
        match=r"^--cp-comm-type p2p: .* No module named 'transformer_engine'; give a2a,",
    ):
        chosen_kernels(config, GPU)
    by_name = replace(config, training=replace(config.training, attention_backend="reference"))
    assert kernel_names(by_name, chosen_kernels(by_name, GPU))["attention"] == "reference (p2p)"


WITHOUT_KEYS_IN_ORDER = {
    *("flash_attn_4", "flash_attn_2", "flex", "torch_varlen"),
    "megatron_packed.ops.varlen_attention.transformer_engine",
}


@pytest.mark.parametrize(
    ("missing", "changes", "mode"),
    [
        (set(), {}, "auto"),  # both have a kernel, so lengths decide
        (WITHOUT_KEYS_IN_ORDER, {}, "zigzag"),
        ({"transformer_engine"}, {}, "contiguous"),
        ({"transformer_engine"}, {"attention_backend": "reference"}, "auto"),
    ],
)
def test_a_partition_without_a_kernel_is_not_chosen(h200, missing, changes, mode):
    h200.update(missing)
    config = config_of("*", ACROSS, bf16=True, device="auto", **changes)
    config = replace(config, parallel=replace(config.parallel, cp_partition_mode="auto"))
    found = with_usable_partition(config, ParallelGroups.single(GPU))
    assert found.parallel.cp_partition_mode == mode


def test_factors_are_those_of_the_benchmark():
    measured = json.loads((ROOT / "benchmarks/results/op_backends.json").read_text())["results"]

    def time(case, name):
        found = measured[case].get(name)
        replay = found.get("replay") if isinstance(found, dict) else None
        return replay["forward_backward_ms"][0] if isinstance(replay, dict) else None

    fastest = {
        case: min(filter(None, (time(case, name) for name in measured[case]))) for case in measured
    }
    slow = {
        case: {
            name: float(f"{taken / fastest[case]:.2g}")
            for name in ("reference", "sdpa")
            if (taken := time(case, name)) is not None
        }
        for case in measured
    }
    assert slow == MEASURED
    page = (ROOT / "docs/training.md").read_text()
    assert f"up to {MEASURED['attention']['reference']} times as long" in page
    assert f", taking {MEASURED['ssd']['reference']} times as long as triton" in page
