"""Recognition of preference data by its names: pairs for DPO, and labelled answers for KTO.

Their losses are not built. Read as other data, such a line would teach the rejected answer, too.
The refusal names the ``--data-fields`` that train on the accepted answers.
"""

from __future__ import annotations

from megatron_packed.data.errors import BadLine
from megatron_packed.data.sources.line_fields import data_fields_flag, with_optional
from megatron_packed.data.sources.line_messages import has_messages, is_dialogue, is_message
from megatron_packed.data.sources.strict_json import JsonObject

KTO_LABELS = ("label", "kto_tag")
"""Names of the field that is true for an accepted answer: TRL and ms-swift, LLaMA-Factory."""
_REJECTED_BESIDE = ("rejected_response", "rejected_messages")
"""Fields of ms-swift that hold a rejected answer beside messages with the chosen one."""
_PREFERRED = "preferred_output"
"""Field of OpenAI's pairs that holds the chosen answer."""
PREFERENCE_ANSWERS = frozenset({"chosen", "rejected", _PREFERRED, *_REJECTED_BESIDE, *KTO_LABELS})
"""Fields that recognise preference data."""
_CHOSEN, _NO_DPO = "the chosen side", "and the DPO loss is not built"
_ASKING = ("prompt", "question", "query", "instruction", "input", "messages", "conversations")
"""Fields that can hold the question of a pair."""
PREFERENCE_FIELDS = PREFERENCE_ANSWERS | {*_ASKING}
"""Fields that recognise preference data, and those that its cure can name."""
_BESIDE = ("system", "system_prompt", "history", "tools", "functions")
"""Fields whose loss the cure reports."""
_Pairs = list[tuple[str, str]]
"""Targets and paths of ``--data-fields``."""


def check_no_preferences(line: JsonObject) -> None:
    """Check that a line is no preference pair and no labelled answer.

    Raises:
        BadLine: the line is one of them. The detail has the flag that trains on accepted answers.
    """
    if all(isinstance(line.get(name), str | list | dict) for name in ("chosen", "rejected")):
        fields = _fields_of_chosen(line)
        cure = _cure(line, fields or [("instruction", "FIELD"), ("output", "chosen")], _CHOSEN)
        unknown = "" if fields else "; FIELD is the field of the question"
        raise BadLine(
            "preference_data",
            f"`chosen` and `rejected` are a pair, {_NO_DPO}; {cure}{unknown}",
        )
    for name in _REJECTED_BESIDE:
        if line.get(name) and "messages" in line:
            cure = _cure(line, with_optional(line, [("messages", "messages")]), _CHOSEN)
            raise BadLine("preference_data", f"`{name}` is a rejected answer, {_NO_DPO}; {cure}")
    if _PREFERRED in line:
        cure = _cure(line, [("prompt", "input.messages"), ("completion", _PREFERRED)], _CHOSEN)
        raise BadLine("preference_data", f"`{_PREFERRED}` is one of a pair, {_NO_DPO}; {cure}")
    label = next((name for name in KTO_LABELS if isinstance(line.get(name), bool)), None)
    fields = [] if label is None else _fields_of_answer(line)
    if label is not None and fields:
        cure = _cure(line, [*fields, ("label", label)], "the answers whose label is true")
        raise BadLine(
            "preference_data",
            f"`{label}` is true or false as in KTO data, and the KTO loss is not built; {cure}",
        )


def _cure(line: JsonObject, fields: _Pairs, part: str) -> str:
    """Return the flag that trains on a part of the data, and the fields that it leaves out."""
    paths = {path for _, path in fields}
    lost = [name for name in _BESIDE if line.get(name) and name not in paths]
    without = f", without {' and '.join(lost)}" if lost else ""
    return f"{data_fields_flag(fields)} trains on {part}{without}"


def _fields_of_chosen(line: JsonObject) -> _Pairs:
    """Return the fields that train on the chosen side of a pair; none if there is no question."""
    chosen = line["chosen"]
    asking = next((name for name in _ASKING if line.get(name)), None)
    prompt = None if asking is None else line[asking]
    if is_dialogue(chosen):
        return [("messages", "chosen")]
    if has_messages(chosen) or is_message(chosen):
        if asking is not None and has_messages(prompt):
            return [("prompt", asking), ("completion", "chosen")]
        alone = is_message(chosen) or len(chosen) == 1
        if asking is not None and isinstance(prompt, str) and alone:
            message = chosen if is_message(chosen) else chosen[0]
            name = "content" if "content" in message else "value"
            path = f"chosen{'' if is_message(chosen) else '.0'}.{name}"
            return [("instruction", asking), ("output", path)]
        return with_optional(line, [("messages", "chosen")])
    if asking is None or not isinstance(chosen, str) or not isinstance(prompt, str):
        return []
    if asking == "prompt":
        return [("prompt", "prompt"), ("completion", "chosen")]
    return with_optional(line, [("instruction", asking), ("output", "chosen")])


def _fields_of_answer(line: JsonObject) -> _Pairs:
    """Return the fields of a line with an answer; none if the line has none."""
    for name in ("messages", "conversations"):
        if line.get(name):
            return with_optional(line, [(name, name)])
    if "prompt" in line and "completion" in line:
        return [("prompt", "prompt"), ("completion", "completion")]
    output = next((name for name in ("output", "response") if line.get(name) is not None), None)
    if "instruction" not in line or output is None:
        return []
    return with_optional(line, [("instruction", "instruction"), ("output", output)])
