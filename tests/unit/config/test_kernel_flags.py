"""Checks of requested kernels before torch is imported: conflicts with other options and with this
machine.
"""

import importlib
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from megatron_packed.config import kernel_options as kernels
from megatron_packed.config.kernel_options import ON_ANY_DEVICE, OPTION_OF, may_have_gpu
from megatron_packed.config.optional_packages import PACKAGES, is_installed, package_of_kernel
from megatron_packed.config.parser.command_line import every_field
from megatron_packed.config.parser.parse import parse_or_exit
from support.command_lines import argv_of, problems_of

ROOT = Path(__file__).parents[3]
CHOICES = {
    field.flag: field.option.choices for field in every_field() if field.flag in OPTION_OF.values()
}
NAMED = [
    (op, name)
    for op, flag in OPTION_OF.items()
    if op not in ("layers", "context_parallel_attention")
    for name in CHOICES[flag]
    if name != "auto"
]
MODULES = {
    "varlen_attention": "ops.varlen_attention.api",
    "ssd": "ops.ssd.api",
    "gated_delta_rule": "ops.gated_delta_rule.api",
    "adamw": "optim.adamw",
    "causal_conv1d": "ops.causal_conv1d.api",
}


def problems(right, text: str, world_size: int = 1) -> list[tuple[str, str, str, str]]:
    found = problems_of(argv_of(right, text), world_size)
    return [(one.option, one.value, one.rule, one.cure) for one in found]


def op_of(name: str):
    return importlib.import_module(f"megatron_packed.{MODULES[name]}").OP


def test_every_choice_of_every_option_is_a_backend_of_its_op() -> None:
    assert set(CHOICES) == set(OPTION_OF.values())
    for op in MODULES:
        assert set(CHOICES[OPTION_OF[op]]) <= {"auto", *op_of(op).names()}


@pytest.mark.parametrize(("op", "name"), NAMED)
def test_a_kernel_of_gpus_is_refused_on_a_cpu(right, monkeypatch, op: str, name: str) -> None:
    """A GPU kernel is refused with --device cpu, on a machine without a GPU, and without its
    package; each gives one problem.
    """
    given = f"--hybrid-layer-pattern M*-G --bf16 {OPTION_OF[op]} {name}"
    if name in ON_ANY_DEVICE:
        assert problems(right, f"{given} --device cpu") == []
        monkeypatch.setattr(kernels, "may_have_gpu", lambda environ: False)
        assert problems(right, given) == []
        return
    (by_device,) = problems(right, f"{given} --device cpu")
    assert by_device == (
        OPTION_OF[op],
        name,
        "runs only on GPUs, and --device is cpu",
        "leave it out",
    )
    assert problems(right, given) == []
    package = package_of_kernel(op, name)
    if package is not None:
        monkeypatch.setattr(kernels, "is_installed", lambda module: module != package.module)
        (by_package,) = problems(right, given)
        assert by_package[:3] == (
            OPTION_OF[op],
            name,
            f"needs {package.name}, which is not installed",
        )
        assert by_package[3] == f"{package.command}, or leave it out"
    monkeypatch.setattr(kernels, "may_have_gpu", lambda environ: False)
    (by_machine,) = problems(right, given)
    assert by_machine == (
        OPTION_OF[op],
        name,
        "runs only on GPUs, and no GPU is visible on this machine",
        "leave it out",
    )


def test_layers_of_transformer_engine_need_a_gpu(right, monkeypatch) -> None:
    given = "--bf16 --transformer-impl transformer_engine"
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: ModuleSpec("any", None, origin="somewhere")
    )
    assert problems(right, given) == []
    monkeypatch.setattr(kernels, "may_have_gpu", lambda environ: False)
    ((option, value, rule, cure),) = problems(right, given)
    assert (option, value) == (
        "--transformer-impl",
        "transformer_engine",
    ) and "no GPU is visible" in rule
    assert cure == "give local, which computes the same"


