"""Options of the tokenizer and of the format of conversations, and the rules between them."""

from __future__ import annotations

import json
from datetime import date
from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, option_is
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.options import Related, Stored, derived_option, option
from megatron_packed.config.section import Section, Sound

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

HUGGING_FACE, BYTES, TRAINED_BPE = "HuggingFaceTokenizer", "ByteTokenizer", "TrainedBPETokenizer"
GPT2, TIKTOKEN, SENTENCEPIECE = "GPT2BPETokenizer", "TikTokenizer", "SentencePieceTokenizer"
NULL = "NullTokenizer"
MODEL_FILES = {
    HUGGING_FACE: "a tokenizer.json or its directory",
    TIKTOKEN: "a vocabulary of tiktoken",
    SENTENCEPIECE: "a SentencePiece .model",
}
"""Kind of file that --tokenizer-model names, by tokenizer type."""
ANSWER_ENDS = AT_TURN, AT_DOCUMENT = "turn", "document"
"""Values of --answer-end."""
MULTI_TURN = EACH_ANSWER, LAST_ANSWER = "each", "last"
"""Values of --multi-turn."""
UNPRINTED_POLICIES = REFUSED, COUNTED = "refuse", "count"
"""Values of --unprinted-policy."""
SPECIAL_IN_TEXT = LETTERS, TOKENS = "letters", "tokens"
"""Values of --special-tokens-in-text."""
EARLIER_RULES, DATA_RULES = 1, 2
"""Values of --data-rules: rules before answers were learned with their history as served, and today's
rules."""
CHAT_TEMPLATES = ("chatml",)
"""Names of built-in chat templates."""
PROMPT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")
"""Prompt formats of Megatron's SFTTokenizer."""
_TIKTOKEN_NEEDS = ("<unk>", "<s>", "</s>")
_CONVERT = f"convert it to a tokenizer.json and give {HUGGING_FACE}"
_NOT_BUILT = {
    **dict.fromkeys(("BertWordPieceLowerCase", "BertWordPieceCase"), _CONVERT),
    "MultimodalTokenizer": f"models read text only: give {HUGGING_FACE}",
    "NullMultimodalTokenizer": f"models read text only: give {NULL}",
}


_RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


def is_date(text: str) -> bool:
    """Return True if a text is a date of the form YYYY-MM-DD."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except (TypeError, ValueError):
        return False


def template_kwargs_fault(text: str) -> str | None:
    """Return why a text cannot be variables of a chat template; None if it can."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return "is no JSON object"
    reserved = sorted(_RESERVED_KWARGS & value.keys())
    return f"names {' and '.join(reserved)}, which each conversation sets" if reserved else None


GPT2_FILE = Related("tokenizer_type", "another type does not use this file", value=GPT2)
CONVERSATIONS = "it applies to conversations only"
TEXT = Condition("--mock-data reads no text", lambda run, processes: not run.data.mock_data)
TURNS = Condition("--sft is not given, and text has no turns", lambda run, processes: run.data.sft)
SERVED_HISTORY = Condition(
    "--sft-tokenizer-prompt-format makes one document of a conversation",
    lambda run, processes: run.data.sft_tokenizer_prompt_format is None,
)


def _earlier_answer_end(stored: Stored) -> str:
    """Return the end of conversations in runs before ``--answer-end`` existed."""
    data = stored["data"]
    templated = data.get("sft", False) and data.get("sft_tokenizer_prompt_format") is None
    return AT_DOCUMENT if templated else AT_TURN


def _earlier_data_rules(stored: Stored) -> int:
    """Return the rules of runs before ``--data-rules`` existed; text has the same tokens."""
    return EARLIER_RULES if stored["data"].get("sft", False) else DATA_RULES


