"""Report and quarantine file of a tokenised data set: every source line and token is counted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import (
    CURES,
    EMPTY,
    REASONS,
    BadLine,
    DataError,
    Notes,
    most_first,
    note_lines,
    printable,
)
from megatron_packed.data.sources.jsonl_lines import WHOLE_FILE, RawLine
from megatron_packed.data.tokenizers.encode import Cut, EncodedDocument
from megatron_packed.files.written_files import (
    open_temporary,
    remove_abandoned,
    temporary_path,
)

_EARLY_LINES = 10_000
HOPELESS = 0.5
"""Share of bad lines above which data is refused before all lines are read."""
_TOO_LONG = "question_too_long"
"""Reason of the empty lines that a larger limit of documents makes usable."""
_NOTHING_TO_LEARN = {
    _TOO_LONG: "a question that is too long",
    "rejected_answer": "a rejected answer",
    "all_masked": "a mask on every answer",
}
"""Words for the reasons of `errors.EMPTY` that are no empty text."""


def refusal(problem: str, rules: list[str], cure: str, place: str = "") -> str:
    """Return the message that refuses data, in the form of problems of a configuration.

    Args:
        rules: rules that the data breaks, the one of most lines first.
        place: first line that breaks a rule, and where the others are listed.
    """
    lines = [f"{problem}.", *(f"     rule: {rule}" for rule in rules), f"     cure: {cure}"]
    return "\n".join([*lines, f"    place: {place}"] if place else lines)


@dataclass(kw_only=True)
class LineCounts:
    """Counts of source lines, with ``lines == blank + good + num_empty + num_bad``."""

    files: int = 0
    lines: int = 0
    blank: int = 0
    good: int = 0
    """Lines that became documents."""
    bad: dict[str, int] = field(default_factory=dict)
    """Number of unusable lines for each reason (`errors.REASONS`)."""
    first_bad: str = ""
    """Place of the first unusable line, and why the line cannot be used."""
    empty: dict[str, int] = field(default_factory=dict)
    """Number of lines with an empty answer or text, for each reason (`errors.EMPTY`)."""
    empty_files: dict[str, list[int]] = field(default_factory=dict)
    """For each file of which more than half of the lines are empty: the number of these lines, and
    of all lines that are not blank.
    """
    schemas: dict[str, int] = field(default_factory=dict)
    """Number of good lines for each schema."""
    notes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counts of the notes of the good lines, by kind and name (`errors.NOTES`)."""
    turn_marker_lines: int = 0
    """Lines of text that spell turn markers, which are encoded as letters."""
    first_marked: str = ""
    """Place of the first of these lines."""

    def add_notes(self, notes: Notes) -> None:
        """Count the notes of one good line."""
        for (kind, name), count in notes.items():
            of_kind = self.notes.setdefault(kind, {})
            of_kind[name] = of_kind.get(name, 0) + count
        self.turn_marker_lines += any(kind == "turn_markers" for kind, _ in notes)

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    @property
    def num_empty(self) -> int:
        return sum(self.empty.values())

    @property
    def not_blank(self) -> int:
        return self.lines - self.blank

    @property
    def bad_fraction(self) -> float:
        """Share of bad lines among the lines that are not blank; 0 without lines."""
        return self.num_bad / max(self.not_blank, 1)

    def kinds(self) -> str:
        """Return the number of good lines of each schema, as text."""
        return ", ".join(f"{count} {name}" for name, count in sorted(self.schemas.items()))

    def reasons(self) -> str:
        """Return the number of lines left out for each reason, as text."""
        left_out = sorted({**self.bad, **self.empty}.items())
        return ", ".join(f"{count} {reason}" for reason, count in left_out)

    def check(
        self, max_bad_fraction: float, quarantine: Path, letters_wanted: bool = False
    ) -> None:
        """Check that there are good lines, not too many bad lines, and no file of empty answers.

        Args:
            letters_wanted: ``--special-tokens-in-text letters`` is given.
        Raises:
            DataError: with the counts of the lines by reason and the cure.
        """
        if self.bad_fraction > max_bad_fraction:
            raise DataError(self.refusal(max_bad_fraction, quarantine))
        if not letters_wanted and self.turn_marker_lines > max_bad_fraction * self.not_blank:
            raise DataError(self.refusal_of_markers(max_bad_fraction))
        for file, (empty, lines) in self.empty_files.items():
            if empty == lines:
                raise DataError(
                    f"{file} has nothing to learn: all of its {lines} lines have {self._emptiness()}; remove the "
                    f"file, {self._cure_of_emptiness()}."
                )
        if not self.good:
            raise DataError(
                f"the data contains no document: {self.lines} lines, {self.blank} blank, "
                f"{self.reasons() or 'none bad'}; check the data paths."
            )

    def check_early(self, max_bad_fraction: float, quarantine: Path) -> None:
        """Refuse data before all lines are read, if more than half of at least 10,000 lines are bad.

        `first_lines` does not see lines that only the template or the tokenizer refuses.
        """
        if self.not_blank >= _EARLY_LINES and self.bad_fraction > max(max_bad_fraction, HOPELESS):
            raise DataError(self.refusal(max_bad_fraction, quarantine, "the first "))

    def refusal(self, max_bad_fraction: float, quarantine: Path, of: str = "") -> str:
        """Return the message for too many bad lines.

        Args:
            of: word before the number of lines, if they are not all lines of the data.
        """
        ordered = most_first(self.bad)
        return refusal(
            f"{self.num_bad} of {of}{self.not_blank} lines are unusable ({self.bad_fraction:.2%}), more than "
            f"{flags.MAX_BAD_FRACTION} {max_bad_fraction} allows",
            [f"{count} {reason}: {REASONS[reason]}" for reason, count in ordered],
            f"{CURES.get(ordered[0][0], 'correct the data')}; or raise {flags.MAX_BAD_FRACTION}",
            f"{self.first_bad}; all of them are listed in {quarantine}",
        )

    def refusal_of_markers(self, max_bad_fraction: float, of: str = "") -> str:
        """Return the message for too many lines of text that spell turn markers."""
        names = ", ".join(sorted(self.notes["turn_markers"]))
        return refusal(
            f"{self.turn_marker_lines} of {of}{self.not_blank} lines spell turn markers of the tokenizer ({names}), "
            f"more than {flags.MAX_BAD_FRACTION} {max_bad_fraction} allows",
            [
                "a chat template seems to have rendered the text, and its special tokens would be learned as letters"
            ],
            f"{flags.SPECIAL_TOKENS_IN_TEXT} tokens encodes them as special tokens, and {flags.SPECIAL_TOKENS_IN_TEXT} "
            "letters as letters",
            self.first_marked,
        )

    def warnings(self) -> list[str]:
        """Return a warning for each file of which more than half of the lines are empty."""
        return [
            f"{empty} of {lines} lines of {file} have {self._emptiness()} and are left out; only {lines - empty} "
            "lines are used."
            for file, (empty, lines) in self.empty_files.items()
        ]

    def _emptiness(self) -> str:
        """Return what the empty lines have, as text."""
        kinds = [_NOTHING_TO_LEARN.get(reason, "an empty answer or text") for reason in self.empty]
        return " or ".join(sorted(set(kinds)))

    def _cure_of_emptiness(self) -> str:
        cure = f"or name the field of the answers with {flags.DATA_FIELDS}"
        return f"or raise {flags.MAX_DOCUMENT_LENGTH}" if {*self.empty} == {_TOO_LONG} else cure


