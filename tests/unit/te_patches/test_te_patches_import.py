"""te_patches on PYTHONPATH of separate processes, with stand-ins for TransformerEngine and torch.

TransformerEngine is replaced by two small modules, torch by about thirty lines. The stand-in of
torch prints SYNC whenever a number would be copied from the GPU to the host.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.te_real_sources import TE_PATCHES

TORCH = """
def sync(): print("SYNC")
def equal(a, b): sync(); return a.data == b.data
def arange(n, device): return Tensor(range(n))

class Scalar:
    def __init__(self, x): self.x = x
    def __index__(self): sync(); return self.x

class Tensor:
    dtype = device = "stand-in"
    def __init__(self, data, base=None): self.data, self.base = list(data), base
    def data_ptr(self): return id(self.base or self)
    def stride(self): return 1
    def dim(self): return 1
    def view(self, *_): return self
    shape = property(lambda self: (len(self.data),))
    def __ge__(self, scalar): return Tensor(x >= scalar.x for x in self.data)
    def masked_fill_(self, mask, x): self.data = [x if m else y for m, y in zip(mask.data, self.data)]
    def __getitem__(self, at):
        if at == -1:
            return Scalar(self.data[-1])
        if at.start is None:
            return Tensor(self.data[at], self)
        start = at.start.__index__()
        class Tail:
            def fill_(_, x): self.data[start:] = [x] * len(self.data[start:])
        return Tail()
"""
FORWARD = """
import torch

class DotProductAttention:
    def forward(self, cu_seqlens_q, cu_seqlens_q_padded, cp_size=2):
        context_parallel = cp_size > 1
        return cu_seqlens_q_padded is not None and not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])
"""
BACKWARD = """
class AttnFuncWithCPAndKVP2P:
    @staticmethod
    def backward(dq, cu_seqlens_q_padded):
        dq[cu_seqlens_q_padded[-1] :].fill_(0)
        return dq.data
"""
PACKAGE = "transformer_engine/pytorch/attention/dot_product_attention"
# Version of the stand-in. Only processes that ran the lines of `Site.teach` know this version.
KNOWN_AS = "2.9.99"
USE = f"""
import sys, torch
from {PACKAGE.replace("/", ".")}.context_parallel import AttnFuncWithCPAndKVP2P as P2P
from {PACKAGE.replace("/", ".")}.dot_product_attention import DotProductAttention
def use():
    cu, other = torch.Tensor([0, 2, 3]), torch.Tensor([0, 3, 4])
    decide = DotProductAttention().forward
    print(decide(cu, None), decide(cu, cu), decide(cu, other), P2P.backward(torch.Tensor([5] * 6), cu))
use()
"""
RESULT = "False False True [5, 5, 5, 0, 0, 0]"
PATCHED, NOT_PATCHED = [RESULT], ["SYNC", "SYNC", "SYNC", RESULT]
APPLIED = (
    f"te_patches: TransformerEngine {KNOWN_AS}: host syncs of context-parallel THD attention replaced: 1 in "
    "DotProductAttention.forward, 1 in AttnFuncWithCPAndKVP2P.backward; MEGATRON_PACKED_TE_PATCHES=0 leaves them"
)


@pytest.fixture
def site(tmp_path, known):
    """Return a folder with TransformerEngine and torch, to put on PYTHONPATH after te_patches."""
    package = tmp_path / PACKAGE
    package.mkdir(parents=True)
    (tmp_path / "torch.py").write_text(TORCH)
    sources = [FORWARD, BACKWARD]
    (package / "dot_product_attention.py").write_text(FORWARD)
    (package / "context_parallel.py").write_text(BACKWARD)
    functions = [
        next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
        for source in sources
    ]
    prints = tuple(map(known.fingerprint_of, sources, functions))
    tmp_path.teach = (
        f"import te_thd_patch, te_thd_sources; te_thd_sources.KNOWN[{KNOWN_AS!r}] = {prints!r}\n"
    )
    set_version(tmp_path, KNOWN_AS)
    return tmp_path


class Site(type(Path())):
    """Path with the lines of code that register the stand-in's fingerprints in a process."""

    teach = ""


@pytest.fixture
def tmp_path(tmp_path):
    return Site(tmp_path)


def set_version(site, version):
    info = site / "transformer_engine-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n"
    )


def python(site, code, *flags, patches=TE_PATCHES, **env):
    """Run code in a process with te_patches and ``site`` on PYTHONPATH.

    Returns:
        Lines on stdout, and lines on stderr.
    """
    ours = ("PYTHON", "LOCAL_RANK", "SLURM", "MEGATRON_PACKED")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | {"PYTHONPATH": f"{patches}{os.pathsep}{site}"} | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_applied_once_and_said_in_one_line(site):
    again = "te_thd_patch.install(); te_thd_patch.install(); print(sys.meta_path.count(te_thd_patch._finder))"
    assert python(site, site.teach + USE + again) == ([*PATCHED, "1"], [APPLIED])


