"""'Did you mean' suggestions: the known names nearest to a wrong name."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str, limit: int | None = None) -> int:
    """Return how many insertions, deletions, replacements and swaps of neighbours turn ``a`` into
    ``b``.

    Args:
        limit: if the distance is larger, any number above the limit is returned.
    Source: optimal string alignment, the restricted form of Damerau and Levenshtein's distance.
    """
    reach = max(len(a), len(b)) if limit is None else limit
    # Each edit removes at most one surplus character of `a` and one of `b`. This costs less than
    # the table and is enough for most pairs.
    surplus = sum(max(0, a.count(x) - b.count(x)) for x in set(a))
    if max(surplus, surplus + len(b) - len(a)) > reach:
        return reach + 1
    second_last: list[int] = []
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        # Cells more than `reach` columns from the diagonal have a distance above the limit.
        current = [reach + 1] * (len(b) + 1)
        current[0] = i
        for j in range(max(1, i - reach), min(len(b), i + reach) + 1):
            y = b[j - 1]
            current[j] = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                current[j] = min(current[j], second_last[j - 2] + 1)
        second_last, previous = previous, current
        if min(second_last) > reach and min(previous) > reach:
            return reach + 1
    return previous[len(b)]


def nearest(name: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known names that the user may have meant by ``name``: all names at the smallest
    edit distance, else the names that ``name`` abbreviates.
    """
    wanted = _plain(name)
    candidates = {candidate: _plain(candidate) for candidate in names}
    same = [candidate for candidate, plain in candidates.items() if plain == wanted]
    if same:
        return same[:limit]
    reach = min(3, max(1, len(wanted) // 4))
    similar = {
        name: plain for name, plain in candidates.items() if abs(len(plain) - len(wanted)) <= reach
    }
    near, smallest = {}, reach + 1
    for candidate, plain in similar.items():
        # A distance above the smallest one so far need not be exact.
        near[candidate] = edit_distance(wanted, plain, min(smallest, reach))
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


def did_you_mean(suggestions: list[str], otherwise: str) -> str:
    """Return a cure that suggests the names that ``nearest`` found, or ``otherwise`` if it found
    none.
    """
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else otherwise


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")
