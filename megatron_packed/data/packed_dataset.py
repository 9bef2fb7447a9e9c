"""Packs of documents as a `torch.utils.data.IterableDataset`, for any PyTorch trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from megatron_packed.config.data_fields import fields_from
from megatron_packed.config.sections.data_parts.tokenizer import (
    AT_TURN,
    DATA_RULES,
    EACH_ANSWER,
    REFUSED,
)
from megatron_packed.data.documents import Documents
from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import collate
from megatron_packed.data.packed_dataset_checks import (
    CutRules,
    Data,
    check_pack_sizes,
    check_run,
)
from megatron_packed.data.packed_dataset_sources import (
    ConversationOptions,
    ReadingOptions,
    joined,
    open_sources,
)
from megatron_packed.data.packing.packer import Packer, Packs, check_integers
from megatron_packed.data.packing.pieces import cut_documents
from megatron_packed.data.packing.step_plan import PieceTable
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.files.regular_files import StrPath
from megatron_packed.packed.micro_batch import MicroBatch


class PackedDataset(IterableDataset[MicroBatch]):
    """Packs of one epoch of tokenised documents, as `MicroBatch` values on the host.

    The documents are tokenised once and cached on disk. The packer then decides which documents
    share a pack. Its decision depends only on the documents, the options, the seed and the epoch.
    Every pack has ``tokens_per_pack`` token slots and ``max_documents + 2`` entries in
    ``cu_seqlens``.

    One iteration yields one epoch; `set_epoch` selects the next one. Each document, or piece of a
    long document, is in exactly one pack of an epoch. The packs are distributed over ranks and
    DataLoader workers, and each pack is yielded by exactly one of them. A rank's packs and their
    order do not depend on ``num_workers``.

    Pass ``batch_size=None`` to the DataLoader, because each item is a pack already. Leave
    ``persistent_workers`` off, because persistent workers do not see `set_epoch`.

    Args:
        data: paths of files to read: JSONL, JSON arrays or Parquet, directories or patterns of
            them, Hugging Face data sets on disk, or prefixes of Megatron-LM's indexed data sets. Or
            records: a list, an iterator or a data set of Hugging Face's ``datasets``. A record is a
            dict with the fields of a line of such a file, for example ``messages`` or ``text``, or
            a list of token ids. Every rank must get the same records. An iterator is read once.
        tokenizer: a `Tokenizer`, or the path of a ``tokenizer.json`` or of the directory that
            contains it.
        tokens_per_pack: token slots T of a pack.
        max_documents: maximum number of documents in a pack. None uses the largest number in a pack
            of the first epoch, for all epochs.
        texts: strings of ``data`` are texts. By default strings are paths.
        sft: the lines are conversations or prompts with answers, and only the answers are targets.
        chat_template: jinja2 file of a chat template, or ``chatml``; None uses the tokenizer's own
            template. Requires ``sft``.
        answer_end: last token of a conversation: ``turn`` or ``document``, as ``--answer-end``.
            States saved by earlier versions with ``sft`` need ``document``.
        multi_turn: ``each`` or ``last``, as ``--multi-turn``.
        unprinted_policy: ``refuse`` or ``count``, as ``--unprinted-policy``.
        special_tokens_in_text: None, ``letters`` or ``tokens``, as ``--special-tokens-in-text``.
        chat_template_date: date for chat templates that print it, such as ``2026-11-28``.
        chat_template_kwargs: variables of the chat template, such as ``{"enable_thinking": False}``.
        data_rules: 1 uses the tokens that an earlier version left in the cache, as
            ``--data-rules``, so that its saved states can be loaded.
        max_document_length: maximum length of a document, or of a piece of a document, in tokens;
            None for ``tokens_per_pack``.
        overlong_policy: handling of longer documents: ``split``, ``truncate``, ``drop``, ``error``,
            or with ``sft`` also ``truncate_prompt``. None means ``truncate_prompt`` with ``sft``
            and ``split`` without ``sft``.
        packing_method: ``balanced``, ``best_fit_decreasing`` or ``sequential``.
        seed: seed of the document order.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        drop_last: handling of the last packs of an epoch if the number of packs is not divisible by
            ``world_size``. True drops these packs. False gives every rank without a pack in the
            last round a pack without documents, so that all ranks yield the same number of packs.
        fixed_max_seqlen: report ``tokens_per_pack`` as ``max_seqlen`` of every pack, as CUDA graphs
            need it; False reports the longest row of each pack.
        max_bad_fraction: largest share of unusable lines, from 0 to 1, before an error is raised.
        data_fields: names of the fields of the lines, as in ``--data-fields``: ``{"prompt":
            "question", "completion": "answers.text"}``. None for the usual names.
        cache_dir: directory of the tokenised data and of the records; None for
            ``.megatron_packed_cache`` next to the first file, or for records in the current
            directory.
        show_progress: print the progress and the warnings of tokenisation and packing.
    Raises:
        DataError: the files, the records or the tokenizer cannot be used, or no document is left
            to pack.
        ValueError: an option has a wrong value.
    """

    max_documents: int
    """Capacity of every pack in documents; ``cu_seqlens`` has two entries more."""
    epoch = 0
    """Epoch that the next iteration yields."""
    _start = 0
    """Packs of the epoch, over all ranks, that the next iteration skips."""
    _position: int | None = None
    """Packs of the epoch, over all ranks, that this process has yielded; None before the first."""

    def __init__(
        self,
        data: Data,
        tokenizer: Tokenizer | StrPath,
        *,
        tokens_per_pack: int,
        max_documents: int | None = None,
        texts: bool = False,
        sft: bool = False,
        chat_template: StrPath | None = None,
        answer_end: str = AT_TURN,
        multi_turn: str = EACH_ANSWER,
        unprinted_policy: str = REFUSED,
        special_tokens_in_text: str | None = None,
        chat_template_date: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        data_rules: int = DATA_RULES,
        max_document_length: int | None = None,
        overlong_policy: str | None = None,
        packing_method: str = "balanced",
        seed: int = 1234,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        fixed_max_seqlen: bool = False,
        max_bad_fraction: float = 0.01,
        data_fields: Mapping[str, str] | None = None,
        cache_dir: StrPath | None = None,
        show_progress: bool = True,
    ) -> None:
        check_pack_sizes(tokens_per_pack, max_documents, max_document_length)
        check_run(seed, rank, world_size)
        cut = CutRules.from_options(tokens_per_pack, max_document_length, overlong_policy, sft)
        conversations = ConversationOptions(
            sft=sft,
            chat_template=chat_template,
            answer_end=answer_end,
            multi_turn=multi_turn,
            unprinted_policy=unprinted_policy,
            special_tokens_in_text=special_tokens_in_text,
            chat_template_date=chat_template_date,
            chat_template_kwargs=chat_template_kwargs,
            data_rules=data_rules,
        )
        reading = ReadingOptions(
            texts=texts,
            shorten_to=cut.shorten_to,
            max_bad_fraction=max_bad_fraction,
            fields=fields_from(data_fields),
            cache_dir=cache_dir,
            show=show_progress,
        )
        packer = Packer(slots=tokens_per_pack, method=packing_method, max_documents=max_documents)
        self.tokens_per_pack = tokens_per_pack
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.fixed_max_seqlen = fixed_max_seqlen
        self._sources = open_sources(data, tokenizer, conversations, reading)
        self._documents: Documents | None = joined(self._sources)
        self._table = _piece_table(self._documents, packer, cut, seed, show_progress)
        self._packs = self._table.pack(0)
        self.max_documents = max_documents or self._limit_documents(packer)
        self._hash = _hash_of(self._documents, self._table)

    def _limit_documents(self, packer: Packer) -> int:
        """Return the largest number of documents in a pack of the first epoch.

        All epochs have the same capacity, so this number also limits the packs of later epochs.
        """
        most = int(self._packs.documents_per_pack.max())
        self._table.packer = packer.keeping_to(most)
        return most

    def __len__(self) -> int:
        """Return the number of packs that the next iteration yields on this rank."""
        left = max(len(self._packs) - self._start, 0)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        self._position = self._start
        place = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._iterate(*place, self._packs, self._start, len(self))

    def _iterate(
        self, worker: int, num_workers: int, packs: Packs, first: int, count: int
    ) -> Iterator[MicroBatch]:
        """Yield every ``num_workers``-th of the ``count`` packs of this rank after ``first``."""
        for number in range(worker, count, num_workers):
            pack = self._pack(packs, first + number * self.world_size + self.rank)
            # Each worker saves its own position. After a resume, packs are dealt from that
            # position, beginning with worker 0. So the position counts complete rounds over all
            # workers and does not depend on the number of this worker.
            num_packs = number - worker + num_workers
            if packs is self._packs:  # set_epoch has not selected another epoch meanwhile
                self._position = min(first + num_packs * self.world_size, len(packs))
            yield pack

    def _pack(self, packs: Packs, number: int) -> MicroBatch:
        """Return a pack of the epoch, or a pack without documents if ``number`` is not below the
        number of packs."""
        assert self._documents is not None
        return collate(
            self._documents,
            self._table.pieces,
            packs[number] if number < len(packs) else [],
            total_tokens=self.tokens_per_pack,
            capacity=self.max_documents,
            max_seqlen=self.tokens_per_pack if self.fixed_max_seqlen else None,
        )

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next iteration; epochs differ in their documents' order and packs.

        The epoch of a loaded state continues at the position of that state. Every other epoch
        begins with its first pack.

        An iteration that has begun continues with its own epoch.

        Raises:
            ValueError: the epoch is negative or not an integer.
        """
        check_integers(epoch=epoch)
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; the first epoch is 0.")
        if epoch != self.epoch:
            self._move_to(epoch, 0)

    def state_dict(self, packs_taken: int | None = None) -> dict[str, Any]:
        """Return the position in the data, as plain values.

        A job with another number of ranks or DataLoader workers can continue from this position.

        Args:
            packs_taken: number of packs that this rank has received from its DataLoader in this
                iteration. Required with DataLoader workers, because each worker iterates over a
                copy of the dataset. None uses the number of packs that this process has yielded.
        Raises:
            ValueError: ``packs_taken`` is None, and this process has not iterated over the dataset; or
                ``packs_taken`` is not a number of packs of this iteration.
        """
        if packs_taken is not None:
            check_integers(packs_taken=packs_taken)
            if not 0 <= packs_taken <= len(self):
                raise ValueError(
                    f"packs_taken is {packs_taken}, but this iteration has {len(self)} packs on this rank; count the "
                    "packs from the beginning of the iteration."
                )
            position = min(self._start + packs_taken * self.world_size, len(self._packs))
        elif self._position is not None:
            position = self._position
        else:
            raise ValueError(
                "this process has not iterated over the dataset, so it has no position to save; call "
                "state_dict(packs_taken) with the number of packs that this rank has received from its DataLoader."
            )
        return {"epoch": self.epoch, "packs": position, "hash": self._hash}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a `state_dict`; the next iteration yields the rest of its
        epoch.

        Raises:
            ValueError: the state was saved with other data, another tokenizer, or other packing
                options; or it is no state of a `PackedDataset`.
        """
        if not isinstance(state, Mapping) or not {"epoch", "packs", "hash"} <= set(state):
            raise ValueError("the state is not a state_dict() of a PackedDataset; pass one.")
        if state["hash"] != self._hash:
            raise ValueError(
                "the state belongs to other packs: the data, the tokenizer, the seed or a packing option has "
                "changed. Restore it, or begin an epoch by set_epoch."
            )
        self._move_to(int(state["epoch"]), int(state["packs"]))

    def sentences(self) -> list[str]:
        """Return a report of the data as lines of text: counts of lines, tokens and targets."""
        assert self._documents is not None
        return [*self._documents.sentences(), *self._table.pieces.sentences()]

    def _move_to(self, epoch: int, packs: int) -> None:
        if epoch != self.epoch:
            self._packs = self._table.pack(epoch)
        self.epoch = epoch
        self._start = packs
        self._position = None

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker gets a pickle of this object. The pickle of a memory map would contain
        # its data, so the documents are left out and each process opens the files again.
        return {**self.__dict__, "_documents": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._documents = joined(self._sources)


def _hash_of(documents: Documents, table: PieceTable) -> str:
    """Return a hash of the documents and of the packs, which a saved state must have too."""
    identity = f"{documents.content_hash} {table.hash}"
    return hashlib.sha256(identity.encode()).hexdigest()


def _piece_table(
    documents: Documents, packer: Packer, cut: CutRules, seed: int, show: bool
) -> PieceTable:
    """Cut the documents into pieces that fit into packs.

    Raises:
        DataError: no target is left, or a document is too long under the policy ``error``.
    """
    pieces, targets = cut_documents(documents, cut.longest, cut.policy, only_with_targets=cut.sft)
    assert pieces.targets is not None
    if not pieces.targets.targets_kept:
        raise DataError(
            f"the data has no target left: {pieces.targets.sentence().rstrip('.')} (max_document_length {cut.longest}, "
            f"overlong_policy {cut.policy}); raise max_document_length, or give documents with answers."
        )
    return PieceTable(
        pieces, targets, packer=packer, packs_per_step=1, seed=seed, show_progress=show
    )
