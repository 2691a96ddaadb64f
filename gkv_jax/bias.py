"""What ``logit_bias`` and the penalties add to a request's logits, on the host, in NumPy only.

The sums are kept for the whole vocabulary and change where the output grows. With a step's drafts, each
query sees other counts: those of the output and the drafts before it. So the step gets the sums once,
and for every draft what its token's sum is behind it, from which the device makes the sums of all
queries (``gkv_jax.step.bias_of_queries``). A sum depends on the counts alone, not on the way to them:
with drafts or without, the logits have the same bits.
"""

import collections
from collections.abc import Sequence

import numpy as np

from gkv_jax.sampling import Sampling


class LogitBias:
    """The sums of one request."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        """For an empty output; ``vocab_size`` is V."""
        self._given = dict(sampling.logit_bias)
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._counts: collections.Counter[int] = collections.Counter()
        self._sums = np.zeros(vocab_size, np.float32)
        for token, value in self._given.items():
            self._sums[token] = value

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> "LogitBias | None":
        """The sums that a request asks for; None if it asks for none."""
        return cls(sampling, vocab_size) if sampling.is_biased else None

    def count(self, tokens: Sequence[int]) -> None:
        """Add to the output."""
        self._counts.update(tokens)
        for token in set(tokens):
            self._sums[token] = self._sum(token, self._counts[token])

    def fill(self, line: np.ndarray, drafts: Sequence[int]) -> None:
        """Write into a zeroed ``line``, float32 ``[V+N-1]``, what a step needs.

        The first V are each token's sum after the output. Then, for each of the drafts (at most N - 1),
        the sum of its token after it; zeros for those that are not there.
        """
        vocab_size = len(self._sums)
        line[:vocab_size] = self._sums
        ahead: collections.Counter[int] = collections.Counter()
        for index, token in enumerate(drafts):
            ahead[token] += 1
            line[vocab_size + index] = self._sum(token, self._counts[token] + ahead[token])

    def _sum(self, token: int, count: int) -> float:
        """Of a token that the output holds ``count > 0`` times."""
        return self._given.get(token, 0.0) - self._presence - self._frequency * count
