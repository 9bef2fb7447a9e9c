"""Compilation of the Triton kernels for Hopper, with the specialisations of a launch on a GPU.

The tests need no GPU. The interpreter runs kernels as Python. It does not check types, arguments of
value 1 that become constants, or the use of registers. So these tests call each op on CPU tensors of
awkward sizes, as on a GPU, and each launch stops after the compilation.
"""

import os
import re
import subprocess
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.ops.parts_of_pack import PartOfPack
from support import kept_kernels
from support.compiled_products import overwritten_operands, transposed_in_registers
from support.hopper_driver import Hopper

triton = pytest.importorskip("triton")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"),
    pytest.mark.skipif(
        not CUOBJDUMP.exists(), reason="this build of Triton has no tools for NVIDIA GPUs"
    ),
]
OPS = "megatron_packed.ops."
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may use on an H200."""


@pytest.fixture
def keep_in(pytestconfig, monkeypatch, tmp_path):
    """Provide a function that chooses the folder of compiled kernels by its name.

    It stays in pytest's cache from one run of the tests to the next, and the end of a run bounds it
    (`kept_kernels`). Triton's keys have the code of a
    kernel with all that it calls, its options and Triton itself. So a change of any of these compiles
    the kernel again.
    """

    def choose(name):
        cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
        folder = tmp_path / name if cache is None else kept_kernels.folder_of(cache, name)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))

    manager = triton.runtime.cache.FileCacheManager
    dated = kept_kernels.with_time_of_use(manager.__init__)
    monkeypatch.setattr(manager, "__init__", dated)

    return choose


@pytest.fixture
def compiled(monkeypatch, keep_in):
    """Provide a list of (name, kernel) in the order of launches; launches only compile."""
    kernels = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels.append((self.fn.__name__, kernel))
        return kernel

    keep_in("triton_kernels")
    # Numbers of lines for debuggers would take an eighth of the time. They change no instruction.
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    return kernels


def omit_machine_code(monkeypatch, keep_in):
    """Let compilations end with LLVM IR that is not optimised, when the use of shared memory is known.

    The generation of code would take half of the time of kernels with products in float32, and a
    quarter of the time of other kernels. The kernels without code belong to a device and a folder of
    their own, so that no other test gets them from a cache.
    """
    keep_in("triton_kernels_without_code")
    backend = import_module("triton.backends.nvidia.compiler").CUDABackend

    def name_only(self, source, metadata, *options):
        metadata["name"] = "kernel"
        return ""

    monkeypatch.setattr(backend, "make_ptx", name_only)
    monkeypatch.setattr(backend, "make_cubin", lambda *arguments: b"")
    monkeypatch.setattr(Hopper, "get_current_device", lambda self: 1)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")


def test_kernels_that_are_not_used_are_removed_when_their_folder_is_large(compiled, tmp_path):
    """A run dates the folders of its kernels, so the kernels of before an edit are the oldest."""
    folder = Path(os.environ["TRITON_CACHE_DIR"])

    def in_use():
        return [each for each in folder.iterdir() if time.time() - each.stat().st_mtime < 600]

    (known := folder / "KNOWN").mkdir(exist_ok=True)
    os.utime(known, (0, 0))
    rms_norm(64, torch.float32, in_flat_buffer=True)
    assert len(in_use()) >= len({kernel.hash for _, kernel in compiled}) > 0
    assert known not in in_use()
    triton.runtime.cache.FileCacheManager("KNOWN")  # as a launch does that finds its kernel there
    assert known in in_use()
    known.rmdir()
    for age, name in enumerate(("new", "used", "old", "older")):
        kernel = tmp_path / "kernels" / name
        kernel.mkdir(parents=True)
        (kernel / "k.cubin").write_bytes(bytes(10))
        os.utime(kernel, (0, 1000 - age))
    kept_kernels.remove_unused(tmp_path / "kernels", 40)
    assert len(list((tmp_path / "kernels").iterdir())) == 4
    kept_kernels.remove_unused(tmp_path / "kernels", 25)
    assert {each.name for each in (tmp_path / "kernels").iterdir()} == {"new", "used"}
    kept_kernels.remove_unused(tmp_path / "absent", 0)


def stack_bytes(kernel, path):
    """Return the bytes of local memory per thread, which hold values that did not fit in registers."""
    path.write_bytes(kernel.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"STACK:(\d+)", report)[1])


def assert_sound_products(compiled):
    """Check that kernels fit in shared memory and that no product of theirs is compiled wrongly."""
    for name, kernel in compiled:
        assert kernel.metadata.shared <= SHARED_MEMORY, name
        assert not transposed_in_registers(kernel.asm["ttgir"]), name
        assert not overwritten_operands(kernel.asm["ttgir"]), name


def assert_stacks(compiled, most, folder):
    """Check the bytes of local memory of kernels: name -> most bytes."""
    for name, kernel in compiled:
        if name in most:
            assert stack_bytes(kernel, folder / name) <= most[name], name


def parameter(*shape, dtype=torch.float32, in_flat_buffer=True):
    weight = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))
    if in_flat_buffer:
        weight.main_grad = torch.zeros(*shape)
    return weight


def leaf(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def backward(*outputs):
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])


def rms_norm(size, dtype, in_flat_buffer):
    op = import_module(OPS + "rms_norm.triton_kernel")
    weight = parameter(size, dtype=dtype, in_flat_buffer=in_flat_buffer)
    backward(*op.run_with_residual(leaf(5, size, dtype=dtype), weight, 1e-5))
    backward(op.run(leaf(1, size, dtype=dtype), weight, 1e-5))
    heads_TNH = leaf(3, 7, size, dtype=dtype)[:, :5]
    backward(op.run(heads_TNH, weight, 1e-5, zero_centered=True))


def gated_rms_norm(size, dtype, in_flat_buffer):
    op = import_module(OPS + "gated_rms_norm.triton_kernels")
    weight = parameter(size, dtype=dtype, in_flat_buffer=in_flat_buffer)
    z_TD = leaf(5, size + 8, dtype=dtype)[:, :size]
    group = size // (2 - size % 2)
    backward(op.run(leaf(5, size, dtype=dtype), z_TD, weight, 1e-5, group_size=group))
    shared = parameter(group, dtype=dtype, in_flat_buffer=in_flat_buffer)
    options = {"group_size": group, "norm_before_gate": True}
    backward(op.run(leaf(5, size, dtype=dtype), z_TD, shared, 1e-5, **options))


def scan_steps(size, dtype, in_flat_buffer):
    op = import_module(OPS + "ssd.chunk_sum")
    chunk, chunks, tiles = 128 if size > 8 else 16, 1 if size == 1 else 3, min(size, 4)
    dt_TN, seq_idx_1T = (
        torch.zeros(chunk * chunks - 1, size, dtype=dtype),
        torch.zeros(1, chunk * chunks - 1).int(),
    )
    per_head, parts = torch.zeros(size), torch.zeros(tiles, size, chunks, chunk)
    step_NQL, _ = op.chunk_sum_forward(dt_TN, per_head, per_head, seq_idx_1T, chunk)
    main_grads = (torch.zeros(size) if in_flat_buffer else None,) * 3
    op.chunk_sum_backward(
        step_NQL,
        dt_TN,
        per_head,
        per_head,
        per_head,
        seq_idx_1T,
        op.PartialSums(
            d_sum_XNQL=parts,
            d_last_sum_NQX=torch.zeros(size, chunks, 2 * tiles)[..., :tiles],
            d_log_XNQL=parts,
            d_reach_XNQL=parts,
            d_step_XNQL=parts,
            d_D_XXQN=torch.zeros(tiles, 2 * tiles, chunks, size)[:, :tiles],
        ),
        out_TN=torch.empty_like(dt_TN),
        main_grads=main_grads,
    )


def activations(size, dtype, in_flat_buffer):
    for kind in ("gelu", "squared_relu", "swiglu"):
        backward(
            import_module(OPS + "activation.triton_kernel").run(
                leaf(3, 2 * size, dtype=dtype), kind
            )
        )


def gates(size, dtype, in_flat_buffer):
    op = import_module(OPS + "activation.triton_kernel")
    gate_TKF = leaf(3, 2, 2 * size, dtype=dtype)[..., size:]
    backward(op.run_gate(leaf(3, 2, size, dtype=dtype), gate_TKF))


def token_rows(size, dtype, in_flat_buffer):
    op = import_module(OPS + "token_rows")
    tokens_T = torch.zeros(3, dtype=torch.int32 if in_flat_buffer else torch.int64)
    for table in (torch.float32, torch.bfloat16):
        rows = torch.zeros(3, size, dtype=dtype)
        op.add_token_rows(torch.zeros(2, size, dtype=table), tokens_T, rows)


def permutation(size, dtype, in_flat_buffer):
    op = import_module(OPS + "permute.triton_kernels")
    token_R, row_TK = torch.tensor([0, 1, 0, 1]).int(), torch.tensor([[0, 2], [1, 3]]).int()
    weights_TK = leaf(2, 2, dtype=torch.float32)
    rows_RD = op.rows_of_tokens(leaf(2, size, dtype=dtype), token_R, row_TK)
    backward(op.tokens_of_rows(rows_RD, weights_TK, token_R, token_R, row_TK))
    source = torch.zeros(64 * size, dtype=torch.uint8)
    for row_bytes in (16, size):
        op.copy_used(torch.zeros_like(source), source, torch.tensor([1, 3]), 1, row_bytes, 512)
    unwritten_rows = import_module(OPS + "grouped_mlp.unwritten_rows")
    unwritten_rows.zero_rows_after_(torch.zeros(4, size, dtype=dtype), torch.tensor([1, 3]).int())
    unwritten_rows.zero_unused_experts_(
        torch.zeros(2, size, 3, dtype=dtype), torch.tensor([1, 3]).int()
    )


def convolution(size, dtype, in_flat_buffer):
    op = import_module(OPS + "causal_conv1d.triton_kernels")
    bias = parameter(size, dtype=dtype, in_flat_buffer=in_flat_buffer)
    x_TC, halo_HC = leaf(7, size + 16, dtype=dtype)[:, 16:], leaf(2, size, dtype=dtype)
    for width, bias_C, activation, halo in ((4, None, "silu", None), (3, bias, None, halo_HC)):
        weight_CW = parameter(size, width, dtype=dtype, in_flat_buffer=in_flat_buffer)
        seq_idx_1T = torch.zeros(1, 7 if halo is None else 9).int()
        options = {"activation": activation, "halo_HC": halo}
        backward(op.run(x_TC, weight_CW, bias_C, seq_idx_1T, **options))


def rope(size, dtype, in_flat_buffer):
    angles_PR = torch.zeros(7, 16)
    q_TNH, k_TKH = leaf(7, min(size, 9), 48, dtype=dtype), leaf(7, 1, 48, dtype=dtype)
    op = import_module(OPS + "rope.triton_kernel")
    backward(*op.run(q_TNH, k_TKH, torch.zeros(7).int(), angles_PR, angles_PR))


def cross_entropy(size, dtype, in_flat_buffer):
    op = import_module(OPS + "cross_entropy.triton_kernel")
    api = import_module(OPS + "cross_entropy.api")
    part = api.VocabShard(first_row=0, total_rows=2 * size, sum_over_ranks=id, max_over_ranks=id)
    grad_scale = torch.ones(()) if in_flat_buffer else None
    for shard in (None, part):
        loss_sum, _ = op.run(
            leaf(5, 16, dtype=dtype),
            parameter(size, 16, dtype=dtype, in_flat_buffer=in_flat_buffer),
            torch.zeros(5).int(),
            torch.ones(5),
            vocab_size=size,
            chunk_tokens=4,
            grad_scale=grad_scale,
            shard=shard,
        )
        loss_sum.backward(grad_scale)


def router(experts):
    op = import_module(OPS + "router_logits.triton_kernels")
    weight = parameter(experts, 2688)
    backward(op.run(leaf(5, 2688, dtype=torch.bfloat16), weight))


def expert_gradients(experts):
    op = import_module(OPS + "grouped_mlp.weight_gradient")
    rows = (torch.zeros(5, width, dtype=torch.bfloat16) for width in (2688, 1856))
    op.add_weight_gradient(torch.zeros(experts, 2688, 1856), *rows, torch.zeros(experts).int())


def test_the_second_product_of_adapters_compiles_and_fits(compiled, tmp_path):
    op = import_module(OPS + "lora_expand.triton_kernel")
    low = torch.zeros(100, 16, dtype=torch.bfloat16)
    op.run(low, torch.zeros(300, 16, dtype=torch.bfloat16), None)
    op.run(low, torch.zeros(16, 300, dtype=torch.bfloat16).t(), torch.zeros(300).bfloat16())
    assert len(compiled) == 2
    assert_sound_products(compiled)
    assert_stacks(compiled, {"_expand_kernel": 0}, tmp_path)


@pytest.mark.parametrize("launches, experts", [(router, 16), (router, 160), (expert_gradients, 3)])
def test_products_of_experts_compile_and_fit(launches, experts, compiled, tmp_path):
    launches(experts)
    assert compiled
    assert_sound_products(compiled)
    assert_stacks(compiled, dict.fromkeys(dict(compiled), 0), tmp_path)


def delta_rule(*sizes, dtype, doubled=False, in_parts=False):
    tokens, key_heads, heads, key_dim, value_dim = sizes
    k_TGK = leaf(tokens, key_heads, key_dim, dtype=dtype)
    wide_TNV = leaf(tokens, heads, value_dim + 8, dtype=dtype)
    gate_TN = leaf(tokens, heads, dtype=dtype)
    per_head = (torch.zeros(heads, requires_grad=True),) * 2
    cu_seqlens = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    op = import_module(OPS + "gated_delta_rule.triton_kernels")
    seq_idx_1T, part = torch.zeros(1, tokens).int(), None
    if in_parts:
        numbers = heads * (value_dim + key_dim) * key_dim
        gathered = SimpleNamespace(wait=lambda: torch.zeros(1, numbers))
        part = PartOfPack(1, 3, torch.zeros(1).int(), lambda message_1X, back=False: gathered)
    o = op.run(
        *(k_TGK, k_TGK, wide_TNV[..., :value_dim], gate_TN, gate_TN, *per_head),
        *(seq_idx_1T, cu_seqlens),
        allow_neg_eigval=doubled,
        tables=None,
        deterministic=True,
        part=part,
    )
    backward(o)


def scan(*sizes):
    tokens, heads, head_dim, groups, state_dim = sizes
    x_TNP = leaf(tokens, heads, head_dim, dtype=torch.bfloat16)
    B_TGS = leaf(tokens, groups, state_dim, dtype=torch.bfloat16)
    dt_TN = leaf(tokens, heads, dtype=torch.bfloat16)
    A_log_N, D_N, dt_bias_N = (leaf(heads, dtype=torch.float32) for _ in range(3))
    op = import_module(OPS + "ssd.triton_kernels")
    seq_idx_1T = torch.zeros(1, tokens).int()
    arguments = (x_TNP, dt_TN, A_log_N, B_TGS, B_TGS, D_N, dt_bias_N, seq_idx_1T, None)
    part = None
    if tokens < 1024:
        gathered = SimpleNamespace(wait=lambda: torch.zeros(1, heads * (head_dim * state_dim + 1)))
        part = PartOfPack(1, 3, torch.zeros(1).int(), lambda message_1X, back=False: gathered)
    backward(op.run(*arguments, chunk_size=128, part=part))


DELTA_RULE_STACK = {
    "_decays_kernel": 0,
    "_scores_kernel": 0,
    "_forward_kernel": 192,
    "_backward_kernel": 64,
    "_query_kernel": 352,  # it computes the terms between tokens for both kernels; 72 with Triton 3.6
    "_key_kernel": 56,
    "_leaving_kernel": 0,
    "_entering_kernel": 120,
    "_pass_on_kernel": 0,
}
"""Most bytes of local memory per thread: values that do not fit in the 255 registers of a thread."""


@pytest.mark.parametrize(
    ("dtype", "head_dim", "doubled"),
    [(torch.bfloat16, 128, False), (torch.float32, 32, False), (torch.bfloat16, 128, True)],
)
def test_delta_rule_compiles_and_fits(
    dtype, head_dim, doubled, compiled, keep_in, monkeypatch, tmp_path
):
    if doubled:  # its products in float32 are those of the case before
        omit_machine_code(monkeypatch, keep_in)
    delta_rule(1024, 2, 4, head_dim, head_dim, dtype=dtype, doubled=doubled)
    assert DELTA_RULE_STACK.keys() <= dict(compiled).keys()
    assert_sound_products(compiled)
    if dtype == torch.bfloat16 and not doubled:
        assert_stacks(compiled, DELTA_RULE_STACK, tmp_path)


def test_parts_of_the_delta_rule_compile_and_fit(compiled, tmp_path):
    delta_rule(1024, 2, 4, 128, 128, dtype=torch.bfloat16, in_parts=True)
    assert DELTA_RULE_STACK.keys() <= dict(compiled).keys()
    assert_sound_products(compiled)
    assert_stacks(compiled, DELTA_RULE_STACK, tmp_path)


SCAN_STACK = {
    "_walk_kernel": 24,
    "_scan_kernel": 104,
    "_token_gradients_kernel": 56,
    "_state_gradients_kernel": 0 if VERSION >= (3, 8) else 16,
}
"""As `DELTA_RULE_STACK`, for a state of 128. Two kernels use 168 registers, which was fastest on an H200."""


USUAL_SCAN, INCOMPLETE_LARGE_TILES = (8192, 64, 64, 8, 128), (300, 3, 96, 1, 256)
WITH_MACHINE_CODE = (USUAL_SCAN, INCOMPLETE_LARGE_TILES)


@pytest.mark.parametrize(
    "sizes",
    [
        USUAL_SCAN,
        (8192, 64, 64, 8, 256),
        (8192, 64, 64, 8, 64),
        INCOMPLETE_LARGE_TILES,
        (300, 3, 96, 1, 128),
    ],
    ids=["usual", "large state", "small state", "incomplete large tiles", "incomplete tiles"],
)
def test_scan_compiles_and_fits(sizes, compiled, keep_in, monkeypatch, tmp_path):
    """Check whole and incomplete tiles of each size of a state.

    Machine code is made of whole tiles of the usual state and of incomplete tiles of the large
    state. Together they have all branches of the kernels.
    """
    if sizes not in WITH_MACHINE_CODE:
        omit_machine_code(monkeypatch, keep_in)
    scan(*sizes)
    assert SCAN_STACK.keys() <= dict(compiled).keys()
    assert_sound_products(compiled)
    if sizes == USUAL_SCAN:
        assert_stacks(compiled, SCAN_STACK, tmp_path)


def test_the_search_for_transposed_operands_finds_one():
    found = transposed_in_registers(
        "%1 = tt.trans %0 {order = array<i32: 1, 0>} : x\n"
        "%2 = ttg.convert_layout %1 : y\n"
        "%3 = ttng.warp_group_dot %2, %b, %c : z\n"
        "%4 = ttng.warp_group_dot %a, %b, %c : z\n"
        "%2 = tt.load %d : y\n"  # another loop
        "%3 = ttng.warp_group_dot %2, %b, %c : z\n"
    )
    assert found == ["%2"]


@pytest.mark.parametrize(
    ("pendings", "place", "found"),
    [
        (0, "%now", []),
        (1, "%now", ["%p"]),
        (1, "%next", []),
        (2, "%next", ["%p"]),
        (1, "%unknown", ["%p"]),
    ],
)
def test_the_search_for_overwritten_operands_finds_those_that_run(pendings, place, found):
    loop = (
        "  %c0 = arith.constant 0 : i32\n"
        "  %c1 = arith.constant 1 : i32\n"
        "  %x = ttg.local_alloc : () -> y\n"
        "  %l:2 = scf.for %i = %c0 to %c8 step %c1 iter_args(%now = %c0, %next = %c1) -> (i32) {\n"
        "    %b = ttg.memdesc_index %x[%now] : y\n"
        f"    %s = ttg.memdesc_index %x[{place}] : y\n"
        "    %p = ttng.warp_group_dot %a, %b, %c {isAsync = true} : z\n"
        f"    %w = ttng.warp_group_dot_wait %p {{pendings = {pendings} : i32}} : z\n"
        "    %q = ttg.async_copy_global_to_local %r, %s mask %m : y\n"
        "    scf.yield %next, %now : i32, i32\n"
        "  }\n"
    )
    assert overwritten_operands(loop) == found


# Size 1 makes the smallest tiles and constants of the arguments; a divisor of 16 makes wide loads.
@pytest.mark.parametrize(
    ("size", "dtype", "in_flat_buffer"),
    [(1, torch.float32, False), (4096, torch.bfloat16, True)],
)
@pytest.mark.parametrize(
    "launches",
    [
        rms_norm,
        gated_rms_norm,
        scan_steps,
        activations,
        gates,
        token_rows,
        permutation,
        convolution,
        rope,
        cross_entropy,
    ],
)
def test_every_launch_compiles_and_fits(launches, size, dtype, in_flat_buffer, compiled, tmp_path):
    launches(size, dtype, in_flat_buffer)
    assert compiled
    for name, kernel in dict(compiled).items():
        assert kernel.metadata.shared <= SHARED_MEMORY, name
        assert stack_bytes(kernel, tmp_path / name) == 0, name


def test_packs_of_any_length_share_the_kernels_that_add_up(compiled, keep_in, monkeypatch):
    omit_machine_code(monkeypatch, keep_in)
    op = import_module(OPS + "rms_norm.triton_kernel")
    for tokens in (1, 3, 40, 64):
        backward(
            op.run(
                leaf(tokens, 256, dtype=torch.bfloat16), parameter(256, dtype=torch.bfloat16), 1e-5
            )
        )
    names = [name for name, _ in compiled]
    variants = {
        name: len({id(kernel) for other, kernel in compiled if other == name}) for name in names
    }
    assert variants["_sum_kernel"] == 1
