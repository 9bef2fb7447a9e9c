"""Report and quarantine file of a tokenised data set: every source line and token is counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import EMPTY, REASONS, BadLine, DataError, printable
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.tokenizers.encode import Cut

_EARLY_LINES = 10_000
HOPELESS = 0.5
"""Share of bad lines above which data is refused before all lines are read."""


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

    def check(self, max_bad_fraction: float, quarantine: Path) -> None:
        """Check that there are good lines, not too many bad lines, and no file of empty answers.

        Raises:
            DataError: with the counts of the lines by reason and the cure.
        """
        if self.bad_fraction > max_bad_fraction:
            raise DataError(self.refusal(max_bad_fraction, quarantine))
        for file, (empty, lines) in self.empty_files.items():
            if empty == lines:
                raise DataError(
                    f"{file} has nothing to learn: all of its {lines} lines have an empty answer or text; remove the "
                    f"file, or name the field of the answers with {flags.DATA_FIELDS}."
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
            of: name of the lines, if they are not all lines of the data.
        """
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.bad.items()))
        return (
            f"{self.num_bad} of {of}{self.not_blank} lines are unusable ({self.bad_fraction:.2%}: {reasons}), more "
            f"than {flags.MAX_BAD_FRACTION} {max_bad_fraction} allows. First bad line: {self.first_bad}. These "
            f"lines are listed in {quarantine}; correct the data or raise the fraction."
        )

    def warnings(self) -> list[str]:
        """Return a warning for each file of which more than half of the lines are empty."""
        return [
            f"{empty} of {lines} lines of {file} have an empty answer or text and are left out; only {lines - empty} "
            "lines are used."
            for file, (empty, lines) in self.empty_files.items()
        ]


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
    """Shortened documents that lost tokens of their last turn or of a prompt."""
    cut_answers: int = 0
    """Shortened documents whose last answer lost tokens at its end."""

    def add_cut(self, cut: Cut, num_tokens: int, num_targets: int) -> None:
        """Count a shortened document that keeps ``num_tokens`` tokens and ``num_targets`` targets."""
        self.shortened += 1
        self.cut_tokens += cut.source_tokens - num_tokens
        self.cut_targets += cut.source_targets - num_targets
        self.cut_turns += cut.turns
        self.cut_inside += cut.inside
        self.cut_answers += cut.answer

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

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
        if self.shortened:
            text.append(
                f"{self.shortened} of them were shortened so that they keep their last answer: {self.cut_tokens} "
                f"tokens ({self.cut_targets} targets) and {self.cut_turns} whole turns were removed. "
                f"{self.cut_inside} documents lost tokens of a prompt or of their last turn. {self.cut_answers} "
                "documents lost the end of an answer"
            )
        text += [
            f"  {count} x {reason}: {REASONS.get(reason, '')}"
            for reason, count in sorted({**self.bad, **self.empty}.items())
        ]
        if self.first_bad:
            text.append(
                f"  first bad line: {self.first_bad}; all bad lines are listed in {quarantine}"
            )
        elif self.empty:
            text.append(f"  the lines without an answer are listed in {quarantine}")
        return text


class LineTally:
    """Counter of source lines, which fills the line counts of a report.

    Args:
        counts: the counts to fill. `close` fills ``empty_files``.
        quarantine: receives the lines that are left out.
    """

    def __init__(self, counts: LineCounts, quarantine: Quarantine) -> None:
        self._counts = counts
        self._quarantine = quarantine
        self._of_file: Counter[str] = Counter()
        self._empty_of_file: Counter[str] = Counter()

    def blank(self, line: RawLine) -> None:
        """Count blank lines."""
        self._counts.lines += line.count
        self._counts.blank += line.count

    def used(self, file: Path, schema: str, count: int = 1) -> None:
        """Count lines that became documents."""
        self._counts.lines += count
        self._counts.good += count
        self._counts.schemas[schema] = self._counts.schemas.get(schema, 0) + count
        self._of_file[str(file)] += count

    def left_out(self, file: Path, line: RawLine, bad: BadLine) -> None:
        """Count a line that is left out, and list it in the quarantine file."""
        self._counts.lines += line.count
        self._of_file[str(file)] += line.count
        is_empty = bad.reason in EMPTY
        counts = self._counts.empty if is_empty else self._counts.bad
        counts[bad.reason] = counts.get(bad.reason, 0) + 1
        if is_empty:
            self._empty_of_file[str(file)] += 1
        elif not self._counts.first_bad:
            self._counts.first_bad = place_and_reason(file, line, bad)
        self._quarantine.add(file, line, bad)

    def close(self) -> None:
        """Find the files with many empty lines."""
        self._counts.empty_files = {
            file: [empty, self._of_file[file]]
            for file, empty in self._empty_of_file.items()
            if 2 * empty > self._of_file[file]
        }


def place_and_reason(file: Path, line: RawLine, bad: BadLine) -> str:
    """Return the place of a bad line, and why it cannot be used."""
    return f"{file}, {line.kind} {line.number}: {bad} ({REASONS[bad.reason]})"


class Quarantine:
    """Writer of the file that lists the lines that are left out, one JSON object per line.

    An object has the file, the line (or row) number counted from 1, the reason, the detail, and the
    first 200 bytes of the line, escaped. The first line creates the file under a temporary name;
    `close` renames it to ``path``. Without lines, `close` deletes an old file at ``path``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file: Any = None

    def add(self, file: Path, line: RawLine, bad: BadLine) -> None:
        if self._file is None:
            self._file = self._open()
        start = printable(line.data[:200].decode("utf-8", errors="backslashreplace"))
        entry = {
            "file": str(file),
            line.kind: line.number,
            "reason": bad.reason,
            "detail": bad.detail,
            "start": start,
        }
        with self._writing():
            self._file.write(json.dumps(entry) + "\n")

    def _open(self) -> Any:
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._temporary.open("w", encoding="ascii")

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
