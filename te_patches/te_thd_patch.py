"""Keeps TransformerEngine's context-parallel THD attention from waiting for the GPU, in releases
below 2.18.

Such a wait (a host sync) costs time in every layer and cannot be captured in a CUDA graph. On the
way of packed (THD) tokens through context-parallel attention, these functions have some:

* ``DotProductAttention.forward`` compares offsets with and without padding by ``torch.equal``, to
  find out whether documents are padded, if its caller does not say. `equal` stands in for that.
* ``AttnFuncWithCPAndKVP2P.backward`` slices gradients at ``cu_seqlens[-1]``, which is on the GPU,
  to fill what lies behind with zeros. `zero_tail` stands in for that.
* ``reorder_seq_chunks_*_thd``, from 2.10 on, put rows in order around an all-to-all by indices that
  they make from numbers read from the GPU, several for each document. `to_rank_order` and
  `to_sequence_order` stand in for them.

A finder in ``sys.meta_path`` waits for their modules. When the first is imported, both are read;
only if the release is a known one and the functions have its fingerprints (``te_thd_sources.py``),
both are compiled from syntax trees where that, and nothing else, is replaced. Otherwise their
import goes on as if nothing had been here. Either way one line on stderr says so. Bytecode caches
are neither read nor written. `undo` brings TransformerEngine's own statements back.

Nothing here imports torch or TransformerEngine; when an interpreter starts, ``importlib.machinery``
is all it needs.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # typing's own would be most of what an interpreter's start costs here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

    from torch import Tensor

    _Path = Sequence[str] | None

SWITCH = "MEGATRON_PACKED_TE_PATCHES"
_PACKAGE = "transformer_engine.pytorch.attention.dot_product_attention"
MODULES = (f"{_PACKAGE}.dot_product_attention", f"{_PACKAGE}.context_parallel")

_active = True


class Refused(Exception):
    """TransformerEngine stays as it is; the message ends the sentence '... is left untouched: '."""


def active() -> bool:
    """Whether patched functions do as this module says, or what they always did."""
    return _active


def equal(padded: Tensor, real: Tensor, context_parallel: bool) -> bool:
    """Whether two ``(num_seqs,)`` tensors of offsets are equal, as far as the host can tell without
    asking the GPU.

    The same memory is equal: the answer of ``torch.equal``. Of different memory the host cannot
    know, and the answer is no, as in TransformerEngine 2.18: documents then count as padded, which
    is right for both, while "equal" would be wrong for padded ones. Without context parallelism
    ``torch.equal`` answers, as before.
    """
    if _active and context_parallel:
        ours, theirs = (
            (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (padded, real)
        )
        return ours == theirs
    import torch

    return torch.equal(padded, real)


def zero_tail(gradient: Tensor, start: Tensor, dim: int) -> None:
    """Fills ``gradient``, in place, with zeros from position ``start``, ``()`` int32, of dimension
    ``dim`` on.

    The same bytes as slicing, whatever the offsets: positions are compared with ``start`` where
    both are, on the GPU. It passes over all of ``gradient`` once instead of over its tail: 2 bytes
    of traffic for each of its bytes.
    """
    if not _active:
        tail = gradient[start:] if dim == 0 else gradient[:, start:]
        tail.fill_(0)
        return
    import torch

    is_tail = torch.arange(gradient.shape[dim], device=gradient.device) >= start
    gradient.masked_fill_(is_tail.view(-1, *[1] * (gradient.dim() - dim - 1)), 0)


def to_rank_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0) -> Tensor:
    """Rows by document -> rows by rank: of every document, cut into 2c chunks, rank r has chunks r
    and 2c-1-r.
    """
    return x.index_select(seq_dim, _rank_order(x.shape[seq_dim], cu_seqlens, cp_size))


def to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, _: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """The way back; what is not read says which rank has which chunk, and that is always as above."""
    order = _rank_order(x.shape[seq_dim], cu_seqlens, cp_size)
    return x.index_select(seq_dim, order.argsort())


def _rank_order(total: int, cu_seqlens: Tensor, c: int) -> Tensor:
    """``(total,)`` rows of whole documents in the order of ranks.

    As many as there are rows: the host knows that, while the lengths of documents are on the GPU.
    The two agree if documents, with the padding in them, fill the rows; rows behind the last offset
    count as one more document.

    Args:
        cu_seqlens: ``(num_seqs + 1,)`` int32; lengths are multiples of 2c, 0 among them; c is the
            size of the group.

    Raises:
        ValueError: the number of rows is no multiple of 2c.
    """
    import torch

    if total % (2 * c):
        raise ValueError(
            f"{total} packed rows are not divisible by 2 * {c} (cp_size); pad documents to that"
        )
    ends = torch.cat([cu_seqlens.long(), cu_seqlens.new_full((1,), total).long()])
    row = torch.arange(total, device=ends.device)
    rank, row = row // (total // c), row % (total // c)  # of the rank's rows
    document = torch.searchsorted(ends[1:] // c, row, right=True)
    start, chunk = ends[document], (ends[document + 1] - ends[document]) // (2 * c)
    row = row - start // c  # of the rank's rows of the document
    second = row >= chunk
    return start + (rank + second * (2 * c - 1 - 2 * rank)) * chunk + row - second * chunk


class _PatchedLoader(SourceFileLoader):
    """Loads a module from code that was compiled beforehand, and gives it a name for this module."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_te_thd_patch"] = sys.modules[__name__]
        super().exec_module(module)