@dataclass(kw_only=True)
class DataReport(LineCounts):
    """Counts of one tokenised data set."""

    documents: int = 0
    tokens: int = 0
    target_tokens: int = 0
    longest_document: int = 0
    shortened: int = 0
    """Documents that were shortened."""
    cut_tokens: int = 0
    cut_targets: int = 0
    cut_turns: int = 0
    """Turns of conversations that were removed completely."""
    cut_inside: int = 0
    """Shortened documents that lost tokens of their last turn, the system message or a prompt."""
    cut_answers: int = 0
    """Shortened documents whose last answer lost tokens at its end."""
    cut_questions: int = 0
    """Shortened documents whose last user message or prompt lost tokens of its middle."""
    split_conversations: int = 0
    """Conversations that became several documents, so that each answer has its history as served."""
    split_documents: int = 0
    """Documents of these conversations."""
    split_tokens: int = 0
    """Tokens of these documents without the last one of each conversation."""

    def add_document(self, document: EncodedDocument, num_tokens: int, num_targets: int) -> None:
        """Count a document that is stored with ``num_tokens`` tokens and ``num_targets`` targets."""
        self.documents += 1
        self.tokens += num_tokens
        self.target_tokens += num_targets
        self.longest_document = max(self.longest_document, num_tokens)
        if document.later_documents:
            self.split_documents += 1 + (document.later_documents == 1)
            self.split_conversations += document.later_documents == 1
            self.split_tokens += num_tokens
        if document.cut is not None:
            self.add_cut(document.cut, num_tokens, num_targets)

    def add_cut(self, cut: Cut, num_tokens: int, num_targets: int) -> None:
        """Count a shortened document that keeps ``num_tokens`` tokens and ``num_targets`` targets."""
        self.shortened += 1
        self.cut_tokens += cut.source_tokens - num_tokens
        self.cut_targets += cut.source_targets - num_targets
        self.cut_turns += cut.turns
        self.cut_inside += cut.inside
        self.cut_answers += cut.answer
        self.cut_questions += cut.question

    def lines_of_text(self, quarantine: Path) -> list[str]:
        """Format the report for people, as lines of text.

        Two lines count lines, documents and tokens. If documents were shortened, a line counts the
        tokens that were cut. If lines were left out, the text has one line per reason, and then the
        first bad line and the path of the quarantine file.

        Args:
            quarantine: the file that lists the lines that were left out.
        """
        empty = f", {self.num_empty} empty" if self.empty else ""
        text = [
            f"{self.lines} lines in {self.files} {'file' if self.files == 1 else 'files'}: {self.good} used "
            f"({self.kinds()}), {self.blank} blank{empty}, {self.num_bad} in quarantine",
            f"{self.documents} documents, {self.tokens} tokens, {self.target_tokens} of them targets; the longest "
            f"document has {self.longest_document} tokens",
        ]
        text += self._shortening()
        if self.split_conversations:
            plural = "s" * (self.split_conversations > 1)
            text.append(
                f"{self.split_documents} of them are from {self.split_conversations} conversation{plural} with "
                f"answers whose history is another one when it is served; this costs {self.split_tokens} tokens "
                f"({flags.MULTI_TURN} last avoids them)"
            )
        text += note_lines(self.notes)
        text += [
            f"  {count} x {reason}: {REASONS.get(reason, '')}"
            for reason, count in sorted({**self.bad, **self.empty}.items())
        ]
        if self.first_bad:
            text.append(
                f"  first bad line: {self.first_bad}; all bad lines are listed in {quarantine}"
            )
        elif self.empty:
            text.append(f"  the lines with {self._emptiness()} are listed in {quarantine}")
        return text

    def _shortening(self) -> list[str]:
        """Return one line of text for each kind of loss, if documents were shortened."""
        if not self.shortened:
            return []
        turns = f" and {self.cut_turns} whole turns" if self.cut_turns else ""
        text = [
            f"{self.shortened} of them were shortened so that they keep their last answer: {self.cut_tokens} "
            f"tokens ({self.cut_targets} targets){turns} were removed"
        ]
        losses = {
            "tokens inside their last turn or their prompt": self.cut_inside,
            "the middle of their last user message or prompt": self.cut_questions,
            "the end of an answer": self.cut_answers,
        }
        text += [f"  {count} of these lost {part}" for part, count in losses.items() if count]
        return text


