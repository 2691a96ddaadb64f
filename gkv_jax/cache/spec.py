"""What a user says about the cache: how many tokens it holds, and which ones."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from gkv_jax.errors import UserError

if TYPE_CHECKING:
    from gkv_jax.cache.policies.base import Policy

Positions = Literal["cache", "text"]
Prefill = Literal["whole", "chunks"]
Pooling = Literal["max", "mean"]
Storage = Literal["bfloat16", "float8_e4m3fn", "int8"]
Memory = Literal["device", "host"]

_WITHOUT_SCORES = ("full", "window", "quest")
STREAM = "stream"
"""``CacheSpec.decode`` under which what leaves the window is gone."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Size and policy of a bounded KV cache, in tokens (never ratios).

    Attributes:
      sinks: first tokens of the text that are never evicted (StreamingLLM, arXiv 2309.17453).
      kept: tokens beyond sinks and window that a score policy selects per layer and KV head; 0 for
        policies without scores.
      window: most recent tokens that a query sees, itself included.
      max_drafts: draft tokens K that one step may verify; each step is ``N = 1 + K`` tokens wide.
      policy: ``window`` evicts what leaves the window; ``full`` evicts nothing and ends a request with
        finish reason ``length`` when its ``sinks + window`` tokens are used up; ``quest`` holds as
        much and reads ``budget`` tokens of it. The others select ``kept`` tokens by a score:
        ``snapkv``, ``h2o``, ``tova``, ``keydiff``, ``expected_attention`` (see
        ``gkv_jax.cache.policies``), or a ``Policy`` of your own.
      decode: the score policy by which tokens that leave the window compete for the kept places while
        decoding; ``stream`` lets them go. None: itself for ``h2o`` and ``tova``, else ``stream``.
      interval: under a ``decode`` policy, tokens between two choices, which fall on multiples of it in
        the text. Until then what has left the window stays visible, and drafts stop there: so the
        output does not depend on drafts.
      prefill: how a score policy reads a prompt longer than sinks and window. ``whole``: it chooses
        once and has seen all of it; ``chunks``: it chooses every ``interval`` tokens, as in decoding,
        so that memory is bounded while the prompt is read, too.
      positions: which position the sinks and kept tokens have for a query: ``cache``, their rank
        among the cached tokens (StreamingLLM: distances stay within the trained length however
        long the stream), or ``text``, their true position (SnapKV's reference code). None: ``text``
        where tokens compete in decoding (ranks would have to move with every choice), else ``cache``.
      dtype: how keys and values are stored: ``bfloat16``, ``float8_e4m3fn``, ``int8`` (with scales per
        token, and per channel for keys); None for the dtype of the weights.
      observe: last queries that vote in SnapKV (in TOVA it is always the last one).
      pool: width of SnapKV's pooling over neighbouring tokens; odd. The paper's 5 to 7 lose the end of a
        number that is written a digit a token (docs/cache-quality.md).
      pooling: ``max`` or ``mean``.
      prefill_chunk: prompt tokens per prefill call; longer prompts take several, shorter ones are
        padded to the next power of two.
      budget: tokens that a query reads under ``quest``, per KV head; a multiple of ``page``.
      page: tokens in one of Quest's pages.
      memory: where ``quest`` keeps the keys and values of its pages: on the ``device``, or in ``host``
        memory, from which every step fetches what it reads (see ``gkv_jax.cache.offload`` for the cost).

    Raises:
      UserError: a value that cannot be served, naming the field.
    """

    sinks: int = 4
    kept: int = 0
    window: int = 1020
    max_drafts: int = 0
    policy: "str | Policy" = "window"
    decode: "str | Policy | None" = None
    interval: int = 1
    prefill: Prefill = "whole"
    positions: Positions | None = None
    dtype: Storage | None = None
    observe: int = 32
    pool: int = 13
    pooling: Pooling = "max"
    prefill_chunk: int = 256
    budget: int = 0
    page: int = 16
    memory: Memory = "device"

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, values in (
            ("prefill", get_args(Prefill)),
            ("positions", (None, *get_args(Positions))),
            ("dtype", (None, *get_args(Storage))),
            ("pooling", get_args(Pooling)),
            ("memory", get_args(Memory)),
        ):
            if getattr(self, name) not in values:
                raise UserError(f"cache.{name} is {getattr(self, name)!r}; choose from {values}")
        selector, evictor = self.selector, self.evictor
        if (selector is not None) != (self.kept > 0):
            raise UserError(
                f"cache.kept is {self.kept} under policy {self.policy_name!r}; policies that select "
                f"need kept > 0, {', '.join(map(repr, _WITHOUT_SCORES))} need kept = 0"
            )
        self._check_unused(selector)
        self._check_eviction(evictor)
        self._check_quest()

    def _check_numbers(self) -> None:
        minima = {
            "sinks": 0, "kept": 0, "window": 1, "max_drafts": 0, "interval": 1, "observe": 1,
            "pool": 1, "prefill_chunk": 1, "budget": 0, "page": 1,
        }  # fmt: skip
        for name, minimum in minima.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise UserError(f"cache.{name} is {value!r}; it must be an integer >= {minimum}")
        if self.pool % 2 == 0:
            raise UserError(f"cache.pool is {self.pool}; it must be odd, to be centred on a token")

    def _check_unused(self, selector: "Policy | None") -> None:
        """Fields that this policy does not read must be as they are by default."""
        unused = [] if selector is not None else ["observe", "pool", "pooling"]
        unused += [] if self.policy == "quest" else ["page"]
        for field in dataclasses.fields(self):
            if field.name in unused and getattr(self, field.name) != field.default:
                raise UserError(
                    f"cache.{field.name} is {getattr(self, field.name)!r}, which policy "
                    f"{self.policy_name!r} does not read; leave it out"
                )
        if self.decode is not None and self.policy in ("full", "quest"):
            raise UserError(
                f"cache.decode is set under policy {self.policy!r}, which evicts nothing; leave it out"
            )

    def _check_eviction(self, evictor: "Policy | None") -> None:
        if evictor is None:
            if self.interval != 1:
                raise UserError(
                    f"cache.interval is {self.interval}, but nothing is chosen while decoding; "
                    "leave it out, or name a policy in cache.decode"
                )
            if self.prefill == "chunks":
                raise UserError(
                    "cache.prefill 'chunks' chooses among the prompt's tokens as decoding does; "
                    "name the policy in cache.decode, too"
                )
            return
        if evictor.needs == "query_statistics":
            raise UserError(
                f"cache.decode {evictor.name!r} needs the queries of a whole prompt; "
                "use it as cache.policy with decode 'stream'"
            )
        if self.positions == "cache":
            raise UserError(
                "cache.positions 'cache' cannot be served where tokens compete in decoding "
                "(ranks would move with every choice); use positions 'text' or decode 'stream'"
            )
        if self.max_drafts >= self.interval:
            raise UserError(
                f"cache.max_drafts is {self.max_drafts} with interval {self.interval}: drafts end "
                f"where tokens are chosen; set interval to at least {self.max_drafts + 1}"
            )
        if self.prefill == "chunks" and self.selector != evictor:
            raise UserError(
                f"cache.decode {evictor.name!r} differs from policy {self.policy_name!r}; "
                "prefill 'chunks' chooses by one and the same"
            )

    def _check_quest(self) -> None:
        if self.policy != "quest":
            if self.budget:
                raise UserError(f"cache.budget is {self.budget}; only policy 'quest' has one")
            if self.memory != "device":
                raise UserError(
                    f"cache.memory is {self.memory!r} under policy {self.policy_name!r}, which reads all "
                    "that it holds in every step; use 'device', or policy 'quest'"
                )
            return
        least = (2 + self.pinned_pages) * self.page
        if self.budget % self.page or self.budget < least:
            raise UserError(
                f"cache.budget is {self.budget}; under policy 'quest' it must be a multiple of "
                f"page ({self.page}) and at least {least}"
            )

    @classmethod
    def full(cls, max_tokens: int, max_drafts: int = 0) -> "CacheSpec":
        """A cache that evicts nothing and holds ``max_tokens`` tokens."""
        return cls(policy="full", sinks=0, window=max_tokens, max_drafts=max_drafts)

    def with_drafts(self, most: int = 7) -> "CacheSpec":
        """The same cache with room for drafts: ``most``, or as many as the policy can take back."""
        if self.evictor is not None:
            most = min(most, self.interval - 1)
        if self.policy == "quest":
            most = min(most, self.page - 1)  # more would need more of the budget
        return dataclasses.replace(self, max_drafts=most)

    @property
    def policy_name(self) -> str:
        """Name of the policy."""
        return self.policy if isinstance(self.policy, str) else self.policy.name

    @functools.cached_property  # asked for in every step, by the host
    def selector(self) -> "Policy | None":
        """The score policy that chooses among the tokens of a prompt."""
        return _policy("policy", self.policy, _WITHOUT_SCORES)

    @functools.cached_property
    def evictor(self) -> "Policy | None":
        """The score policy that chooses among the tokens that leave the window in decoding."""
        if self.decode is not None:
            evictor = _policy("decode", self.decode, (STREAM,))
            if evictor is not None and self.selector is None:
                raise UserError(
                    f"cache.decode is {evictor.name!r} under policy {self.policy_name!r}, which keeps "
                    "nothing beyond the window; name a score policy in cache.policy, too"
                )
            return evictor
        selector = self.selector
        return selector if selector is not None and selector.in_decode else None

    @property
    def by_rank(self) -> bool:
        """Whether sinks and kept tokens stand at their rank among the cached tokens."""
        if self.max_tokens is not None or self.prefix == 0:
            return False  # every rank is the true position, or there is nothing before the ring
        if self.positions is None:
            return self.evictor is None
        return self.positions == "cache"

    @property
    def queries(self) -> int:
        """N: tokens per row and step."""
        return 1 + self.max_drafts

    @property
    def prefix(self) -> int:
        """Slots before the ring: sinks, then kept."""
        return self.sinks + self.kept

    @property
    def reach(self) -> int:
        """Positions that a query sees in the ring, those that wait for the next choice included."""
        return self.window + self.interval - 1

    @property
    def ring(self) -> int:
        """R: physical slots of the ring.

        N tokens are written before the first of them looks ``window`` back, so ``window + N - 1``
        slots are necessary and sufficient; with them, undoing drafts is only moving a counter. Where
        tokens are chosen every ``interval``, those that wait need a slot, too. A few more make the
        capacity a multiple of 8: XLA:TPU gives other buffers a layout that it would convert, the whole
        cache in every step, for the attention kernel. Quest's pages must be whole.
        """
        needed = self.window + max(self.queries, self.interval) - 1
        unit = math.lcm(8, self.page) if self.policy == "quest" else 8
        return needed + -(self.prefix + needed) % unit

    @property
    def capacity(self) -> int:
        """C: physical slots per layer and KV head."""
        return self.prefix + self.ring

    @property
    def total(self) -> int:
        """Tokens that a query sees at most, but for those that wait for a choice."""
        return self.prefix + self.window

    @property
    def max_tokens(self) -> int | None:
        """Longest text that a request may reach, or None where the policy evicts."""
        return self.sinks + self.window if self.policy in ("full", "quest") else None

    @property
    def pinned_pages(self) -> int:
        """Quest's last pages that every query reads: those of a step's tokens and one before."""
        return 1 + -(-self.queries // self.page)

    def longest_text(self, trained: int) -> float:
        """Tokens that a text may have with a model of so many ``trained`` positions.

        Bounded where nothing is evicted, or old tokens never move.
        """
        if self.max_tokens is not None:
            return min(self.max_tokens, trained)
        return math.inf if self.by_rank or self.prefix == 0 else trained

    def observers(self, policy: "Policy") -> int:
        """How many queries vote under ``policy``."""
        return policy.observe or self.observe

    def room_for_drafts(self, position: int) -> int:
        """How many drafts may follow the token at ``position`` before the next choice."""
        if self.evictor is None:
            return self.max_drafts
        return min(self.max_drafts, self.interval - 1 - position % self.interval)

    @property
    def longest_chunk(self) -> int:
        """Tokens of a prompt that are read at once, at most."""
        if self.prefill == "whole":
            return self.prefill_chunk
        return min(self.prefill_chunk, self.interval)

    def chunk_at(self, start: int) -> int:
        """Tokens of a prompt that may be read at once from ``start`` on."""
        if self.prefill == "whole":
            return self.prefill_chunk
        return min(self.prefill_chunk, self.interval - start % self.interval)

    def selects(self, length: int) -> bool:
        """Whether a prompt of this length is read whole: some token is neither sink nor in the window."""
        is_long = length > self.sinks + self.window - 1
        return is_long and self.selector is not None and self.prefill == "whole"


def _policy(field: str, value: "str | Policy", others: tuple[str, ...]) -> "Policy | None":
    """The policy of a name; None for one of ``others``."""
    from gkv_jax.cache.policies import POLICIES, Policy  # they are written in terms of CacheSpec

    if isinstance(value, Policy):
        return value
    known: Mapping[str, Any] = dict.fromkeys(others) | POLICIES
    if not isinstance(value, str) or value not in known:
        raise UserError(f"cache.{field} is {value!r}; choose from {tuple(known)} or give a Policy")
    policy: Policy | None = known[value]
    return policy