def test_bytecode_caches_are_neither_read_nor_written(site):
    cache = site / PACKAGE / "__pycache__"
    python(site, site.teach + USE)
    assert not cache.exists()
    assert python(site, USE, MEGATRON_PACKED_TE_PATCHES="0") == (NOT_PATCHED, [])
    before = {path: path.read_bytes() for path in cache.iterdir()}
    assert len(before) == 2
    assert python(site, site.teach + USE) == (PATCHED, [APPLIED])
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_only_the_first_process_of_a_node_speaks(site):
    assert python(site, site.teach + USE, LOCAL_RANK="1") == (PATCHED, [])
    assert python(site, site.teach + USE, SLURM_LOCALID="3") == (PATCHED, [])
    assert python(site, site.teach + USE, LOCAL_RANK="0", SLURM_LOCALID="3") == (PATCHED, [APPLIED])


def test_without_context_parallelism_nothing_is_different(site):
    code = "decide = DotProductAttention().forward; a, b = torch.Tensor([0, 2]), torch.Tensor([0, 2])\n"
    code += "print(decide(a, b, cp_size=1), decide(a, b, cp_size=2))"
    assert python(site, site.teach + USE + code)[0] == [*PATCHED, "SYNC", "False True"]


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.18.0", "it needs no patch, 2.18 and newer can be captured as they are"),
        ("2.20.2", "it needs no patch"),
        ("2.2.0", "this release is not known (2.3.0, "),
        ("2.17.9", "this release is not known (2.3.0, "),
        ("2.8.0", "DotProductAttention.forward is not that of this release (fingerprint "),
        ("2.8.0+4ea4e8b", "DotProductAttention.forward is not that of this release (fingerprint "),
    ],
)
def test_what_is_not_known_is_left_untouched_and_said(site, version, why):
    set_version(site, version)
    out, err = python(
        site, site.teach + USE + "print('_te_thd_patch' in vars(sys.modules[P2P.__module__]))"
    )
    assert out == [*NOT_PATCHED, "False"]
    assert len(err) == 1 and err[0].startswith(
        f"te_patches: TransformerEngine {version} is left untouched: {why}"
    )


def test_one_doctored_function_leaves_both_modules_untouched(site):
    path = site / PACKAGE / "context_parallel.py"
    path.write_text(BACKWARD.replace("return dq.data", "return list(dq.data)"))
    out, err = python(site, site.teach + USE)
    assert out == NOT_PATCHED
    assert "AttnFuncWithCPAndKVP2P.backward is not that of this release" in err[0] and len(err) == 1


@pytest.mark.parametrize("case", ["no version", "no source", "no module", "no syntax"])
def test_what_cannot_be_read_is_left_untouched_and_said(site, case):
    path = site / PACKAGE / "context_parallel.py"
    code, result = USE, NOT_PATCHED
    if case == "no version":
        (site / "transformer_engine-0.dist-info" / "METADATA").unlink()
        (site / "transformer_engine-0.dist-info").rmdir()
        why = "(version unknown) is left untouched: No package metadata was found for transformer_engine"
    elif case == "no source":
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", path], check=True)
        path.unlink()
        why = "context_parallel is not loaded from a plain source file but by SourcelessFileLoader"
    elif case == "no module":
        path.unlink()
        code, result = f"import {PACKAGE.replace('/', '.')}.dot_product_attention", []
        why = "there is no transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
    else:
        path.write_text(BACKWARD + "\n)")
        code = f"try:\n    import {PACKAGE.replace('/', '.')}.context_parallel\nexcept SyntaxError: print('as ever')"
        result = ["as ever"]
        why = "is left untouched: SyntaxError"
    out, err = python(site, site.teach + code)
    assert out == result
    assert len(err) == 1 and why in err[0], err


def test_undo_before_and_after_import_and_back(site):
    undo = "te_thd_patch.undo()\n"
    assert python(site, site.teach + undo + USE) == (NOT_PATCHED, [])
    undone = "te_patches: undone, TransformerEngine's own statements run again"
    left = "print(te_thd_patch._finder in sys.meta_path)\n"
    back = site.teach + USE + undo + left + "use()\nte_thd_patch.install()\nuse()\n"
    assert python(site, back) == ([*PATCHED, "False", *NOT_PATCHED, *PATCHED], [APPLIED, undone])


