"""Quest against a list that reads pages, and its bounds against the keys that they are to bound."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, init_cache, reset_row
from gkv_jax.cache.quest import choose_pages, page_bounds, page_scores
from gkv_jax.cache.segments import EMPTY, LayerCache
from gkv_jax.cache.storage import load
from gkv_jax.models.llama import Llama
from gkv_jax.prefill import read_prompt
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.cache.test_streaming import TEXT, close, inputs_for
from tests.gkv_jax.oracle import Entry, ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

CONFIG = tiny_config(num_layers=3)  # the first two are read whole
MODEL = Llama(CONFIG)
PARAMS = random_params(CONFIG)
SPEC = CacheSpec(
    policy="quest", sinks=0, window=48, max_drafts=2, page=4, budget=20, prefill_chunk=16
)
SPECS = {
    "two pages compete": SPEC,
    "no drafts, sinks, pages of 6": dataclasses.replace(
        SPEC, max_drafts=0, sinks=3, window=47, page=6, budget=24
    ),
    "a step of three pages": dataclasses.replace(SPEC, max_drafts=4, page=2, budget=12),
}
ALL_PAGES = dataclasses.replace(SPEC, budget=64)


class QuestList(ListCache):
    """``ListCache`` of which a query reads pages; before ``dense_until`` it reads everything."""

    def __init__(self, spec: CacheSpec, dense_until: int = 0) -> None:
        # With nothing evicted, a rank is a position, unless only a part is read.
        super().__init__(CONFIG, PARAMS, dataclasses.replace(spec, positions="text"))
        self.dense_until = dense_until

    def _attend(self, layer: int, q: np.ndarray, position: int) -> np.ndarray:
        self.q = q
        return super()._attend(layer, q, position)

    def visible(self, layer: int, head: int, position: int) -> list[Entry]:
        entries = self.entries[layer]
        if layer < 2 or position < self.dense_until:
            return entries
        pages = self.pages(entries, head, position)
        return [e for e in entries if e.position // self.spec.page in pages]

    def pages(self, entries: list[Entry], head: int, position: int) -> set[int]:
        spec, own = self.spec, position // self.spec.page
        drafted = -(-(1 + spec.max_drafts) // spec.page)
        pinned = {0, *range(max(0, own - drafted), own + 1)}
        others = [page for page in range(own) if page not in pinned]
        if not others:
            return pinned
        groups = CONFIG.num_heads // CONFIG.num_kv_heads
        shares = np.zeros(len(others))
        for q in self.q[head * groups : (head + 1) * groups]:
            rotated = self.rotate(q, position)
            bounds = []
            for page in others:
                keys = np.stack(
                    [
                        self.rotate(e.k[head], e.position)
                        for e in entries
                        if e.position // spec.page == page
                    ]
                )
                assert len(keys) == spec.page
                bounds.append((rotated * np.where(rotated > 0, keys.max(0), keys.min(0))).sum())
            weights = np.exp((np.array(bounds) - max(bounds)) / np.sqrt(len(rotated)))
            shares += weights / weights.sum()
        best = sorted(range(len(others)), key=lambda i: -shares[i])
        return pinned | {others[i] for i in best[: spec.budget // spec.page - len(pinned)]}


@functools.partial(jax.jit, static_argnames=("spec",))
def step(cache: Cache, inputs: StepInputs, *, spec: CacheSpec) -> tuple[jax.Array, Cache]:
    hidden, cache, _ = forward(PARAMS, cache, inputs, model=MODEL, spec=spec)
    return MODEL.logits(PARAMS, hidden), cache


def decode(cache: Cache, start: int, spec: CacheSpec) -> tuple[np.ndarray, Cache]:
    """Logits of the text from ``start`` on, token by token in row 1 of two, and the cache."""
    out = []
    for at in range(start, len(TEXT)):
        logits, cache = step(cache, inputs_for([None, ([TEXT[at]], at)], spec), spec=spec)
        out.append(np.asarray(logits[1, 0]))
    return np.stack(out), cache


def prefilled(spec: CacheSpec, length: int) -> Cache:
    """A cache whose row 1 has read ``length`` tokens of the text, and another text before."""
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for text in (TEXT[::-1], TEXT[:length]):
        cache = reset_row(cache, np.int32(1), spec=spec, model=MODEL)
        cache = read_prompt(PARAMS, cache, text, 1, model=MODEL, spec=spec)
    return cache


def drafting(
    spec: CacheSpec, seed: int, cache: Cache | None = None, start: int = 0, until: int = len(TEXT)
) -> tuple[list[list[np.ndarray]], Cache, list[int]]:
    """Row 1 of two, and row 0 if it starts at 0, with random drafts of which random prefixes are right.

    Returns each row's logits of the tokens that count, the cache, and where each row stands.
    """
    rng = np.random.default_rng(seed)
    cache = init_cache(spec, MODEL, 2, jnp.float32) if cache is None else cache
    at, out = [start if start == 0 else until, start], [list[np.ndarray](), list[np.ndarray]()]
    while min(at) < until:
        rows: list[tuple[list[int], int] | None] = [None, None]
        right = [0, 0]
        for row in range(2):
            if at[row] >= until or rng.random() < 0.2:
                continue
            drafts = int(rng.integers(0, min(spec.max_drafts, len(TEXT) - 1 - at[row]) + 1))
            right[row] = 1 + int(rng.integers(0, drafts + 1))
            wrong = rng.integers(0, CONFIG.vocab_size, 1 + drafts - right[row]).tolist()
            rows[row] = TEXT[at[row] : at[row] + right[row]] + wrong, at[row]
        logits, cache = step(cache, inputs_for(rows, spec), spec=spec)
        for row, count in enumerate(right):
            out[row].extend(np.asarray(logits[row, :count]))
            at[row] += count
    return out, cache, at


@functools.cache
def expected(name: str, dense_until: int = 0) -> np.ndarray:
    oracle = QuestList(SPECS[name], dense_until)
    return np.stack([oracle.step(token, at) for at, token in enumerate(TEXT)])


@pytest.mark.parametrize("name", SPECS)
def test_one_token_at_a_time_equals_the_list(name: str) -> None:
    logits, _ = decode(init_cache(SPECS[name], MODEL, 2, jnp.float32), 0, SPECS[name])
    close(logits, expected(name))


def test_the_budget_leaves_something_out() -> None:
    """Else the others here would show nothing."""
    oracle = ListCache(CONFIG, PARAMS, dataclasses.replace(SPEC, positions="text"))
    full = np.stack([oracle.step(token, at) for at, token in enumerate(TEXT)])
    for name in SPECS:
        assert abs(full - expected(name)).max() > 0.01


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("two pages compete", 7),
        ("two pages compete", 24),
        ("no drafts, sinks, pages of 6", 37),
    ],
)
def test_a_prompt_is_read_whole_and_decoded_by_pages(name: str, length: int) -> None:
    logits, _ = decode(prefilled(SPECS[name], length), length, SPECS[name])
    close(logits, expected(name, length)[length:])


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.max_drafts])
@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_no_trace(name: str, seed: int) -> None:
    logits, _, _ = drafting(SPECS[name], seed)
    for row in range(2):
        close(np.stack(logits[row]), expected(name))


def test_with_all_pages_it_is_a_full_cache() -> None:
    oracle = ListCache(CONFIG, PARAMS, dataclasses.replace(ALL_PAGES, positions="text"))
    full = np.stack([oracle.step(token, at) for at, token in enumerate(TEXT)])
    close(decode(prefilled(ALL_PAGES, 24), 24, ALL_PAGES)[0], full[24:])
    logits, _, _ = drafting(ALL_PAGES, 0)
    close(np.stack(logits[1]), full)


@pytest.mark.parametrize("name", ["two pages compete", "a step of three pages"])
@pytest.mark.parametrize("until", [30, 48])
def test_bounds_are_those_of_the_accepted_tokens(name: str, until: int) -> None:
    """Wherever drafts were rejected, once their page cannot change any more."""
    spec = SPECS[name]
    _, straight = decode(init_cache(spec, MODEL, 2, jnp.float32), 0, spec)
    for seed in range(2):
        _, cache, at = drafting(spec, seed, until=until)
        for row in range(2):
            complete = at[row] // spec.page
            bounds = bounds_of(cache, row, complete)
            np.testing.assert_array_equal(bounds, bounds_from_keys(cache, row, complete, spec))
            np.testing.assert_allclose(bounds, bounds_of(straight, 1, complete), atol=1e-5)


def bounds_of(cache: Cache, row: int, pages: int) -> np.ndarray:
    bounds = cache.layers[2].bounds
    assert bounds is not None
    return np.asarray(bounds[row, :, :pages])


def bounds_from_keys(cache: Cache, row: int, pages: int, spec: CacheSpec) -> np.ndarray:
    keys = load(cache.layers[2].k, None, jnp.float32)[row : row + 1, :, : pages * spec.page]
    return np.asarray(page_bounds(keys, spec.page)[0])


@pytest.mark.parametrize("length", [16, 37])
def test_bounds_after_a_prompt_in_chunks(length: int) -> None:
    cache, pages = prefilled(SPEC, length), length // SPEC.page
    np.testing.assert_array_equal(
        bounds_of(cache, 1, pages), bounds_from_keys(cache, 1, pages, SPEC)
    )


def test_int8_pages() -> None:
    """Bounds are those of the keys as they are stored, and drafts change nothing."""
    spec = dataclasses.replace(SPEC, dtype="int8")
    logits, cache = decode(prefilled(spec, 24), 24, spec)
    np.testing.assert_array_equal(bounds_of(cache, 1, 12), bounds_from_keys(cache, 1, 12, spec))
    drafted, _, _ = drafting(spec, 1, prefilled(spec, 24), 24)
    close(np.stack(drafted[1]), logits)


def layer_with(k: np.ndarray, page: int) -> LayerCache:
    """A layer that holds ``k [B,Hk,C,D]``; only its bounds matter."""
    empty = init_cache(SPEC, MODEL, 1, jnp.float32).layers[2]
    return dataclasses.replace(empty, bounds=page_bounds(jnp.asarray(k), page))


def chosen(k: np.ndarray, q: np.ndarray, position: int) -> list[set[int]]:
    """Pages that each KV head reads for one query ``[Hq,D]``."""
    pages = choose_pages(
        SPEC, layer_with(k, SPEC.page), jnp.asarray(q[None, None]), jnp.array([[position]]), 0.35
    )
    return [set(head.tolist()) - {EMPTY} for head in np.asarray(pages[0, 0])]


def test_the_page_of_a_planted_key_is_read() -> None:
    """In every place, by the KV head that holds it; the others read what they would have read."""
    rng = np.random.default_rng(2)
    k = rng.normal(size=(1, 2, 48, 8)).astype(np.float32)
    q = rng.normal(size=(4, 8)).astype(np.float32)
    before = chosen(k, q, 47)
    for slot in range(48):
        planted = k.copy()
        planted[0, 1, slot] = 20 * q[3]
        after = chosen(planted, q, 47)
        assert slot // SPEC.page in after[1]
        assert after[0] == before[0]
        assert all(len(pages) == SPEC.budget // SPEC.page for pages in after)
        assert all({0, 10, 11} <= pages for pages in after)


def test_pages_that_are_read_anyway_have_no_say() -> None:
    """They hold drafts: a softmax over them, too, would weigh the heads of a group by these."""
    rng = np.random.default_rng(4)
    k = rng.normal(size=(1, 2, 48, 8)).astype(np.float32)
    for _ in range(20):
        q = 3 * rng.normal(size=(4, 8)).astype(np.float32)
        drafts = k.copy()
        drafts[:, :, 40:] = 3 * rng.normal(size=(1, 2, 8, 8))
        assert chosen(k, q, 45) == chosen(drafts, q, 45)


@pytest.mark.parametrize("groups", [1, 3])
def test_scores_are_the_least_upper_bounds_of_a_page(groups: int) -> None:
    rng = np.random.default_rng(0)
    batch, n, kv_heads, pages, page, dim = 2, 3, 2, 5, 16, 8
    q = rng.normal(size=(batch, n, kv_heads * groups, dim)).astype(np.float32)
    k = rng.normal(size=(batch, kv_heads, pages * page, dim)).astype(np.float32)
    scores = np.asarray(jax.jit(lambda q, k: page_scores(q, page_bounds(k, page)))(q, k))
    assert scores.shape == (batch, n, kv_heads * groups, pages)
    for b, t, h in np.ndindex(batch, n, kv_heads * groups):
        keys = k[b, h // groups].astype(np.float64).reshape(pages, page, dim)
        product = q[b, t, h].astype(np.float64) * keys
        np.testing.assert_allclose(scores[b, t, h], product.max(axis=1).sum(axis=-1), rtol=1e-5)
        assert (scores[b, t, h] >= product.sum(axis=-1).max(axis=1) - 1e-5).all()


def test_a_page_of_equal_keys_scores_their_product() -> None:
    q = jnp.asarray([[[[1.0, -2.0]]]])
    k = jnp.broadcast_to(jnp.asarray([3.0, 4.0]), (1, 1, 16, 2))
    assert page_scores(q, page_bounds(k, 16)).tolist() == [[[[-5.0]]]]