class TokenizerOptions(Section, group="tokenizer"):
    """Tokenizer, chat template and prompt format."""

    tokenizer_type: str = derived_option(
        "Tokenizer type. ByteTokenizer uses bytes as tokens, NullTokenizer reads text of token "
        "numbers, and TrainedBPETokenizer trains a BPE on the training data. The other types "
        "read --tokenizer-model, and GPT2BPETokenizer reads --vocab-file and --merge-file.",
        choices=(HUGGING_FACE, GPT2, TIKTOKEN, SENTENCEPIECE, BYTES, NULL, TRAINED_BPE),
        value_aliases={
            "SFTTokenizer": HUGGING_FACE,
            "GPTSentencePieceTokenizer": SENTENCEPIECE,
            "Llama2Tokenizer": SENTENCEPIECE,
        },
        not_built=_NOT_BUILT,
        derived=f"{GPT2} with --vocab-file or --merge-file, else {BYTES}",
        derive=lambda data: BYTES if data.vocab_file is data.merge_file is None else GPT2,
        derived_from=("vocab_file", "merge_file"),
        megatron=(
            f"{GPT2} in its training scripts, else none: required",
            "a byte tokenizer needs no file",
        ),
        resume="tokenizer name",
    )
    tokenizer_model: str | None = option(
        None,
        "Path of a tokenizer.json or of its directory, of the vocabulary of a TikTokenizer "
        "(JSON or .tiktoken), or of the .model file of a SentencePieceTokenizer.",
        path="input_file",
        resume="tokenizer name",
    )
    vocab_file: str | None = option(
        None,
        f"Path of the vocab.json of a {GPT2}.",
        path="input_file",
        resume="tokenizer name",
        required_with=GPT2_FILE,
        needs=GPT2_FILE,
    )
    merge_file: str | None = option(
        None,
        f"Path of the merges.txt of a {GPT2}.",
        path="input_file",
        resume="tokenizer name",
        required_with=GPT2_FILE,
        needs=GPT2_FILE,
    )
    tokenizer_vocab_size: int = option(
        4096,
        "Vocabulary size of a TrainedBPETokenizer.",
        unit="tokens",
        minimum=260,
        maximum=1 << 20,
        only_if=option_is("data.tokenizer_type", TRAINED_BPE),
        resume="tokenizer name",
    )
    padded_vocab_size: int | None = option(
        None,
        "Size that the vocabulary must have after padding; the run ends before its first step if "
        "it has another one.",
        unit="tokens",
        minimum=2,
        megatron=("pads the vocabulary to it", "--make-vocab-size-divisible-by sets the padding"),
    )
    tokenizer_special_tokens: tuple[str, ...] = option(
        (),
        "Names of special tokens: the first ones of a TikTokenizer (<unk> <s> </s> <mask> <pad> "
        "<cls> <sep> when not given), or additional ones of a SentencePieceTokenizer.",
        aliases=("tiktoken-special-tokens",),
        resume="tokenizer",
    )
    tiktoken_num_special_tokens: int = option(
        1000,
        "Number of special tokens of a TikTokenizer. They come before its vocabulary; tokens "
        "without a name are called <SPECIAL_n>.",
        unit="tokens",
        minimum=3,
        maximum=1 << 20,
        only_if=option_is("data.tokenizer_type", TIKTOKEN),
        resume="tokenizer",
    )
    tiktoken_pattern: str = option(
        "v2",
        "Version of the pattern by which a TikTokenizer splits text before it merges bytes.",
        choices=("v1", "v2"),
        only_if=option_is("data.tokenizer_type", TIKTOKEN),
        resume="tokenizer",
    )
    null_tokenizer_eod_id: int | None = option(
        None,
        "Number of the end-of-document token of a NullTokenizer; the last token of --vocab-size "
        "when not given.",
        minimum=0,
        resume="tokenizer",
    )
    sft_tokenizer_prompt_format: str | None = option(
        None,
        "Megatron prompt format for the tokens and targets of a conversation. When not given, "
        "the chat template is used and the assistant's answers are the targets.",
        choices=PROMPT_FORMATS,
        megatron=(
            "nemotron-h-aligned",
            "a model is trained for the chat template of its tokenizer",
        ),
        only_if=TEXT,
        resume="chat",
        needs=Related("sft", CONVERSATIONS),
    )
    chat_template: str | None = option(
        None,
        f"Chat template: a jinja2 file, or {' or '.join(CHAT_TEMPLATES)}; the template of the "
        "tokenizer when not given.",
        only_if=TEXT,
        resume="chat",
        needs=Related("sft", CONVERSATIONS),
    )
    answer_end: str = option(
        AT_TURN,
        "End of a conversation with a chat template. With turn, the end of the last learned turn "
        "is the last token. With document, an end-of-document token is learned after this turn, "
        "as in checkpoints without this option.",
        choices=ANSWER_ENDS,
        only_if=TEXT,
        resume="chat",
        earlier=_earlier_answer_end,
        needs=Related("sft", CONVERSATIONS),
        excludes=Related("sft_tokenizer_prompt_format", "it adds no end of a document"),
    )
    multi_turn: str = option(
        EACH_ANSWER,
        "Documents of a conversation whose chat template prints earlier turns in another way than "
        "it prints them when they are served, as templates that drop earlier thoughts. With each, "
        "every answer is learned, with its history as served, in as few documents as possible. "
        "With last, only the last one of these documents is used.",
        choices=MULTI_TURN,
        only_if=(TEXT, TURNS, SERVED_HISTORY),
        resume="chat",
    )
    unprinted_policy: str = option(
        REFUSED,
        "Policy for a conversation with tools, calls, results, a system message or reasoning that "
        "its chat template does not print. With refuse, its line is unusable. With count, the line "
        "is used without the part, and the report counts it.",
        choices=UNPRINTED_POLICIES,
        only_if=(TEXT, TURNS),
        resume="chat",
    )
    special_tokens_in_text: str | None = option(
        None,
        "Encoding of special tokens that a text, prompt or completion spells: as letters, or as "
        "the tokens. When not given, they are letters, and data of which more than "
        "--max-bad-fraction of the lines spell turn markers is refused.",
        choices=SPECIAL_IN_TEXT,
        only_if=TEXT,
        resume="chat",
    )
    chat_template_date: str | None = option(
        None,
        "Date that a chat template gets when it asks for today's date, as 2026-11-28; none when "
        "not given, so that the same data has the same tokens every day.",
        only_if=(TEXT, TURNS),
        resume="chat",
    )
    chat_template_kwargs: str | None = option(
        None,
        "Variables of the chat template as a JSON object, as in '{\"enable_thinking\": false}'.",
        only_if=(TEXT, TURNS),
        resume="chat",
    )
    data_rules: int = option(
        DATA_RULES,
        "Version of the rules by which lines with answers become tokens. With 1, a run uses the "
        "tokens that an earlier version left in the cache, if there are any. Checkpoints of "
        "earlier versions set it, so that their runs go on.",
        minimum=EARLIER_RULES,
        maximum=DATA_RULES,
        only_if=(TEXT, TURNS),
        resume="data",
        earlier=_earlier_data_rules,
    )

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        if sound("tokenizer_type", "tokenizer_model"):
            wanted = MODEL_FILES.get(self.tokenizer_type)
            if wanted is not None and self.tokenizer_model is None:
                yield Problem(
                    "--tokenizer-model",
                    "",
                    f"is required with --tokenizer-type {self.tokenizer_type}",
                    f"give the path of {wanted}",
                )
            elif wanted is None and self.tokenizer_model is not None:
                yield self.problem(
                    "tokenizer_model",
                    f"{self.tokenizer_type} does not use a model file",
                    f"leave it out, or give --tokenizer-type {', '.join(MODEL_FILES)}",
                )
        template_date = self.chat_template_date
        if template_date is not None and sound("chat_template_date") and not is_date(template_date):
            yield self.problem(
                "chat_template_date",
                "is no date of the form YYYY-MM-DD",
                "give, for example, 2026-11-28",
            )
        kwargs = self.chat_template_kwargs
        fault = None if kwargs is None else template_kwargs_fault(kwargs)
        if fault is not None and sound("chat_template_kwargs"):
            yield Problem(
                "--chat-template-kwargs",
                str(kwargs),
                fault,
                """give, for example, '{"enable_thinking": false}'""",
            )
        if sound("tokenizer_type", "tokenizer_special_tokens", "tiktoken_num_special_tokens"):
            yield from self._special_token_rules()

        template, form = self.chat_template, self.sft_tokenizer_prompt_format
        own_format = sound("sft_tokenizer_prompt_format") and form not in (None, "default")
        if template is not None and own_format:
            yield self.problem(
                "chat_template",
                f"contradicts --sft-tokenizer-prompt-format {form}, which defines its own format",
                "leave one of the two flags out",
            )

    def _special_token_rules(self) -> Problems:
        option, named = "tokenizer_special_tokens", self.tokenizer_special_tokens
        if named and self.tokenizer_type not in (TIKTOKEN, SENTENCEPIECE):
            yield self.problem(
                option,
                f"{self.tokenizer_type} does not accept additional special tokens",
                f"leave it out, or give --tokenizer-type {TIKTOKEN} or {SENTENCEPIECE}",
            )
        elif "" in named or len(set(named)) < len(named):
            yield self.problem(
                option, "contains a duplicate or an empty name", "give each name once"
            )
        elif named and self.tokenizer_type == TIKTOKEN:
            if missing := [token for token in _TIKTOKEN_NEEDS if token not in named]:
                yield self.problem(
                    option,
                    f"must include {' '.join(missing)}",
                    f"include all of {' '.join(_TIKTOKEN_NEEDS)}",
                )
            if len(named) > self.tiktoken_num_special_tokens:
                yield self.problem(
                    option,
                    f"names {len(named)} tokens, but --tiktoken-num-special-tokens is "
                    f"{self.tiktoken_num_special_tokens}",
                    "raise --tiktoken-num-special-tokens, or give fewer names",
                )
        elif self.tokenizer_type == TIKTOKEN and self.tiktoken_num_special_tokens < 7:
            yield self.problem(
                "tiktoken_num_special_tokens",
                "is less than the 7 special tokens with default names",
                "raise it, or give fewer names with --tokenizer-special-tokens",
            )


