"""Removal of host syncs from TransformerEngine's context-parallel THD attention, before release 2.18.

A host sync makes Python wait for the GPU. It costs time in every layer, and a CUDA graph cannot
capture it. Three functions of context-parallel attention with packed (THD) tokens have host syncs:

* ``DotProductAttention.forward`` compares offsets with and without padding by ``torch.equal``, to
  find out whether documents are padded. `equal` replaces this comparison.
* ``AttnFuncWithCPAndKVP2P.backward`` slices gradients at ``cu_seqlens[-1]``, a number on the GPU,
  and fills the rest with zeros. `zero_tail` replaces the slicing.
* ``reorder_seq_chunks_*_thd`` (release 2.10 and newer) reorder rows around an all-to-all. They
  read several numbers of each document from the GPU. `to_rank_order` and `to_sequence_order`
  replace them.

A finder in ``sys.meta_path`` waits until one of the two modules with these functions is imported.
It then reads both source files. If the release is known and the functions have its fingerprints
(``te_thd_sources.py``), both modules are compiled from syntax trees in which only the calls above
are replaced. Otherwise TransformerEngine is imported unchanged. One line on stderr reports which.
Bytecode caches are neither read nor written. `undo` restores TransformerEngine's own statements.

This module imports neither torch nor TransformerEngine. It runs at the start of each interpreter
and imports only ``importlib.machinery``.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # importing typing would take most of the start-up time of this module
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
    """Reason to leave TransformerEngine unchanged; it completes the line '... is left untouched: '."""


def active() -> bool:
    """Return whether patched functions run the replacements of this module."""
    return _active


def equal(padded: Tensor, real: Tensor, context_parallel: bool) -> bool:
    """Return whether two ``(num_seqs,)`` tensors of offsets are the same memory.

    ``torch.equal`` would make the host wait for the GPU. For different memory the result is False,
    as in TransformerEngine 2.18: documents then count as padded. That is correct for documents with
    and without padding, whereas True would be wrong for padded documents. Without context
    parallelism the result is that of ``torch.equal``.
    """
    if _active and context_parallel:
        ours, theirs = (
            (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (padded, real)
        )
        return ours == theirs
    import torch

    return torch.equal(padded, real)


def zero_tail(gradient: Tensor, start: Tensor, dim: int) -> None:
    """Fill ``gradient`` with zeros, in place, from position ``start`` (``()`` int32) of ``dim`` on.

    The result has the same bytes as slicing. The GPU compares each position with ``start``, so the
    host does not need the number. The kernel reads and writes all of ``gradient``, not only the
    tail.
    """
    if not _active:
        tail = gradient[start:] if dim == 0 else gradient[:, start:]
        tail.fill_(0)
        return
    import torch

    is_tail = torch.arange(gradient.shape[dim], device=gradient.device) >= start
    gradient.masked_fill_(is_tail.view(-1, *[1] * (gradient.dim() - dim - 1)), 0)


def to_rank_order(x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0) -> Tensor:
    """Reorder rows from document order to rank order.

    Each document is cut into 2c chunks (c: ``cp_size``). Rank r holds chunks r and 2c-1-r.
    """
    return x.index_select(seq_dim, _rank_order(x.shape[seq_dim], cu_seqlens, cp_size))


def to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, _: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Reorder rows from rank order back to document order.

    TransformerEngine passes the assignment of chunks to ranks as third argument. It is not read,
    because the assignment is always that of `to_rank_order`.
    """
    order = _rank_order(x.shape[seq_dim], cu_seqlens, cp_size)
    return x.index_select(seq_dim, order.argsort())


def _rank_order(total: int, cu_seqlens: Tensor, c: int) -> Tensor:
    """Return the ``(total,)`` row numbers of whole documents in the order of ranks.

    ``total`` comes from the shape of the rows, which the host knows. The lengths of the documents
    stay on the GPU. Rows after the last offset count as one more document.

    Args:
        cu_seqlens: ``(num_seqs + 1,)`` int32. Document lengths are multiples of 2c and may be 0.
        c: size of the context-parallel group.

    Raises:
        ValueError: the number of rows is not a multiple of 2c.
    """
    import torch

    if total % (2 * c):
        raise ValueError(
            f"{total} packed rows are not divisible by 2 * {c} (cp_size); pad documents to that"
        )
    ends = torch.cat([cu_seqlens.long(), cu_seqlens.new_full((1,), total).long()])
    row = torch.arange(total, device=ends.device)
    rank, row = row // (total // c), row % (total // c)  # row number within the rank
    document = torch.searchsorted(ends[1:] // c, row, right=True)
    start, chunk = ends[document], (ends[document + 1] - ends[document]) // (2 * c)
    row = row - start // c  # row number within the rank's part of the document
    second = row >= chunk
    return start + (rank + second * (2 * c - 1 - 2 * rank)) * chunk + row - second * chunk


class _PatchedLoader(SourceFileLoader):
    """Loader that runs the compiled code of a patched module.

    The code refers to ``te_thd_patch`` as ``_te_thd_patch``.
    """

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_te_thd_patch"] = sys.modules[__name__]
        super().exec_module(module)


class _Finder:
    """First finder in ``sys.meta_path``; it handles the two modules of ``MODULES``.

    The other finders locate the source files.
    """

    codes: dict[str, CodeType] | None = None
    """Code of each patched module: empty if TransformerEngine is left untouched, None before it is
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
        """Return the code of both modules, or nothing if a check fails; report which on stderr."""
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
        ) as error:  # no error of the patch may prevent the import of TransformerEngine
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
    """Return path and text of a module's source file."""
    if spec is None:
        raise Refused(f"there is no {name}")
    if type(spec.loader) is not SourceFileLoader:
        raise Refused(
            f"{name} is not loaded from a plain source file but by {type(spec.loader).__name__}"
        )
    return spec.loader.path, spec.loader.get_source(name) or ""


_finder = _Finder()


def install() -> None:
    """Install the patch. A second call has no effect; a call after `undo` installs it again."""
    global _active
    _active = True
    if _finder in sys.meta_path:
        return
    if _finder.codes is None and any(name in sys.modules for name in MODULES):
        _say("TransformerEngine is left untouched: it was imported before this patch was installed")
        return
    sys.meta_path.insert(0, _finder)


def undo() -> None:
    """Remove the patch: TransformerEngine runs its own statements, imported already or not."""
    global _active
    _active = False
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if _finder.codes:
        _say("undone, TransformerEngine's own statements run again")


def _say(text: str) -> None:
    """Print one line on stderr, only in the first process of each node."""
    if (
        os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"
        or sys.stderr is None
    ):
        return
    try:
        print(f"te_patches: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # stderr is closed: the program continues without the line
        return
