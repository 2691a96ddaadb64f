"""Caches by name: from a policy, a budget and a length of text to a ``CacheSpec``."""

from collections.abc import Callable

from gkv_jax.cache import CacheSpec
from gkv_jax.cache.spec import Storage
from gkv_jax.errors import UserError

SINKS = 4
INTERVAL = 32
"""Tokens between two choices, where a policy chooses in decoding. They count in the budget."""


def cache_spec(name: str, budget: int | None, length: int) -> CacheSpec:
    """The cache that a name in the tables of results stands for.

    Args:
      name: one of ``POLICIES``.
      budget: tokens held per KV head, sinks, window and those that wait for a choice included; for
        ``quest``, tokens that a query reads. Not used by what ``is_bounded`` denies.
      length: tokens of the text; what evicts nothing must hold them all.

    Raises:
      UserError: an unknown name, or a budget too small for the policy.
    """
    known_policy(name)
    if not is_bounded(name):
        return _UNBOUNDED[name](_rounded(length))
    if budget is None:
        raise UserError(f"budgets: policy {name!r} needs one")
    return _BOUNDED[name](budget, length)


def known_policy(name: str) -> str:
    """``name`` itself.

    Raises:
      UserError: it is not one of ``POLICIES``.
    """
    if name not in POLICIES:
        raise UserError(f"policies: there is no {name!r}; choose from {', '.join(POLICIES)}")
    return name


def is_bounded(name: str) -> bool:
    """Whether a policy depends on a budget; the others hold and read every token."""
    return name in _BOUNDED


def can_stream(name: str) -> bool:
    """Whether text without end can be read, so that its perplexity can be measured.

    Policies that choose once from a whole prompt cannot.
    """
    return name in _STREAMING or not is_bounded(name)


def _rounded(length: int) -> int:
    """The next multiple of 128: few sizes, few programs to compile."""
    return length + -length % 128


def _streaming(sinks: int) -> Callable[[int, int], CacheSpec]:
    def spec(budget: int, length: int) -> CacheSpec:
        _check_budget(budget, sinks + 1)
        return CacheSpec(sinks=sinks, window=budget - sinks, prefill_chunk=_CHUNK)

    return spec


def _selecting(
    policy: str, decode: str | None = None, pool: int = CacheSpec.pool
) -> Callable[[int, int], CacheSpec]:
    """Sinks, an eighth of the budget for the window, the rest for what the policy chooses."""

    def spec(budget: int, length: int) -> CacheSpec:
        waiting = INTERVAL - 1 if decode is not None else 0
        window = budget // 8
        kept = budget - SINKS - window - waiting
        _check_budget(budget, 2 * (SINKS + waiting) + 8)
        return CacheSpec(
            policy=policy,
            decode=decode,
            interval=1 if decode is None else INTERVAL,
            sinks=SINKS,
            kept=kept,
            window=window,
            pool=pool,
            positions="text",
            prefill_chunk=_CHUNK,
        )

    return spec


def _quest(budget: int, length: int) -> CacheSpec:
    page = CacheSpec.page
    held = _rounded(length)
    _check_budget(budget, 4 * page)
    return CacheSpec(
        policy="quest", sinks=0, window=held, budget=budget // page * page, prefill_chunk=_CHUNK
    )


def _full(dtype: Storage | None = None) -> Callable[[int], CacheSpec]:
    def spec(length: int) -> CacheSpec:
        return CacheSpec(policy="full", sinks=0, window=length, dtype=dtype, prefill_chunk=_CHUNK)

    return spec


def _check_budget(budget: int, least: int) -> None:
    if budget < least:
        raise UserError(f"budgets: {budget} tokens are too few; use at least {least}")


_CHUNK = 512  # prompts a little shorter than a multiple of it need one shape only

_UNBOUNDED: dict[str, Callable[[int], CacheSpec]] = {
    "full": _full(),
    "bf16": _full("bfloat16"),
    "fp8": _full("float8_e4m3fn"),
    "int8": _full("int8"),
}
_STREAMING = ("window", "sliding", "h2o", "tova", "snapkv-d")
_BOUNDED: dict[str, Callable[[int, int], CacheSpec]] = {
    "window": _streaming(SINKS),
    "sliding": _streaming(0),
    "snapkv": _selecting("snapkv"),
    "snapkv-7": _selecting("snapkv", pool=7),  # the paper's
    "keydiff": _selecting("keydiff"),
    "expected_attention": _selecting("expected_attention"),
    "h2o": _selecting("h2o", "h2o"),
    "tova": _selecting("tova", "tova"),
    "snapkv+h2o": _selecting("snapkv", "h2o"),
    "snapkv-d": _selecting("snapkv", "snapkv"),
    "quest": _quest,
}
POLICIES = ("full", *_BOUNDED, *(name for name in _UNBOUNDED if name != "full"))
