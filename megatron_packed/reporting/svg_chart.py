"""Line charts and heat maps as inline SVG, which a browser shows without any script, font or
network.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#762a83", "#35978f", "#c51b7d", "#4d4d4d")
DASHES = ("", "6 3", "2 2", "8 2 2 2")

_WIDTH, _HEIGHT = 520, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 8, 36
MOST_POINTS = 500
"""Points of a line; a longer one is drawn as means, in a band from the smallest to the largest value of
each.
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    points: Points
    colour: str
    legend: str = ""
    dash: str = ""
    dots: bool = False


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    levels: Sequence[tuple[str, float]] = (),
    marks: Points = (),
) -> str:
    """A figure of HTML: heading, legend, and the lines over the steps.

    Args:
        unit: of the y axis.
        lines: at least one with a point.
        levels: (name, y) of horizontal lines.
        marks: (x, 0) of steps that are marked at the bottom.
    """
    every = [point for line in lines for point in line.points]
    xs, ys = [x for x, _ in every], [y for _, y in every] + [level for _, level in levels]
    across = _Axis.over(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis.over(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = _frame(across, up)
    for name, level in levels:
        y = up.at(level)
        parts.append(_rule(y, "#888", "4 3"))
        parts.append(
            f'<text x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">{_text(name)} {level:.2f}</text>'
        )
    for line in lines:
        parts += _drawn(line, across, up)
    bottom = _HEIGHT - _BOTTOM
    for x, _ in marks:
        parts.append(f'<path d="M{across.at(x):.1f} {bottom}v-9" stroke="#d00" stroke-width="2"/>')
    legend = "".join(_legend(line) for line in lines if line.legend)
    heading = f"<b>{_text(title)}</b> <small>{_text(unit)}</small>"
    return (
        f'<figure><figcaption>{heading} {legend}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{_text(title)}">{"".join(parts)}</svg></figure>'
    )


def heat_map(
    title: str, unit: str, rows: Sequence[Sequence[float]], *, row: str, column: str
) -> str:
    """A figure of HTML with one cell per value: white at 1, blue towards 0, red towards 2 and
    beyond.

    Args:
        rows: values, 1 being what all should have.
        row, column: what rows and columns are.
    """
    columns = max(map(len, rows))
    wide = (_WIDTH - _LEFT - _RIGHT) / columns
    high = min(24.0, max(6.0, (_HEIGHT - _TOP - _BOTTOM) / len(rows)))
    height = _TOP + high * len(rows) + _BOTTOM
    parts = []
    for i, values in enumerate(rows):
        for j, value in enumerate(values):
            parts.append(
                f'<rect x="{_LEFT + j * wide:.1f}" y="{_TOP + i * high:.1f}" width="{wide:.2f}" height="{high:.2f}" '
                f'fill="{_shade(value)}"><title>{_text(row)} {i}, {_text(column)} {j}: {value:.2f}</title></rect>'
            )
            if wide >= 40 and high >= 14:
                x, y = _LEFT + (j + 0.5) * wide, _TOP + (i + 0.5) * high + 4
                parts.append(
                    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{value:.2f}</text>'
                )
    for i in range(0, len(rows), max(1, len(rows) // 8)):
        y = _TOP + (i + 0.5) * high + 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{i}</text>')
    for j in range(0, columns, max(1, columns // 8)):
        x, y = _LEFT + (j + 0.5) * wide, height - _BOTTOM + 15
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{j}</text>')
    x, y = (_LEFT + _WIDTH - _RIGHT) / 2, height - 4
    parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{_text(column)}</text>')
    heading = f"<b>{_text(title)}</b> <small>{_text(unit)}</small>"
    return (
        f'<figure><figcaption>{heading}</figcaption><svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-label="{_text(title)}">{"".join(parts)}</svg></figure>'
    )


@dataclass(frozen=True)
class _Axis:
    """Values from ``low`` to ``high`` on pixels from ``begin`` to ``end``."""

    low: float
    high: float
    begin: float
    end: float
    unit: float
    """From tick to tick."""

    @classmethod
    def over(cls, low: float, high: float, begin: float, end: float) -> _Axis:
        """Values get a little room, and a single one some."""
        room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - room, high + room
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        unit = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
        return cls(low, high, begin, end, unit)

    def at(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.unit), math.floor(self.high / self.unit)
        return [number * self.unit for number in range(first, last + 1)]


def _frame(across: _Axis, up: _Axis) -> list[str]:
    """Grid and numbers."""
    parts = []
    for y in up.ticks:
        parts.append(_rule(up.at(y), "#e4e4e4"))
        parts.append(
            f'<text x="{_LEFT - 6}" y="{up.at(y) + 4:.1f}" text-anchor="end">{_number(y, up.unit)}</text>'
        )
    bottom = _HEIGHT - _BOTTOM
    for x in (x for x in across.ticks if x == int(x) and x >= 0):
        parts.append(
            f'<text x="{across.at(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x:,.0f}</text>'
        )
    parts.append(_rule(bottom, "#999"))
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">step</text>'
    )
    return parts


def _rule(y: float, colour: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{colour}"{dashed}/>'


def _drawn(line: Line, across: _Axis, up: _Axis) -> list[str]:
    parts = []
    bins = thinned(line.points, MOST_POINTS)
    places = [(across.at(x), up.at(mean)) for x, mean, _, _ in bins]
    if len(bins) < len(line.points):
        upper = [f"{across.at(x):.1f} {up.at(high):.1f}" for x, _, _, high in bins]
        lower = [f"{across.at(x):.1f} {up.at(low):.1f}" for x, _, low, _ in reversed(bins)]
        parts.append(f'<path d="M{"L".join(upper + lower)}Z" fill="{line.colour}" opacity="0.18"/>')
    if places:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashed = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dashed}/>'
        )
    if line.dots or len(places) == 1:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in places
        ]
    return parts


def thinned(points: Points, most: int) -> list[tuple[float, float, float, float]]:
    """(x, mean, smallest, largest y) of neighbours taken together, so that at most ``most`` are
    left.

    Example:
        ``[(1, 5), (2, 7), (3, 9)]`` in at most 2: ``[(1.5, 6, 5, 7), (3, 9, 9, 9)]``.
    """
    together = -(-len(points) // most) or 1
    found = []
    for first in range(0, len(points), together):
        xs, ys = zip(*points[first : first + together])
        found.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return found


def _legend(line: Line) -> str:
    dashed = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    sample = f'<path d="M0 5H22" stroke="{line.colour}" stroke-width="2"{dashed}/>'
    dot = f'<circle cx="11" cy="5" r="3" fill="{line.colour}"/>' if line.dots else ""
    return f'<span><svg class="key" viewBox="0 0 22 10">{sample}{dot}</svg> {_text(line.legend)}</span>'


def _shade(value: float) -> str:
    """Colour of a value whose neutral is 1."""
    share = min(abs(value - 1), 1)
    faint = round(255 * (1 - 0.8 * share))
    return f"rgb(255,{faint},{faint})" if value > 1 else f"rgb({faint},{faint},255)"


def _number(value: float, unit: float) -> str:
    """A tick, with as many digits as tell neighbours apart.

    Example:
        1,500,000 among multiples of 500,000: ``1.5 M``.
    """
    if max(abs(value), unit) < 1e-3:
        return f"{value:.2g}" if unit >= 0.1 * abs(value) else f"{value:.4g}"
    power, letter = next(
        ((p, s) for p, s in ((12, " T"), (9, " G"), (6, " M")) if abs(value) >= 10**p), (0, "")
    )
    return f"{value / 10**power:,.{max(0, power - math.floor(math.log10(unit)))}f}{letter}"


def _text(text: str) -> str:
    return html.escape(text)