class _Finder:
    """Stands first in ``sys.meta_path`` and knows two names; where they lie it asks the finders
    behind it.
    """

    codes: dict[str, CodeType] | None = None
    """Module -> code; empty if TransformerEngine is left untouched, None as long as it was not
    imported.
    """

    def find_spec(
        self, name: str, path: _Path = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        if self.codes is None:
            self.codes = self._decide(path)
        spec = self._find(name, path, target)
        if spec is not None and spec.origin is not None and name in self.codes:
            spec.loader = _PatchedLoader(name, spec.origin, self.codes[name])
        return spec

    def _decide(self, path: _Path) -> dict[str, CodeType]:
        """Code of both modules or, where anything is not as known, of none; says which."""
        version = "(version unknown)"
        try:
            from importlib import metadata

            from te_thd_sources import patched_trees

            version = metadata.version("transformer_engine")
            files = {name: _file(name, self._find(name, path)) for name in MODULES}
            trees, done = patched_trees(
                version, {name: source for name, (_, source) in files.items()}
            )
            codes = {
                name: compile(trees[name], file, "exec", dont_inherit=True)
                for name, (file, _) in files.items()
            }
        except (
            Exception
        ) as error:  # whatever it is, it must not keep TransformerEngine from being imported
            reason = str(error) if isinstance(error, (Refused, ImportError)) else repr(error)
            _say(f"TransformerEngine {version} is left untouched: {reason}")
            return {}
        what = "host syncs of context-parallel THD attention replaced"
        _say(f"TransformerEngine {version}: {what}: {done}; {SWITCH}=0 leaves them")
        return codes

    def _find(self, name: str, path: _Path, target: ModuleType | None = None) -> ModuleSpec | None:
        others = [
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        ]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)


def _file(name: str, spec: ModuleSpec | None) -> tuple[str, str]:
    """Path and text of a module's source."""
    if spec is None:
        raise Refused(f"there is no {name}")
    if type(spec.loader) is not SourceFileLoader:
        raise Refused(
            f"{name} is not loaded from a plain source file but by {type(spec.loader).__name__}"
        )
    return spec.loader.path, spec.loader.get_source(name) or ""


_finder = _Finder()


def install() -> None:
    """Arms the patch; calling it again changes nothing, calling it after `undo` arms it again."""
    global _active
    _active = True
    if _finder in sys.meta_path:
        return
    if _finder.codes is None and any(name in sys.modules for name in MODULES):
        _say("TransformerEngine is left untouched: it was imported before this patch was installed")
        return
    sys.meta_path.insert(0, _finder)


def undo() -> None:
    """TransformerEngine behaves as without this folder from now on, whether it was imported already
    or not.
    """
    global _active
    _active = False
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if _finder.codes:
        _say("undone, TransformerEngine's own statements run again")


def _say(text: str) -> None:
    """One line on stderr, from the first process of each node alone."""
    if (
        os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
        or sys.stderr is None
    ):
        return
    try:
        print(f"te_patches: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # a closed stderr is no reason not to go on
        return
