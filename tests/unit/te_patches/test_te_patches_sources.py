"""te_patches on sources of TransformerEngine: real releases, and a stand-in that needs no network.

The tests check for each source that its fingerprints match and that the patched source compiles.
Only calls that wait for the GPU may differ. The patched statements and functions run separately,
before and after the patch, and must give the same numbers. After the patch they also run on tensors
that cannot be read.

The real releases come from the package index: five below 2.18 that cover every form of the
statements, and 2.18.0. ``TE_PATCHES_RELEASES=all`` tests every known release.
"""

import ast
import itertools
import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch

from support import te_real_sources
from support.te_real_sources import TE_PATCHES

FORWARD_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
BACKWARD_MODULE = "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"

STAND_IN = {
    FORWARD_MODULE: """
def of_others(a, b):
    return torch.equal(a, b) or a[b[-1] :].fill_(0)

class DotProductAttention:
    def forward(self, cu_seqlens_q, cu_seqlens_q_padded, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_q=None):
        if max_seqlen_q is None:
            max_seqlen_q = cu_seqlens_q.max().item()
        context_parallel = self.cp_size > 1
        if pad_between_seqs is None:
            pad_between_seqs = (cu_seqlens_q_padded is not None
                and not torch.equal(cu_seqlens_q_padded[:-1], cu_seqlens_q[:-1])  # a comment, too, is fingerprinted
            ) or (cu_seqlens_kv_padded is not None and not torch.equal(cu_seqlens_kv_padded[:-1], cu_seqlens_kv[:-1]))
        return pad_between_seqs
""",
    BACKWARD_MODULE: """
class AttnFuncWithCPAndKVP2P:
    @staticmethod
    def backward(ctx, dq, dk, dv, dkv, cu_seqlens_q_padded, cu_seqlens_kv_padded):
        if ctx.qkv_format == "thd" and not ctx.use_fused_attention:
            dq[cu_seqlens_q_padded[-1] :].fill_(0)
            if ctx.enable_mla:
                dk[cu_seqlens_kv_padded[-1] :].fill_(0)
                dv[cu_seqlens_kv_padded[-1] :].fill_(0)
            else:
                dkv[:, cu_seqlens_kv_padded[-1] :].fill_(0)
        return dq.fill_(0), dk[1:].fill_(0), dv[dq:].fill_(1)


def get_seq_chunk_ids_for_reordering_before_attn(cp_size, device):
    return torch.tensor([*range(0, 2 * cp_size, 2), *range(2 * cp_size - 1, 0, -2)], device=device)


def by_rank(cu_seqlens, cp_size):
    ends = cu_seqlens.tolist()
    cuts = [[(a + (b - a) * i // (2 * cp_size)) for i in range(2 * cp_size + 1)] for a, b in zip(ends, ends[1:])]
    chunks = [(cut[i], cut[i + 1]) for r in range(cp_size) for cut in cuts for i in (r, 2 * cp_size - 1 - r)]
    return torch.tensor([row for start, end in chunks for row in range(start, end)])


def reorder_seq_chunks_before_a2a_after_attn_thd(x, cu_seqlens, cp_size, seq_dim=0):
    return x.index_select(seq_dim, by_rank(cu_seqlens, cp_size))


def reorder_seq_chunks_after_a2a_before_attn_thd(x, cu_seqlens, seq_chunk_ids, cp_size, seq_dim=0):
    "The way back."
    return x.index_select(seq_dim, by_rank(cu_seqlens, cp_size).argsort())
""",
}

CALLS = {  # calls in backward, by the first release that contains them
    "2.3.0": [
        "dq[cu_seqlens_q_padded[-1]:].fill_(0)",
        "dkv[:, cu_seqlens_kv_padded[-1]:].fill_(0)",
    ],
    "2.8.0": [
        f"{x}[cu_seqlens_{y}_padded[-1]:].fill_(0)"
        for x, y in (("dq", "q"), ("dk", "kv"), ("dv", "kv"))
    ],
}
CALLS["2.5.0"] = CALLS["2.8.0"] + CALLS["2.3.0"][1:]
COMPARISONS = [f"torch.equal(cu_seqlens_{x}_padded[:-1], cu_seqlens_{x}[:-1])" for x in ("q", "kv")]


def calls_in_backward(version):
    number = tuple(map(int, version.split(".")[:2]))
    return CALLS["2.3.0" if number < (2, 5) else "2.5.0" if number < (2, 8) else "2.8.0"]


