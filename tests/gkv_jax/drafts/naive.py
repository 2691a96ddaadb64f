"""Oracles: the same answers by looking everywhere, in plain Python."""

from collections.abc import Sequence


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where ``part`` ends in ``text``, as exclusive indices in ascending order."""
    size = len(part)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(part)]


def longest_suffix(text: Sequence[int], corpus: Sequence[int]) -> int:
    """Tokens of the longest suffix of ``text`` that occurs in ``corpus``."""
    return max(n for n in range(len(text) + 1) if ends(corpus, text[len(text) - n :]))
