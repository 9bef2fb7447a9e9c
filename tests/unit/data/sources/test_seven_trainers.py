"""Lines in the formats of seven trainers, each with the texts that its trainer learns.

``seven_trainers.jsonl`` has one object for each line: ``trainer`` and ``rule`` name the rule, ``line``
is the line, and ``learned`` lists the texts that the trainer learns, written by hand. ``refused`` is
the reason for a line that SFT cannot learn as its trainer would. ``unread`` lists the fields that the
report names as not read.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_packed.data.errors import BadLine
from megatron_packed.data.tokenizers.chat_format import chat_format
from megatron_packed.data.tokenizers.encode import SampleEncoder
from support.data_helpers import byte_level, samples_of, save_tokenizer

ROWS = [
    json.loads(line)
    for line in Path(__file__)
    .with_name("seven_trainers.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
CHATML_WITH_TOOLS = """\
{%- if tools -%}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function or call -%}
    {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
    {{- function.arguments | tojson + '}\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml")
    engine = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer = save_tokenizer(folder / "tokenizer", engine, eos_token="<|endoftext|>")
    template = folder / "chatml.jinja"
    template.write_text(CHATML_WITH_TOOLS, encoding="utf-8")
    chat = chat_format(tokenizer, template)
    yield SampleEncoder(tokenizer=tokenizer, chat=chat)
    chat.close()


def learned_texts(encoder: SampleEncoder, documents) -> list[str]:
    """Return the text of each run of targets."""
    texts = []
    for document in documents:
        run: list[int] = []
        for token, target in [*zip(document.ids, document.targets), (0, 0)]:
            if target:
                run.append(token)
            elif run:
                texts.append(encoder.tokenizer.decode(run))
                run = []
    return texts


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['trainer']}: {row['rule']}"[:70] for row in ROWS])
def test_line_is_learned_as_its_trainer_learns_it(row, encoder) -> None:
    notes: Counter[tuple[str, str]] = Counter()
    try:
        samples = samples_of(row["line"], None, notes)
        [encoded] = encoder.encode([samples])
        if isinstance(encoded, BadLine):
            raise encoded
    except BadLine as bad:
        assert bad.reason == row.get("refused"), bad
        return
    assert learned_texts(encoder, encoded.documents) == row.get("learned", "to be refused")
    assert notes + encoded.notes == {("unread_field", name): 1 for name in row.get("unread", [])}


def test_table_has_seven_trainers() -> None:
    assert len(ROWS) >= 30
    assert len({row["trainer"] for row in ROWS}) == 8  # Axolotl, ..., and OpenAI's own service
    assert all(("learned" in row) != ("refused" in row) for row in ROWS)