def differences(before, after):
    """Return ``(before, after)``, as text, of every call that te_patches replaces.

    All other parts of the two trees must be equal.
    """
    match after:
        case ast.Call(ast.Attribute(ast.Name("_te_thd_patch"))):
            assert isinstance(before, ast.Call)
            return [(ast.unparse(before), ast.unparse(after))]
    assert type(before) is type(after)
    found = []
    for name in before._fields:
        values = getattr(before, name), getattr(after, name)
        ours, theirs = (value if isinstance(value, list) else [value] for value in values)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            if isinstance(one, ast.AST):
                found += differences(one, other)
            else:
                assert one == other
    return found


def function_in(tree, qualified_name):
    for name in qualified_name.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", "") == name)
    return tree


def statement(function, test):
    """Return the only ``if`` of a function whose condition begins with ``test``, and its code."""
    every = [node for node in ast.walk(function) if isinstance(node, ast.If)]
    found = [node for node in every if ast.unparse(node.test).startswith(test)]
    assert len(found) == 1
    return found[0], compile(ast.Module(found, []), "statement", "exec")


def check(patch, known, version, sources, expected_backward, reorders):
    trees, words = known.patched_trees(version, sources)
    old = {module: ast.parse(source) for module, source in sources.items()}
    names = list(known.FUNCTIONS)[: 4 if reorders else 2]
    before, after = (
        [function_in(all_[known.FUNCTIONS[name]], name) for name in names] for all_ in (old, trees)
    )
    assert words == (
        f"2 in DotProductAttention.forward, {len(expected_backward)} in AttnFuncWithCPAndKVP2P.backward"
        + "".join(f", all in {name}" for name in names[2:])
    )
    for module, tree in trees.items():
        compile(tree, module, "exec")
    if reorders:
        same_order(patch, old[BACKWARD_MODULE], before[2:], after[2:])
    for original, function, helper in zip(
        before[2:], after[2:], ("to_rank_order", "to_sequence_order")
    ):
        has_text = ast.get_docstring(original) is not None
        inserted = ast.unparse(function.body.pop(int(has_text)))
        arguments = ", ".join(argument.arg for argument in function.args.args)
        assert (
            inserted
            == f"if _te_thd_patch.active():\n    return _te_thd_patch.{helper}({arguments})"
        )

    forward, backward = (
        differences(old[module], trees[module]) for module in (FORWARD_MODULE, BACKWARD_MODULE)
    )
    assert [call for call, _ in forward] == COMPARISONS
    assert [call for _, call in forward] == [
        call.replace("torch.", "_te_thd_patch.").replace(":-1])", ":-1], context_parallel)")
        for call in COMPARISONS
    ]
    assert sorted(call for call, _ in backward) == sorted(expected_backward)
    for call, replacement in backward:
        tensor, start = re.fullmatch(r"(\w+)\[(?::, )?(\w+\[-1\]):\]\.fill_\(0\)", call).groups()
        assert replacement == f"_te_thd_patch.zero_tail({tensor}, {start}, {int(':, ' in call)})"

    decisions = [
        statement(function, "pad_between_seqs is None") for function in (before[0], after[0])
    ]
    same_decision(patch, *(code for _, code in decisions))
    condition = "ctx.qkv_format == 'thd' and (not ctx.use_fused_attention)"
    same_gradients(
        patch, *(statement(function, condition)[1] for function in (before[1], after[1]))
    )
    assigned = [
        node.lineno
        for node in ast.walk(after[0])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "context_parallel"
    ]
    assert any(number < decisions[1][0].lineno for number in assigned)