def test_installed_after_transformer_engine_it_says_so(site):
    late = (
        USE
        + "import te_thd_patch; te_thd_patch.install(); print(te_thd_patch._finder in sys.meta_path)"
    )
    out, err = python(site, late, MEGATRON_PACKED_TE_PATCHES="0")
    assert out == [*NOT_PATCHED, "False"]
    assert err == [
        "te_patches: TransformerEngine is left untouched: it was imported before this patch was installed"
    ]


def test_the_switch_leaves_no_trace(site):
    code = "import sys; print('te_thd_patch' in sys.modules, any('_Finder' in repr(f) for f in sys.meta_path))"
    assert python(site, code) == (["True True"], [])
    assert python(site, code, MEGATRON_PACKED_TE_PATCHES="0") == (["False False"], [])


# --- Other sitecustomize modules, and interpreter start.
# --------------------------------------------------------------

OTHER = """
import sys
marks = [*getattr(sys.modules.get("sitecustomize"), "marks", []), __name__, __file__, sys.modules[__name__].__file__]
"""
ASK = "import sys, sitecustomize; print(*sitecustomize.marks, 'te_thd_patch' in sys.modules)"


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_next_sitecustomize_runs_once_as_itself(site, switch):
    (site / "sitecustomize.py").write_text(OTHER)
    file = site / "sitecustomize.py"
    out, err = python(site, ASK, MEGATRON_PACKED_TE_PATCHES=switch)
    assert (out, err) == ([f"sitecustomize {file} {file} {switch == '1'}"], [])


PASSES_ON = """
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
print("passes on")
spec = PathFinder.find_spec("sitecustomize", [folder for folder in sys.path if folder not in __file__])
if spec is not None:
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
"""


@pytest.mark.parametrize("in_front", [True, False])
def test_others_that_pass_on_neither_run_in_circles_nor_lose_the_last(site, tmp_path, in_front):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(PASSES_ON)
    (site / "sitecustomize.py").write_text("print('last')")
    folders = [other, TE_PATCHES] if in_front else [TE_PATCHES, other]
    path = os.pathsep.join(map(str, folders))
    out, err = python(site, "import sys; print('te_thd_patch' in sys.modules)", patches=path)
    assert (out, err) == (["passes on", "last", "True"], [])


def test_an_error_in_the_next_sitecustomize_is_reported_as_ever(site):
    (site / "sitecustomize.py").write_text("raise ValueError('of another')")
    out, err = python(site, "import sys; print('te_thd_patch' in sys.modules)")
    assert out == ["True"]
    with_us = "\n".join(err)
    alone = "\n".join(python(site, "", patches=site)[1])
    assert "of another" in alone and with_us == alone


def test_an_error_in_the_patch_stops_no_import(site, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text((TE_PATCHES / "sitecustomize.py").read_text())
    (broken / "te_thd_patch.py").write_text("match = 1\nthis is no Python")
    (site / "sitecustomize.py").write_text("print('next')")
    out, err = python(site, "print('up')", patches=broken)
    assert out == ["next", "up"]
    assert len(err) == 1
    assert err[0].startswith(
        "te_patches: not armed, TransformerEngine is left untouched: SyntaxError"
    )


@pytest.mark.parametrize(
    ("flag", "runs"), [("-E", False), ("-I", False), ("-S", False), ("-s", True), ("-P", True)]
)
def test_flags_of_python(site, flag, runs):
    if flag == "-P" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    assert python(site, "import sys; print('te_thd_patch' in sys.modules)", flag) == (
        [str(runs)],
        [],
    )


def test_without_transformer_engine_nothing_happens(tmp_path):
    code = "import sys; print(*sys.modules)\ntry:\n    import transformer_engine\nexcept ImportError: print('none')"
    out, err = python(tmp_path, code)
    assert (out[1:], err) == (["none"], [])
    heavy = {
        "torch",
        "numpy",
        "ast",
        "hashlib",
        "re",
        "typing",
        "importlib.metadata",
        "te_thd_sources",
    }
    more = {*out[0].split()} - {*python(tmp_path, code, patches=tmp_path)[0][0].split()}
    assert "te_thd_patch" in more and not more & heavy


def test_start_costs_less_than_10_ms(tmp_path):
    """Importing sitecustomize takes less than 10 ms in the fastest of five processes.

    Other processes on the machine may slow down some of the five.
    """

    def milliseconds():
        _, err = python(tmp_path, "", "-X", "importtime")
        line = next(line for line in err if re.search(r"\bsitecustomize$", line))
        return int(line.split("|")[1]) / 1000

    milliseconds()  # The first process writes the bytecode.
    assert min(milliseconds() for _ in range(5)) < 10
