"""Ours against theirs: the tokens kept, and the scores."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

TIE = 1e-5
"""Scores so close (relative to the larger) are a tie: float32 rounding decides it."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two selections of one KV head, or of several, differ.

    Attributes:
      heads: KV heads compared.
      differing: those that keep other tokens.
      tokens: tokens kept by one side only.
      gap: largest relative distance, by the peer's scores, between a token that only the peer keeps
        and one that only we keep; 0 where all are equal.
      score: largest difference of two scores of a token.
    """

    heads: int
    differing: int
    tokens: int
    gap: float
    score: float

    @property
    def equal(self) -> bool:
        """The same tokens, ties aside."""
        return self.gap <= TIE


def difference(
    ours: set[int],
    theirs: set[int],
    their_scores: np.ndarray,
    our_scores: np.ndarray | None,
    choosable: slice,
) -> Difference:
    """Of one KV head; scores are ``[N]`` by position and count where ``choosable``."""
    only_ours, only_theirs = sorted(ours - theirs), sorted(theirs - ours)
    gap = 0.0
    if len(ours) != len(theirs):
        gap = math.inf
    elif only_ours:
        best, worst = their_scores[only_theirs].max(), their_scores[only_ours].min()
        gap = float((best - worst) / max(abs(best), abs(worst)))
    score = 0.0
    if our_scores is not None:
        score = float(np.abs(our_scores[choosable] - their_scores[choosable]).max())
    differing = len(only_ours) + len(only_theirs)
    return Difference(1, int(differing > 0), differing, gap, score)


def total(differences: Iterable[Difference]) -> Difference:
    """Of several heads and layers together."""
    each = list(differences)
    return Difference(
        heads=sum(one.heads for one in each),
        differing=sum(one.differing for one in each),
        tokens=sum(one.tokens for one in each),
        gap=max(one.gap for one in each),
        score=max(one.score for one in each),
    )
