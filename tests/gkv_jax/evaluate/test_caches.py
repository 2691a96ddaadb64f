"""A budget is what a cache holds, whatever its policy."""

import pytest

from gkv_jax import UserError
from gkv_jax.evaluate import caches

BOUNDED = [name for name in caches.POLICIES if caches.is_bounded(name)]
UNBOUNDED = [name for name in caches.POLICIES if not caches.is_bounded(name)]


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("budget", [96, 128, 250, 1024])
def test_a_budget_is_used_and_not_exceeded(name: str, budget: int) -> None:
    spec = caches.cache_spec(name, budget, 3000)
    if name == "quest":
        assert 0 <= budget - spec.budget < spec.page
        assert spec.max_tokens is not None
        assert spec.max_tokens >= 3000
    else:
        assert spec.prefix + spec.reach == budget
        assert spec.sinks == (0 if name == "sliding" else caches.SINKS)
    if spec.kept:
        assert spec.window == budget // 8
        assert spec.kept > budget // 4


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_full_cache_holds_the_text(name: str) -> None:
    for length in (1, 128, 129, 1000):
        spec = caches.cache_spec(name, None, length)
        assert spec.max_tokens is not None
        assert 0 <= spec.max_tokens - length < 128
    stored = {"full": None, "bf16": "bfloat16", "fp8": "float8_e4m3fn", "int8": "int8"}
    assert spec.dtype == stored[name]


def test_names_mean_what_they_say() -> None:
    policies = {
        name: (spec.policy_name, spec.evictor.name if spec.evictor else None)
        for name in BOUNDED
        for spec in [caches.cache_spec(name, 256, 1000)]
    }
    assert policies == {
        "window": ("window", None),
        "sliding": ("window", None),
        "snapkv": ("snapkv", None),
        "snapkv-7": ("snapkv", None),
        "keydiff": ("keydiff", None),
        "expected_attention": ("expected_attention", None),
        "h2o": ("h2o", "h2o"),
        "tova": ("tova", "tova"),
        "snapkv+h2o": ("snapkv", "h2o"),
        "snapkv-d": ("snapkv", "snapkv"),
        "quest": ("quest", None),
    }


@pytest.mark.parametrize("name", BOUNDED)
def test_the_least_budget_that_is_named_works(name: str) -> None:
    with pytest.raises(UserError, match="too few; use at least") as raised:
        caches.cache_spec(name, 0, 1000)
    least = int(str(raised.value).split()[-1])
    caches.cache_spec(name, least, 1000)
    with pytest.raises(UserError, match="budgets"):
        caches.cache_spec(name, least - 1, 1000)


def test_refused() -> None:
    with pytest.raises(UserError, match="choose from full, window, sliding, snapkv"):
        caches.cache_spec("streaming", 256, 1000)
    with pytest.raises(UserError, match="needs one"):
        caches.cache_spec("window", None, 1000)
