"""Options of data: files of documents and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_packed.config.errors import Problem
from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.data_parts.files import FileOptions
from megatron_packed.config.sections.data_parts.tokenizer import TokenizerOptions


class DataConfig(  # dataclass fields follow the bases from right to left
    TokenizerOptions, FileOptions, title="data"
):
    """Options of training, validation and test documents, and of the tokenizer."""

    def rules(self, sound: Sound) -> Iterator[Problem]:
        yield from super().rules(sound)
        yield from self.file_rules(sound)
        yield from self.tokenizer_rules(sound)
        yield from self._chat_rules(sound)

    @property
    def hub_paths(self) -> list[str]:
        """Paths of data and tokenizer on the Hugging Face Hub."""
        blends = (self.train_blend, self.valid_blend, self.test_blend)
        paths = [*(path for blend in blends for path in blend.paths), self.tokenizer_model or ""]
        return [path for path in paths if is_hub_path(path)]

    def _chat_rules(self, sound: Sound) -> Iterator[Problem]:
        template, form = self.chat_template, self.sft_tokenizer_prompt_format
        if (
            template is not None
            and form not in (None, "default")
            and sound("sft_tokenizer_prompt_format")
        ):
            yield Problem(
                "--chat-template",
                template,
                f"contradicts --sft-tokenizer-prompt-format {form}, which defines its own format",
                "leave one of the two flags out",
            )