def same_order(patch, module, before, after):
    """Check that rows of packs are reordered as before the patch, in both directions.

    Documents fill the packs, and some documents have no tokens.
    """
    ids = "get_seq_chunk_ids_for_reordering_before_attn"
    names = {"torch": torch, "itertools": itertools, "_te_thd_patch": patch}
    names["_seq_chunk_ids_cache_for_reordering_before_attn"] = {}
    for function in [node for node in module.body if getattr(node, "name", "") in (ids, "by_rank")]:
        run(ast.FunctionDef(**{**vars(function), "decorator_list": []}), names)
    functions = []
    for group in (before, after):
        own = dict(names)
        for function in group:
            run(function, own)
        functions.append([own[function.name] for function in group])
    for cp in (1, 2, 4):
        for documents in ([1], [0, 3, 0, 0, 1, 2, 0], [2, 1, 1, 5, 0, 0]):
            offsets = torch.tensor(
                [0, *itertools.accumulate(2 * cp * n for n in documents)], dtype=torch.int32
            )
            x, seq_chunk_ids = torch.randn(int(offsets[-1]), 2), names[ids](cp, torch.device("cpu"))
            (to_ranks, back), (our_to_ranks, our_back) = functions
            assert torch.equal(to_ranks(x, offsets, cp), our_to_ranks(x, offsets, cp))
            assert torch.equal(
                back(x, offsets, seq_chunk_ids, cp), our_back(x, offsets, seq_chunk_ids, cp)
            )
    unreadable = [tensor.to("meta") for tensor in (x, offsets, seq_chunk_ids)]
    assert our_back(*unreadable, 4).shape == our_to_ranks(*unreadable[:2], 4).shape == x.shape
    patch._active = False  # With the patch undone, the patched functions do the same as before.
    reading = [(to_ranks, 2), (our_to_ranks, 2), (back, 3), (our_back, 3)]
    for function, count in reading:
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(*unreadable[:count], 4)
    patch._active = True


def run(statement, names):
    exec(compile(ast.Module([statement], []), "statement", "exec"), names)


def same_decision(patch, before, after):
    """Check that the patched comparison decides like torch.equal on tensors with the same memory.

    With context parallelism, tensors with different memory count as padded.
    """
    real, copy = torch.tensor([0, 4, 8]), torch.tensor([0, 4, 8])
    padded = torch.tensor([0, 6, 12])
    for padded_q, padded_kv, cp, expected in [
        (None, None, True, False),
        (real, real, True, False),
        (real.view(-1), real, True, False),
        (None, real, True, False),
        (padded, padded, True, True),
        (real, padded, True, True),
        (copy, copy, False, False),
        (padded, real, False, True),
        (copy, copy, True, "not known"),
    ]:
        results = []
        for code in (before, after):
            names = {
                "torch": torch,
                "_te_thd_patch": patch,
                "context_parallel": cp,
                "qkv_format": "thd",
                "pad_between_seqs": None,
                "cu_seqlens_q": real,
                "cu_seqlens_kv": real,
                "cu_seqlens_q_padded": padded_q,
                "cu_seqlens_kv_padded": padded_kv,
            }
            exec(code, names)
            results.append(names["pad_between_seqs"])
        assert results == ([False, True] if expected == "not known" else [expected, expected])


