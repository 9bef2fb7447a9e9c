"""Compilation of a tuner's configurations in threads, for Hopper and without a GPU."""

import threading

import pytest
import torch

triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402

from support.hopper_driver import Hopper  # noqa: E402

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="the interpreter compiles nothing"
)


@triton.jit
def _double_kernel(x_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    tl.store(x_ptr + index, 2 * tl.load(x_ptr + index, mask=mask), mask=mask)


def tuner_of(*blocks):
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return triton.autotune(configs=configs, key=["count"])(_double_kernel)


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """Provide a list of (thread, block) of the compilations; the tuner times nothing."""
    parallel_compile = pytest.importorskip("megatron_packed.ops.ssd.parallel_compile")
    found = []
    compile_one = triton.compile

    def recorded(source, *args, **options):
        found.append((threading.current_thread(), source.constants[(2,)]))
        return compile_one(source, *args, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(parallel_compile, "_threads", lambda: 2)
    _double_kernel.device_caches.clear()
    monkeypatch.setattr(triton.compiler, "compile", recorded)
    return parallel_compile, found


def test_all_configurations_compile_in_threads_and_the_tuner_finds_them(compilations):
    parallel_compile, found = compilations
    tuner = parallel_compile.compile_in_threads(tuner_of(16, 32, 64))
    assert parallel_compile.compile_in_threads(tuner) is tuner
    x, options = torch.zeros(100), {"grid": (1,), "warmup": False}
    tuner.nargs = {"x_ptr": x, "count": 100}
    configs = tuner.prune_configs(options)
    assert configs == tuner.configs
    assert sorted(block for _, block in found) == [16, 32, 64]
    assert threading.current_thread() not in {thread for thread, _ in found}
    # The launch that the tuner times needs no compilation.
    for config in configs:
        _double_kernel.run(x, 100, grid=(1,), warmup=True, **config.all_kwargs())
    assert len(found) == 3


def test_a_configuration_that_does_not_compile_is_left_to_the_tuner(compilations):
    parallel_compile, found = compilations
    tuner = parallel_compile.compile_in_threads(tuner_of(16, 48))
    tuner.nargs = {}
    x = torch.zeros(100)
    options = {"x_ptr": x, "count": 100, "grid": (1,), "warmup": False}
    assert tuner.prune_configs(options) == tuner.configs
    assert sorted(block for _, block in found) == [16, 48]
    right, wrong = (config.all_kwargs() for config in tuner.configs)
    _double_kernel.run(x, 100, grid=(1,), warmup=True, **right)
    assert len(found) == 2
    with pytest.raises(triton.compiler.CompilationError):
        kernel = _double_kernel.run(x, 100, grid=(1,), warmup=True, **wrong)
        kernel.result()  # Triton 3.7 returns a future, whose result a launch would take


def test_one_configuration_is_not_compiled_in_advance(compilations):
    parallel_compile, found = compilations
    tuner = parallel_compile.compile_in_threads(tuner_of(16))
    tuner.nargs = {"x_ptr": torch.zeros(100), "count": 100}
    assert tuner.prune_configs({"grid": (1,), "warmup": False}) == tuner.configs
    assert found == []