def test_a_kernel_that_the_model_does_not_use_is_not_requested(right) -> None:
    right["--hybrid-layer-pattern"] = "--"
    unused = "--ssd-backend mamba_ssm --conv-backend causal_conv1d --attention-backend flash_attn_2"
    assert problems(right, f"{unused} --device cpu") == []


def test_fast_kernels_are_required_where_there_are_some(right, monkeypatch) -> None:
    assert problems(right, "--require-fast-kernels") == []
    ((option, _, rule, _),) = problems(right, "--require-fast-kernels --device cpu")
    assert option == "--require-fast-kernels" and "--device is cpu" in rule
    ((option, value, _, cure),) = problems(right, "--require-fast-kernels --ssd-backend reference")
    assert (option, value, cure) == (
        "--ssd-backend",
        "reference",
        "leave one of the two options out",
    )
    monkeypatch.setattr(kernels, "may_have_gpu", lambda environ: False)
    ((option, _, rule, _),) = problems(right, "--require-fast-kernels")
    assert option == "--require-fast-kernels" and "no GPU is visible" in rule


def test_a_program_that_runs_no_kernels_takes_the_flags_of_a_gpu(right, monkeypatch) -> None:
    """``packing`` and ``plan`` accept GPU flags on a machine without a GPU, because they do not run
    kernels.
    """
    monkeypatch.setattr(kernels, "may_have_gpu", lambda environ: False)
    argv = argv_of(right)
    config = parse_or_exit(
        [*argv, "--ssd-backend", "mamba_ssm", "--require-fast-kernels"], launched=False
    )
    assert config.training.ssd_backend == "mamba_ssm"


@pytest.mark.parametrize(
    ("visible", "driver", "expected"),
    [
        (None, True, True),
        ("0,1", True, True),
        ("GPU-5a", True, True),
        (None, False, False),
        ("", True, False),
        ("-1", True, False),
        (" ,0", True, False),
    ],
)
def test_whether_there_may_be_a_gpu(
    monkeypatch, visible: str | None, driver: bool, expected: bool
) -> None:
    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(kernels.ctypes, "CDLL", load)
    assert may_have_gpu({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_no_gpu_is_denied_that_torch_sees() -> None:
    assert may_have_gpu(os.environ) or not torch.cuda.is_available()


def test_what_is_installed_is_found_without_importing_it(tmp_path: Path, monkeypatch) -> None:
    for name in ("parcel/cute/__init__.py", "empty/readme"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("raise SystemExit")
    (tmp_path / "parcel/__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("parcel") and is_installed("parcel.cute")
    assert (
        not is_installed("parcel.other")
        and not is_installed("empty")
        and not is_installed("absent.cute")
    )


def test_every_kernel_of_a_package_is_one_of_an_op() -> None:
    for name in (name for package in PACKAGES for name in package.kernels):
        op, _, backend = name.partition(".")
        assert op not in MODULES or backend in op_of(op).names(), name
    for op in MODULES:  # without Triton, advice names the package of each of our kernels
        if "triton" in op_of(op).names():
            package = package_of_kernel(op, "triton")
            assert package is not None and package.name == "triton", op


def test_the_program_ends_at_once_with_code_2(right, tmp_path: Path) -> None:
    """Each problem is one sentence, without a traceback and without importing torch."""
    words = argv_of(right)
    words += ["--device", "cpu", "--attention-backend", "flash", "--ssd-backend", "mamba_ssm"]
    program = (
        f"import runpy, sys; sys.argv = ['pretrain_hybrid.py', *{words}]\n"
        "try:\n    runpy.run_path(sys.argv[0].replace('pretrain', sys.path[-1] + '/pretrain'), run_name='__main__')\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{program}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == "False\n", done.stderr
    assert "Traceback" not in done.stderr
    for line in ("1. --attention-backend flash_attn_2", "2. --ssd-backend mamba_ssm"):
        assert line in done.stderr
    assert done.stderr.count("rule: runs only on GPUs, and --device is cpu") == 2
