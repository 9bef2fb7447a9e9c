"""'Did you mean': the names nearest to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str, limit: int | None = None) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that lead from ``a`` to ``b``.

    Args:
        limit: a larger distance need not be exact, only larger than this.
    Source: optimal string alignment, the restricted form of Damerau and Levenshtein's distance.
    """
    reach = max(len(a), len(b)) if limit is None else limit
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [reach + 1] * (
            len(b) + 1
        )  # whatever lies farther than that from the diagonal is too far
        current[0] = i
        for j in range(max(1, i - reach), min(len(b), i + reach) + 1):
            y = b[j - 1]
            current[j] = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                current[j] = min(current[j], before[j - 2] + 1)
        before, previous = previous, current
        if min(before) > reach and min(previous) > reach:
            return reach + 1
    return previous[len(b)]


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known names that ``name`` may stand for: all at the smallest distance, else those it
    abbreviates.
    """
    wanted = _plain(name)
    candidates = {candidate: _plain(candidate) for candidate in known}
    same = [candidate for candidate, plain in candidates.items() if plain == wanted]
    if same:
        return same[:limit]
    reach = min(3, max(1, len(wanted) // 4))
    similar = {
        name: plain for name, plain in candidates.items() if abs(len(plain) - len(wanted)) <= reach
    }
    near, smallest = {}, reach + 1
    for candidate, plain in similar.items():
        near[candidate] = edit_distance(
            wanted, plain, min(smallest, reach)
        )  # farther than the best so far is enough
        smallest = min(smallest, near[candidate])
    if smallest <= reach:
        return [candidate for candidate, distance in near.items() if distance == smallest][:limit]
    if len(wanted) < 3:
        return []
    return [
        candidate
        for candidate, plain in candidates.items()
        if plain.startswith(wanted) or wanted in plain
    ][:limit]


def did_you_mean(found: list[str], otherwise: str) -> str:
    """A cure: the names that ``nearest`` found, or ``otherwise``."""
    return f"did you mean {' or '.join(found)}?" if found else otherwise


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")