@dataclass
class LineTally:
    """Counter of source lines, which fills the line counts of a report.

    Args:
        counts: the counts to fill. `close` fills ``empty_files``.
        quarantine: receives the lines that are left out.
    """

    counts: LineCounts
    quarantine: Quarantine
    _of_file: Counter[str] = field(default_factory=Counter)
    _empty_of_file: Counter[str] = field(default_factory=Counter)

    def blank(self, line: RawLine) -> None:
        """Count blank lines."""
        self.counts.lines += line.num_lines
        self.counts.blank += line.num_lines

    def used(
        self,
        file: Path,
        schema: str,
        count: int = 1,
        notes: Notes | None = None,
        line: RawLine | None = None,
    ) -> None:
        """Count lines that became documents.

        Args:
            notes: what of the lines is not learned as it is written.
            line: the line; None for several lines.
        """
        self.counts.add_notes(notes or Counter())
        if self.counts.turn_marker_lines and not self.counts.first_marked and line is not None:
            self.counts.first_marked = f"{file}, {line.kind} {line.number}"
        self.counts.lines += count
        self.counts.good += count
        self.counts.schemas[schema] = self.counts.schemas.get(schema, 0) + count
        self._of_file[str(file)] += count

    def left_out(self, file: Path, line: RawLine, bad_line: BadLine) -> None:
        """Count a line that is left out, and list it in the quarantine file."""
        self.counts.lines += line.num_lines
        self._of_file[str(file)] += line.num_lines
        is_empty = bad_line.reason in EMPTY
        counts = self.counts.empty if is_empty else self.counts.bad
        counts[bad_line.reason] = counts.get(bad_line.reason, 0) + 1
        if is_empty:
            self._empty_of_file[str(file)] += 1
        elif not self.counts.first_bad:
            self.counts.first_bad = _place_of(file, line, bad_line)
        self.quarantine.add(file, line, bad_line)

    def close(self) -> None:
        """Find the files with many empty lines."""
        self.counts.empty_files = {
            file: [empty, self._of_file[file]]
            for file, empty in self._empty_of_file.items()
            if 2 * empty > self._of_file[file]
        }


