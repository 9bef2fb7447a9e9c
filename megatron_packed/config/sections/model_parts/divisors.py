"""Divisors and multiples of a number, for messages that name the possible choices."""

from __future__ import annotations


def divisors(number: int) -> str:
    """Return the divisors of a number as text, at most twelve of them."""
    return in_words(every_divisor(number))


def every_divisor(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [d for d in range(1, min(int(number**0.5), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_multiples(number: int, of: int) -> str:
    """Return a cure that names the multiples below and above a number."""
    lower = number // of * of
    return f"give {lower} or {lower + of}" if lower else f"give {of}"


def in_words(numbers: list[int]) -> str:
    """Return numbers as text, at most the first twelve."""
    return ", ".join(str(number) for number in numbers[:12]) + (
        ", ..." if len(numbers) > 12 else ""
    )
