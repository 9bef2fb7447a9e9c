"""Masks of messages: fields of several trainers that decide whether a message is learned.

All become ``train``, the field of this project: true, false, or absent. Only answers of the
assistant are learned, so the mask of another message can only repeat that.

- ``train`` (axolotl, and this project), ``weight`` (OpenAI), ``loss`` (ms-swift, LLaMA-Factory),
  ``trainable`` and ``loss_mask`` (verl): true or 1 learns the message.
- ``masked`` and ``mask`` (torchtune): true or 1 does not learn the message.
- ``loss_mask`` beside the messages (LLaMA-Factory): a list with a value for each message.
- ``train_detail`` (axolotl) learns parts of a message. No rule here can follow it, so the line is
  refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_packed.data.errors import BadLine, printable
from megatron_packed.data.sources.strict_json import JsonObject, expect

TRAIN = "train"
LISTED_MASK = "loss_mask"
"""Field beside the messages with a mask for each message."""
_LEARNED_IF = {
    TRAIN: True,
    "weight": True,
    "loss": True,
    "trainable": True,
    LISTED_MASK: True,
    "masked": False,
    "mask": False,
}
"""Truth value of each field with which a message is learned."""
_PARTS = "train_detail"
_FIELDS = _LEARNED_IF.keys() | {_PARTS}


def check_listed_mask(values: Any, num_messages: int) -> Sequence[Any]:
    """Return the list beside the messages with one mask for each message.

    Raises:
        BadLine: the value is no list, or has another length.
    """
    if values is None:
        return [None] * num_messages
    if len(expect(LISTED_MASK, values, list)) != num_messages:
        raise BadLine(
            "bad_train_flag",
            f"{LISTED_MASK} has {len(values)} values, but the line has {num_messages} messages",
        )
    return list(values)


def unify_masks(where: str, message: JsonObject, listed: tuple[str, Any] = ("", None)) -> None:
    """Replace the masks of a message by ``train``; a message without a mask gets none.

    Args:
        where: place of the message in the line.
        message: a message with a valid role. Null values have been dropped.
        listed: place and value of the mask beside the messages; a null value is no mask.
    Raises:
        BadLine: a mask has another value, learns a message that is not the assistant's, or
            contradicts another mask.
    """
    if listed[1] is None and _FIELDS.isdisjoint(message):
        return
    if message.pop(_PARTS, None):
        raise BadLine(
            "bad_train_flag",
            f"{where}.{_PARTS} learns parts of a message, but a message is learned as a whole or not at all",
        )
    masks = [
        (f"{where}.{name}", name, message.pop(name)) for name in _LEARNED_IF if name in message
    ]
    if listed[1] is not None:
        masks.append((listed[0], LISTED_MASK, listed[1]))
    learned = {place: _learned(place, name, value) for place, name, value in masks}
    if len(set(learned.values())) > 1:
        shown = [f"{place} is {json.dumps(value)}" for place, _, value in masks]
        other = next(n for n, place in enumerate(learned) if learned[place] != learned[masks[0][0]])
        raise BadLine("contradictory_masks", f"{shown[0]}, but {shown[other]}")
    if not masks:
        return
    place, _, value = masks[0]
    if message["role"] == "assistant":
        message[TRAIN] = learned[place]
    elif learned[place]:
        raise BadLine(
            "bad_train_flag",
            f"{place} is {json.dumps(value)}, but the message is of the {message['role']}, and only messages of the "
            "assistant are learned",
        )


def _learned(place: str, name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and name != TRAIN and value in (0, 1)
    if not isinstance(value, bool) and not is_number:
        raise BadLine("bad_train_flag", f"{place} is {printable(json.dumps(value), 40)}")
    return bool(value) == _LEARNED_IF[name]
