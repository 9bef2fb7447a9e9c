"""Reading and writing of Megatron-LM's indexed data sets, pairs of a ``.bin`` and an ``.idx`` file."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.data.index.indexed_documents import IndexedDocuments as IndexedDocuments
    from megatron_packed.data.index.indexed_file import IndexedFile as IndexedFile
    from megatron_packed.data.index.indexed_writer import IndexedWriter as IndexedWriter
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "indexed_documents": ["IndexedDocuments"],
            "indexed_file": ["IndexedFile"],
            "indexed_writer": ["IndexedWriter"],
        },
    )
