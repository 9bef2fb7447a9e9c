"""Options of data: files of documents and their tokenizer."""

from __future__ import annotations

from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.sections.data_parts.files import FileOptions
from megatron_packed.config.sections.data_parts.tokenizer import TokenizerOptions


class DataConfig(  # dataclass fields follow the bases from right to left
    TokenizerOptions, FileOptions, title="data"
):
    """Options of training, validation and test documents, and of the tokenizer."""

    @property
    def hub_paths(self) -> list[str]:
        """Paths of data and tokenizer on the Hugging Face Hub."""
        blends = (self.train_blend, self.valid_blend, self.test_blend)
        paths = [*(path for blend in blends for path in blend.paths), self.tokenizer_model or ""]
        return [path for path in paths if is_hub_path(path)]
