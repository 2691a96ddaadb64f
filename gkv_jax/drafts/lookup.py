"""Drafts from the text itself: what followed the same tokens before."""

from collections.abc import Iterable, Sequence
from itertools import cycle, islice

from gkv_jax.drafts.automaton import SuffixAutomaton
from gkv_jax.drafts.source import MIN_MATCH

MAX_CORPUS_TOKENS = 65_536
"""Tokens that are searched at most.

When they are full the older half is forgotten, so at least the last 32,768 tokens are searched and
a request of any length holds about 9 MB, at worst 25 MB. The step that forgets takes about 0.1 s.
"""


class LookupDrafts:
    """Proposes what followed the longest earlier occurrence of the end of prompt and output.

    Prompt lookup with a suffix automaton instead of n-grams of a fixed length, after SAM-Decoding
    (arXiv 2411.10666). A match of fewer than ``MIN_MATCH`` tokens proposes nothing. A text that
    runs in a loop is continued in the loop, also past the end of what is there to copy.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """Reads the prompt, or as much of its end as is searched: about 0.15 s for 65,536 tokens."""
        self._corpus = SuffixAutomaton()
        self._seen = 0
        """Tokens of the output that are part of the corpus."""
        self._extend(prompt[-MAX_CORPUS_TOKENS:])

    def propose(self, output: Sequence[int], ahead: Sequence[int], limit: int) -> Sequence[int]:
        """See ``DraftSource``. O(new tokens of ``output`` + ``ahead`` + ``limit``), amortised."""
        self._extend(output[self._seen :])
        self._seen = len(output)
        cursor = self._corpus.repeat()
        for token in ahead:
            cursor = self._corpus.advance(cursor, token)
        if cursor.length < MIN_MATCH:
            return ()
        followed = [*self._corpus.tokens[cursor.end : cursor.end + limit], *ahead][:limit]
        # Fewer than ``limit`` tokens reach from the match to the end of the text: a loop's period.
        return tuple(islice(cycle(followed), limit))

    def _extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self._corpus.tokens) == MAX_CORPUS_TOKENS:
                self._corpus = SuffixAutomaton(self._corpus.tokens[MAX_CORPUS_TOKENS // 2 :])
            self._corpus.extend(token)