def vocabulary_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between the tokenizer and the model's --vocab-size."""
    data, vocab_size = run.data, run.model.vocab_size
    if not sound(
        "data.tokenizer_type",
        "data.null_tokenizer_eod_id",
        "data.tiktoken_num_special_tokens",
        "model.vocab_size",
    ):
        return
    kind, end, special = (
        data.tokenizer_type,
        data.null_tokenizer_eod_id,
        data.tiktoken_num_special_tokens,
    )
    if kind == NULL and vocab_size is None:
        yield Problem(
            "--vocab-size",
            "",
            f"is required with --tokenizer-type {NULL}",
            "give the number of tokens, including the end of document",
        )
    if kind == NULL and vocab_size is not None and end is not None and end >= vocab_size:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"is not below --vocab-size ({vocab_size})",
            f"give at most {vocab_size - 1}, or leave it out",
        )
    if kind != NULL and end is not None:
        yield Problem(
            "--null-tokenizer-eod-id",
            str(end),
            f"{kind} already has an end-of-document token",
            f"leave it out, or give --tokenizer-type {NULL}",
        )
    if kind == TIKTOKEN and vocab_size is not None and vocab_size <= special:
        yield Problem(
            "--vocab-size",
            str(vocab_size),
            f"leaves no entries after --tiktoken-num-special-tokens ({special})",
            "raise it, or leave it out",
        )