def place_and_reason(file: Path, line: RawLine, bad_line: BadLine) -> str:
    """Return the place of a bad line, and why it cannot be used."""
    return f"{_place_of(file, line, bad_line)} ({REASONS[bad_line.reason]})"


def _place_of(file: Path, line: RawLine, bad_line: BadLine) -> str:
    """Return the place of a bad line, its reason and the detail."""
    place = str(file) if line.kind == WHOLE_FILE else f"{file}, {line.kind} {line.number}"
    return f"{place}: {bad_line}"


class Quarantine:
    """Writer of the file that lists the lines that are left out, one JSON object per line.

    An object has the file, the line (or row) number counted from 1, the reason, the detail, and the
    first 200 bytes of the line, escaped. The first line creates the file under a temporary name;
    `close` renames it to ``path``. Without lines, `close` deletes an old file at ``path``. Temporary
    files of killed processes are removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        remove_abandoned(path)
        self._temporary = temporary_path(path)
        self._file: Any = None

    def add(self, file: Path, line: RawLine, bad_line: BadLine) -> None:
        if self._file is None:
            self._file = self._open()
        start = printable(line.data[:200].decode("utf-8", errors="backslashreplace"))
        entry = {
            line.kind: line.number,
            "file": str(file),  # after the number, because the kind of a plain text is "file", too
            "reason": bad_line.reason,
            "detail": bad_line.detail,
            "start": start,
        }
        with self._writing():
            self._file.write(json.dumps(entry) + "\n")

    def _open(self) -> Any:
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.fdopen(open_temporary(self._temporary), "w", encoding="ascii")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Delete the temporary file and raise `DataError` if it cannot be written."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}; correct the path or its permissions, or free disk "
                "space."
            ) from None

    def close(self) -> None:
        """Rename the temporary file to ``path``."""
        if self._file is None:
            self.path.unlink(missing_ok=True)
            return
        file = self._file
        self._file = None
        with self._writing():
            file.close()
            self._temporary.replace(self.path)

    def discard(self) -> None:
        """Delete the lines since the last `close`."""
        file = self._file
        self._file = None
        if file is not None:
            with self._writing():
                file.close()
                self._temporary.unlink(missing_ok=True)
