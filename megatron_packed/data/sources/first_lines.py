"""Check of the first lines of each file, before the long tokenisation of all lines begins.

A file of a wrong format is refused after a second or two. The check prints how many of the lines
that it read are usable, and why others are not. Small data is read completely, so the limit on bad
lines applies exactly. Larger data is refused if more than half of the first lines, weighted by the sizes
of the files, are unusable.

The first readable lines are also rendered and encoded. Data is refused if more than half of them
fail, for example because the chat template does not print what they contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_packed.config.data_fields import DataFields
from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.progress_bar import say, warn
from megatron_packed.data.sources.data_report import HOPELESS, LineCounts, LineTally, Quarantine
from megatron_packed.data.sources.jsonl_lines import RawLine
from megatron_packed.data.sources.line_fields import absent, field_names, has_field
from megatron_packed.data.sources.line_schema import LineSample
from megatron_packed.data.sources.strict_json import object_of_line
from megatron_packed.data.tokenizers.encode import SampleEncoder

ParsedLine = Callable[[RawLine], tuple[str, list[LineSample]]]
"""Schema and samples of a line, or an empty text and no sample for a blank line."""
_LINES, _ALL_LINES = 4096, 2**16
"""Most lines that are read of one file, and of all files together."""
_BYTES, _ALL_BYTES = 8 * 2**20, 2**27
"""Most bytes of lines that are read of one file, and of all files together."""
_TRIED = 20
"""Most lines that are rendered and encoded, of all files together; each file gets its share."""
_said: set[tuple[Path, int, DataFields | None]] = set()
"""Files about which this process has printed its sentence: path, time of the last change, fields."""


def check_first_lines(
    files: Sequence[Path],
    reader_of_file: Callable[[Path], Iterable[RawLine]],
    parsed: ParsedLine,
    encoder: SampleEncoder | None,
    *,
    fields: DataFields | None,
    max_bad_fraction: float,
    quarantine_path: Path,
    show: bool,
) -> None:
    """Read the first lines of each file, print how many are usable, and refuse hopeless data.

    Args:
        parsed: parser of a line. It raises `BadLine` for an unusable line.
        encoder: encoder that tries some lines; None tries none.
        quarantine_path: file that lists the bad lines if the data is refused.
        show: print the sentence. A second check of the same files prints nothing.
    Raises:
        DataError: too many of the lines are unusable, or no line has a field that
            ``--data-fields`` names.
    """
    first = _FirstLines(files, fields, Quarantine(quarantine_path), encoder)
    try:
        for file in files:
            first.read(file, reader_of_file(file), parsed)
        first.tally.close()
        refusal = first.refusal(max_bad_fraction)
        if refusal is None:
            first.try_lines()
        these = {(file, file.stat().st_mtime_ns, fields) for file in files}
        if show and (first.has_failed or not these <= _said):
            _said.update(these)
            say(first.sentence())
            first.warn_of_fields()
        if refusal is not None:
            raise refusal
        first.check_trial(max_bad_fraction)
    except DataError:
        first.quarantine.close()
        raise
    finally:
        first.quarantine.discard()
    quarantine_path.unlink(missing_ok=True)


class _FirstLines:
    """Counts of the first lines of all files."""

    def __init__(
        self,
        files: Sequence[Path],
        fields: DataFields | None,
        quarantine: Quarantine,
        encoder: SampleEncoder | None,
    ) -> None:
        self._files = files
        self._encoder = encoder
        self._trial = LineCounts(files=len(files))
        """Counts of the lines that were rendered and encoded."""
        self._to_try: list[tuple[Path, RawLine, list[LineSample]]] = []
        self._fields = fields
        self.quarantine = quarantine
        self.counts = LineCounts(files=len(files))
        self.tally = LineTally(self.counts, quarantine)
        self.complete = True
        """True if the files have no more lines."""
        self._unseen = dict(() if fields is None else fields.paths)
        """Target and path of each field that no line has had."""
        self._names: list[str] | None = None
        """Fields of the first line."""
        self._bad_bytes = 0.0
        """Estimate of the bytes of bad lines in all files."""

    def read(
        self,
        file: Path,
        lines: Iterable[RawLine],
        parsed: ParsedLine,
    ) -> None:
        """Count the first lines of one file."""
        counts, share = self.counts, len(self._files)
        lines_left = min(_LINES, max(_ALL_LINES // share, 1))
        bytes_left = min(_BYTES, _ALL_BYTES // share)
        num_bad, not_blank, tried = counts.num_bad, counts.not_blank, len(self._to_try)
        most_tried = tried + max(_TRIED // share, 1)
        for line in lines:
            if lines_left <= 0 or bytes_left <= 0:
                self.complete = False
                break
            lines_left -= 1
            bytes_left -= len(line.data)
            samples = self._add(file, line, parsed)
            if samples and len(self._to_try) < min(most_tried, _TRIED):
                self._to_try.append((file, line, samples))
        of_file = (counts.num_bad - num_bad) / max(counts.not_blank - not_blank, 1)
        self._bad_bytes += file.stat().st_size * of_file

    def _add(self, file: Path, line: RawLine, parsed: ParsedLine) -> list[LineSample]:
        """Count a line and return its samples; none for a line that is blank or unusable."""
        try:
            if self._unseen and line.reason is None and not line.is_blank:
                self._look_for_fields(line)
            schema, samples = parsed(line)
        except BadLine as bad_line:
            self.tally.left_out(file, line, bad_line)
            return []
        if schema:
            self.tally.used(file, schema)
        else:
            self.tally.blank(line)
        return samples

    def try_lines(self) -> None:
        """Render and encode some of the readable lines."""
        if self._encoder is None:
            return
        tally = LineTally(self._trial, self.quarantine)
        outcomes = self._encoder.encode([samples for _, _, samples in self._to_try])
        for (file, line, _), outcome in zip(self._to_try, outcomes):
            if isinstance(outcome, BadLine):
                tally.left_out(file, line, outcome)
            else:
                tally.used(file, "", notes=outcome.notes, line=line)

    def _look_for_fields(self, line: RawLine) -> None:
        value = object_of_line(line.data)
        if self._names is None:
            self._names = field_names(value)
        for target, path in list(self._unseen.items()):
            if has_field(value, path):
                del self._unseen[target]

    @property
    def has_failed(self) -> bool:
        """True if a line that can be read could not be rendered or encoded."""
        return self._trial.good < self._trial.lines

    def sentence(self) -> str:
        """Return how many lines are usable, and why others are left out."""
        counts, files = self.counts, self._files
        name = str(files[0]) if len(files) == 1 else f"{len(files)} files"
        of = f"{counts.not_blank}" if self.complete else f"the first {counts.not_blank}"
        kinds = f" ({counts.kinds()})" if counts.good else ""
        left_out = f"; left out: {counts.reasons()}" if counts.reasons() else ""
        failed = self._trial.lines - self._trial.good
        reasons = self._trial.reasons()
        tried = f"; of {self._trial.lines} that were rendered, {failed} fail: {reasons}"
        return (
            f"{counts.good} of {of} lines of {name} are readable{kinds}{left_out}{tried}"
            if failed
            else f"{counts.good} of {of} lines of {name} are usable{kinds}{left_out}"
        )

    def warn_of_fields(self) -> None:
        """Warn of optional fields that no line has had, if there are more lines."""
        for target, path in self._unseen.items():
            if not self._ends(target):
                warn(f"none of the first {self.counts.not_blank} lines has {path} ({target})")

    def _ends(self, target: str) -> bool:
        """Return True if the run cannot go on without the field of a target."""
        return self.complete or (self._fields is not None and target in self._fields.required)

    def refusal(self, max_bad_fraction: float) -> DataError | None:
        """Return the error for lines that cannot be read; None if enough can."""
        try:
            self._check(max_bad_fraction)
        except DataError as error:
            return error
        return None

    def _check(self, max_bad_fraction: float) -> None:
        for target, path in self._unseen.items():
            if self._names is not None and self._ends(target):
                lines = f"the {'' if self.complete else 'first '}{self.counts.not_blank} lines"
                raise absent(
                    target,
                    path,
                    f"none of {lines} has this field",
                    "the first line has the fields",
                    self._names,
                )
        size = sum(file.stat().st_size for file in self._files)
        if self.complete:
            self.counts.check(max_bad_fraction, self.quarantine.path)
        elif self._bad_bytes > max(max_bad_fraction, HOPELESS) * size:
            raise DataError(
                self.counts.refusal(max_bad_fraction, self.quarantine.path, "the first ")
            )

    def check_trial(self, max_bad_fraction: float) -> None:
        """Check the lines that were rendered and encoded.

        Raises:
            DataError: more than half of them fail, or spell turn markers.
        """
        trial, most = self._trial, max(max_bad_fraction, HOPELESS)
        of = "" if trial.lines == self.counts.good and self.complete else "the first "
        if trial.bad_fraction > most:
            raise DataError(trial.refusal(max_bad_fraction, self.quarantine.path, of))
        letters = self._encoder is not None and self._encoder.special_tokens_in_text is not None
        if not letters and trial.turn_marker_lines > most * trial.not_blank:
            raise DataError(trial.refusal_of_markers(max_bad_fraction, of))