def same_gradients(patch, before, after):
    def names(device, total, mla):
        generator = torch.Generator().manual_seed(1)
        tensors = {name: torch.randn(6, 2, 3, generator=generator) for name in ("dq", "dk", "dv")}
        tensors["dkv"] = torch.randn(2, 6, 2, 3, generator=generator)
        offsets = torch.tensor([0, total // 2, total], dtype=torch.int32)
        tensors |= {
            "cu_seqlens_q_padded": offsets,
            "cu_seqlens_kv_padded": (offsets + 1).clamp(max=6),
        }
        ctx = SimpleNamespace(qkv_format="thd", use_fused_attention=False, enable_mla=mla)
        return {name: x.to(device) for name, x in tensors.items()} | {
            "ctx": ctx,
            "_te_thd_patch": patch,
        }

    for total in (0, 1, 4, 6):
        for mla in (False, True):
            old, new = names("cpu", total, mla), names("cpu", total, mla)
            exec(before, old)
            exec(after, new)
            for name in ("dq", "dk", "dv", "dkv"):
                assert torch.equal(old[name], new[name])
            assert (
                old["dq"][total:].count_nonzero()
                == 0
                < old["dq"][:total].count_nonzero() + (total == 0)
            )
    # Tensors on "meta" have no values, so an operation that reads one on the host fails.
    exec(after, names("meta", 4, True))
    with pytest.raises((RuntimeError, NotImplementedError)):
        exec(before, names("meta", 4, True))


HOST_READ = re.compile(
    r"torch\.(equal|nonzero|unique|masked_select)\(|torch\.arange\((?!cp_size,)|\.(item|tolist|cpu|nonzero)\(\)|_padded\[-1\]:|_kv\[-1\]:|_q\[-1\]:"
)
HELPERS_OF_DATA = {
    "pad_thd_sequences_for_cp",
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
}


def host_reads(tree, known):
    """Return the lines that read a tensor on the host.

    Functions that prepare batches, and functions that te_patches replaces completely, are left out.
    """
    nodes = [
        node
        for node in tree.body
        if getattr(node, "name", "") not in {*HELPERS_OF_DATA, *known.STAND_INS}
    ]
    return [
        line.strip()
        for node in nodes
        for line in ast.unparse(node).splitlines()
        if HOST_READ.search(line)
    ]


@pytest.fixture
def stand_in(known, monkeypatch):
    """Return te_thd_sources with the stand-in registered as release 2.5.99."""
    prints = tuple(
        known.fingerprint_of(STAND_IN[module], function_in(ast.parse(STAND_IN[module]), name))
        for name, module in known.FUNCTIONS.items()
    )
    monkeypatch.setitem(known.KNOWN, "2.5.99", prints)
    return known


def test_stand_in(patch, stand_in):
    check(patch, stand_in, "2.5.99", STAND_IN, CALLS["2.5.0"], reorders=True)
    trees, _ = stand_in.patched_trees("2.5.99+4ea4e8b", STAND_IN)  # version of a build from source
    assert host_reads(trees[BACKWARD_MODULE], stand_in) == ["ends = cu_seqlens.tolist()"]
    others = "return torch.equal(a, b) or a[b[-1]:].fill_(0)"
    assert host_reads(trees[FORWARD_MODULE], stand_in) == [
        others,
        "max_seqlen_q = cu_seqlens_q.max().item()",
    ]


@pytest.mark.parametrize(
    ("module", "old", "new", "why"),
    [
        (
            FORWARD_MODULE,
            "is not None",
            "is None",
            "DotProductAttention.forward is not that of this release",
        ),
        (
            FORWARD_MODULE,
            "# a comment, too, is fingerprinted",
            "",
            "DotProductAttention.forward is not that of this",
        ),
        (
            BACKWARD_MODULE,
            "dq[cu_seqlens_q_",
            "dq[cu_seqlens_kv_",
            "AttnFuncWithCPAndKVP2P.backward is not that of",
        ),
        (
            BACKWARD_MODULE,
            "def backward",
            "def back",
            "0 definitions of AttnFuncWithCPAndKVP2P.backward instead of",
        ),
        (BACKWARD_MODULE, "class Attn", "class BAttn", "0 definitions"),
    ],
)
def test_a_doctored_source_is_refused(stand_in, module, old, new, why):
    assert old in STAND_IN[module]
    with pytest.raises(stand_in.Refused, match=why):
        stand_in.patched_trees("2.5.99", STAND_IN | {module: STAND_IN[module].replace(old, new, 1)})


def test_white_space_and_code_around_may_differ(stand_in):
    sources = {
        module: "import os\n\n" + source.replace("  #", "\t #")
        for module, source in STAND_IN.items()
    }
    stand_in.patched_trees("2.5.99", sources)


@pytest.mark.parametrize("version", ["2.18.0", "2.18.0.dev0+1234567", "2.20.2", "3.0", "10.1.1"])
def test_versions_from_2_18_on_need_no_patch(known, version):
    with pytest.raises(known.Refused, match="it needs no patch"):
        known.patched_trees(version, STAND_IN)


@pytest.mark.parametrize(
    "version", ["1.13.0", "2.2.0", "2.8.1", "2.8", "2.8.0.dev0", "2.18rc1", "0+unknown", ""]
)
def test_unknown_versions_are_refused(known, version):
    with pytest.raises(
        known.Refused, match=r"this release is not known \(2\.3\.0, .* 2\.17\.1 are\)"
    ):
        known.patched_trees(version, STAND_IN)


def test_undone_helpers_do_what_the_statements_did(patch):
    patch._active = False
    with pytest.raises((RuntimeError, NotImplementedError)):
        patch.zero_tail(torch.zeros(4, device="meta"), torch.tensor([0, 2], device="meta")[-1], 0)
    gradient = torch.ones(2, 4, 3, dtype=torch.bfloat16)
    patch.zero_tail(gradient, torch.tensor(3), 1)
    assert gradient.sum() == 18 and gradient[:, 3].sum() == 0
    assert patch.equal(torch.tensor([0, 4]), torch.tensor([0, 4]), True)


def test_the_same_memory_is_equal_only_if_it_is_read_the_same_way(patch):
    offsets = torch.tensor([0, 4, 4, 4])
    assert patch.equal(offsets[:2], offsets.view(2, 2)[0], True)
    assert not patch.equal(offsets[:2], offsets[::2], True) and not patch.equal(
        offsets[:2], offsets[:3], True
    )


def test_rows_after_the_last_document_travel_and_come_back(patch):
    x, offsets = torch.arange(24), torch.tensor([0, 8, 8, 16], dtype=torch.int32)
    by_rank = patch.to_rank_order(x, offsets, 2)
    assert by_rank.tolist()[:12] == [0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23]
    assert torch.equal(patch.to_sequence_order(by_rank, offsets, None, 2), x)
    pack = torch.arange(48).view(2, 24)
    assert torch.equal(
        patch.to_rank_order(pack, offsets, 2, seq_dim=1), torch.stack([by_rank, by_rank + 24])
    )
    with pytest.raises(ValueError, match=r"22 packed rows are not divisible by 2 \* 2 \(cp_size\)"):
        patch.to_rank_order(x[:22], offsets, 2)


def test_it_stands_alone_and_is_small():
    texts = [path.read_text() for path in TE_PATCHES.glob("*.py")]
    assert sum(len(text.splitlines()) for text in texts) < 500  # lines as the formatter wraps them
    assert not any(re.search(r"(import|from) megatron_packed", text) for text in texts)


# --- Real releases.
# ---------------------------------------------------------------------------------------------------

RELEASES = ["2.3.0", "2.5.0", "2.8.0", "2.12.0", "2.17.1"]
FIXED = "2.18.0"


@pytest.fixture(scope="module")
def real_sources():
    """Download the sources of the real releases once.

    The tests are skipped if no package index is reachable.
    """
    try:
        te_real_sources.fetch_all([FIXED])
        te_real_sources.fetch_all(releases())
    except te_real_sources.Unreachable as error:
        pytest.skip(f"the real sources cannot be downloaded: {error}")
    return te_real_sources.sources


def releases():
    if os.environ.get("TE_PATCHES_RELEASES") != "all":
        return RELEASES
    text = (TE_PATCHES / "te_thd_sources.py").read_text()
    return " ".join(re.findall(r'^    "([\d.a-z ]+)": \("', text, re.MULTILINE)).split()


@pytest.mark.parametrize("version", releases())
def test_real_release(patch, known, real_sources, version):
    sources = real_sources(version)
    reorders = "reorder_seq_chunks_before_a2a_after_attn_thd" in sources[BACKWARD_MODULE]
    check(patch, known, version, sources, calls_in_backward(version), reorders)
    assert sorted(host_reads(ast.parse(sources[BACKWARD_MODULE]), known)) == sorted(
        calls_in_backward(version)
    )
    trees, _ = known.patched_trees(version, sources)
    assert host_reads(trees[BACKWARD_MODULE], known) == []
    longest = (
        "max_seqlen_q = int((seqlens_q",
        "max_seqlen_kv = int((seqlens_kv",
    )  # computed only if the caller passes no length
    assert all(line.startswith(longest) for line in host_reads(trees[FORWARD_MODULE], known))
    with pytest.raises(known.Refused, match="is not that of this release"):
        doctored = sources[BACKWARD_MODULE].replace(
            "dq[cu_seqlens_q_padded[-1]", "dq[cu_seqlens_kv_padded[-1]"
        )
        known.patched_trees(version, sources | {BACKWARD_MODULE: doctored})


def test_real_sources_of_2_18_are_refused_by_version_and_by_fingerprint(known, real_sources):
    sources = real_sources(FIXED)
    with pytest.raises(known.Refused, match="it needs no patch"):
        known.patched_trees(FIXED, sources)
    for version in ("2.3.0", "2.17.1"):
        with pytest.raises(known.Refused, match="is not that of this release"):
            known.patched_trees(version, sources)


def test_without_an_index_the_reason_is_said(monkeypatch, tmp_path):
    with socket.socket() as closed:
        # The socket is bound but does not listen, so connections are refused at once.
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        monkeypatch.setattr(te_real_sources, "CACHE", tmp_path)
        with pytest.raises(
            te_real_sources.Unreachable, match=r"pip could not download transformer-engine 2\.8\.0"
        ):
            te_real_sources.sources("2.8.0")
    assert list(tmp_path.iterdir()) == []
