"""Report and quarantine file of a tokenised data set: every source line and token is counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import REASONS, BadLine, DataError, printable
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.tokenizers.encode import Cut

_EARLY_LINES = 10_000


@dataclass(kw_only=True)
class DataReport:
    """Counts of one tokenised data set, with ``lines == blank + good + sum(bad.values())``."""

    files: int = 0
    lines: int = 0
    blank: int = 0
    good: int = 0
    """Lines that became documents."""
    bad: dict[str, int] = field(default_factory=dict)
    """Number of quarantined lines for each reason (`errors.REASONS`)."""
    first_bad: str = ""
    """Place of the first quarantined line, and why the line cannot be used."""
    schemas: dict[str, int] = field(default_factory=dict)
    """Number of good lines for each schema."""
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

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    @property
    def bad_fraction(self) -> float:
        """Share of bad lines among the lines that are not blank; 0 without lines."""
        return self.num_bad / max(self.lines - self.blank, 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines_of_text(self, quarantine: Path) -> list[str]:
        """Format the report for people, as lines of text.

        Two lines count lines, documents and tokens. If documents were shortened, a line counts the
        tokens that were cut. If there are bad lines, the text has one line per reason, and then the
        first bad line and the path of the quarantine file.

        Args:
            quarantine: the file that lists the bad lines.
        """
        schemas = ", ".join(f"{count} {name}" for name, count in sorted(self.schemas.items()))
        text = [
            f"{self.lines} lines in {self.files} {'file' if self.files == 1 else 'files'}: {self.good} used "
            f"({schemas}), {self.blank} blank, {self.num_bad} in quarantine",
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
            for reason, count in sorted(self.bad.items())
        ]
        if self.first_bad:
            text.append(
                f"  first bad line: {self.first_bad}; all bad lines are listed in {quarantine}"
            )
        return text

    def check_early(self, max_bad_fraction: float, quarantine: Path) -> None:
        """Call `check` before all lines are read, if more than half of at least 10,000 lines are
        bad.
        """
        if self.lines - self.blank >= _EARLY_LINES and self.bad_fraction > max(
            max_bad_fraction, 0.5
        ):
            self.check(max_bad_fraction, quarantine)

    def check(self, max_bad_fraction: float, quarantine: Path) -> None:
        """Check that the data set has a document and not too many bad lines.

        Raises:
            DataError: too many bad lines, or no document. The message counts the lines by reason.
        """
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.bad.items()))
        if self.bad_fraction > max_bad_fraction:
            raise DataError(
                f"{self.num_bad} of {self.lines - self.blank} lines are unusable ({self.bad_fraction:.2%}: {reasons}), "
                f"more than {flags.MAX_BAD_FRACTION} {max_bad_fraction} allows. First bad line: {self.first_bad}. All "
                f"bad lines are listed in {quarantine}; correct the data or raise the fraction."
            )
        if not self.documents:
            raise DataError(
                f"the data contains no document: {self.lines} lines, {self.blank} blank, {reasons or 'none bad'}; "
                "check the data paths."
            )


def place_and_reason(file: Path, line: RawLine, bad: BadLine) -> str:
    """Return the place of a bad line, and why it cannot be used."""
    return f"{file}, {line.kind} {line.number}: {bad} ({REASONS[bad.reason]})"


class Quarantine:
    """Writer of the file that lists the bad lines, one JSON object per bad line.

    An object has the file, the line (or row) number counted from 1, the reason, the detail, and the
    first 200 bytes of the line, escaped. The first bad line creates the file under a temporary
    name; `close` renames it to ``path``. Without bad lines, `close` deletes an old file at
    ``path``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._file: Any = None
        self.counts: Counter[str] = Counter()
        self.first = ""
        """Place of the first bad line, and why the line cannot be used."""

    def add(self, file: Path, line: RawLine, bad: BadLine) -> None:
        self.counts[bad.reason] += 1
        if self._file is None:
            self.first = place_and_reason(file, line, bad)
            self._file = self._temporary.open("w", encoding="ascii")
        start = printable(line.data[:200].decode("utf-8", errors="backslashreplace"))
        entry = {
            "file": str(file),
            line.kind: line.number,
            "reason": bad.reason,
            "detail": bad.detail,
            "start": start,
        }
        self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        if self._file is None:
            self.path.unlink(missing_ok=True)
            return
        self._file.close()
        self._temporary.replace(self.path)
