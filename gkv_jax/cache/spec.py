"""What a user says about the cache: how many tokens it holds, and which ones."""

import dataclasses
from typing import Literal, get_args

from gkv_jax.errors import UserError

Policy = Literal["full", "window", "snapkv"]
Positions = Literal["cache", "text"]


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Size and policy of a bounded KV cache, in tokens (never ratios).

    Attributes:
      sinks: first tokens of the text that are never evicted (StreamingLLM, arXiv 2309.17453).
      kept: tokens of a long prompt that SnapKV selects per layer and KV head; 0 otherwise.
      window: most recent tokens that a query sees, itself included.
      max_drafts: draft tokens K that one step may verify; each step is ``N = 1 + K`` tokens wide.
      policy: ``window`` evicts what leaves the window; ``snapkv`` does so too, after selecting
        ``kept`` prompt tokens (arXiv 2404.14469); ``full`` evicts nothing and ends a request with
        finish reason ``length`` when its ``sinks + window`` tokens are used up.
      positions: which position the sinks and kept tokens have for a query: ``cache``, their rank
        among the cached tokens (StreamingLLM: distances stay within the trained length however
        long the stream), or ``text``, their true position (SnapKV's reference code).
      observe: last prompt queries that vote in SnapKV.
      pool: width of SnapKV's max pooling over neighbouring tokens; odd.
      prefill_chunk: prompt tokens per prefill call; longer prompts take several (``full``,
        ``window``), shorter ones are padded to the next power of two.

    Raises:
      UserError: a value that cannot be served, naming the field.
    """

    sinks: int = 4
    kept: int = 0
    window: int = 1020
    max_drafts: int = 0
    policy: Policy = "window"
    positions: Positions = "cache"
    observe: int = 32
    pool: int = 7
    prefill_chunk: int = 256

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise UserError(f"cache.policy is {self.policy!r}; choose from {get_args(Policy)}")
        if self.positions not in get_args(Positions):
            raise UserError(
                f"cache.positions is {self.positions!r}; choose from {get_args(Positions)}"
            )
        minima = {
            "sinks": 0, "kept": 0, "window": 1, "max_drafts": 0,
            "observe": 1, "pool": 1, "prefill_chunk": 1,
        }  # fmt: skip
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise UserError(f"cache.{name} is {value!r}; it must be an integer >= {minimum}")
        if self.pool % 2 == 0:
            raise UserError(f"cache.pool is {self.pool}; it must be odd, to be centred on a token")
        if (self.policy == "snapkv") != (self.kept > 0):
            raise UserError(
                f"cache.kept is {self.kept} under policy {self.policy!r}; "
                "policy 'snapkv' needs kept > 0, the others kept = 0"
            )

    @classmethod
    def full(cls, max_tokens: int, max_drafts: int = 0) -> "CacheSpec":
        """A cache that evicts nothing and holds ``max_tokens`` tokens."""
        return cls(policy="full", sinks=0, window=max_tokens, max_drafts=max_drafts)

    @property
    def queries(self) -> int:
        """N: tokens per row and step."""
        return 1 + self.max_drafts

    @property
    def prefix(self) -> int:
        """Slots before the ring: sinks, then kept."""
        return self.sinks + self.kept

    @property
    def ring(self) -> int:
        """R: physical slots of the ring.

        N tokens are written before the first of them looks ``window`` back, so ``window + N - 1``
        slots are necessary and sufficient; with them, undoing drafts is only moving a counter. A few
        more make the capacity a multiple of 8: XLA:TPU gives other buffers a layout that it would
        convert, the whole cache in every step, for the attention kernel.
        """
        needed = self.window + self.queries - 1
        return needed + -(self.prefix + needed) % 8

    @property
    def capacity(self) -> int:
        """C: physical slots per layer and KV head."""
        return self.prefix + self.ring

    @property
    def max_tokens(self) -> int | None:
        """Longest text that a request may reach, or None where the policy evicts."""
        return self.sinks + self.window if self.policy == "full" else None
