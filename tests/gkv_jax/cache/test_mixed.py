"""Models whose layers differ, in a bounded cache: each layer against the list, with its window and base."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache import Cache, CacheSpec, Layout, check_layers, commit, init_cache, reset_row
from gkv_jax.errors import UserError
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import AttentionLayer, Decoder
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.prefill import chunk_hidden, read_prompt
from gkv_jax.rope import Rope, inverse_frequencies
from gkv_jax.step import StepInputs, forward
from tests.gkv_jax.cache.evicting import EvictingList
from tests.gkv_jax.cache.test_streaming import close, inputs_for
from tests.gkv_jax.models.mixed import TEXT as LONG_TEXT
from tests.gkv_jax.models.mixed import WINDOW, dense_logits, gemma3, gpt_oss
from tests.gkv_jax.oracle import Entry, ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

LOCAL, WIDE = 7, 20
"""Windows below and above what a query sees under every bounded spec of `SPECS`."""


@dataclasses.dataclass(frozen=True)
class MixedLlama(Llama):
    """A Llama with a window for each layer; those that have one turn faster than the global ones."""

    windows: tuple[int | None, ...]

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        local = Rope(RopeConfig(theta=30.0), self.head_dim)
        everywhere = Rope(self.config.rope, self.head_dim)
        return tuple(
            AttentionLayer(everywhere if window is None else local, window)
            for window in self.windows
        )


CONFIG = tiny_config(num_layers=3)
MODEL = MixedLlama(CONFIG, windows=(LOCAL, None, WIDE))
PARAMS = random_params(CONFIG)
TEXT = np.random.default_rng(11).integers(0, CONFIG.vocab_size, 44).tolist()
SPECS = {
    "window": CacheSpec(sinks=3, window=12, max_drafts=2, prefill_chunk=16),
    "full": CacheSpec(policy="full", sinks=0, window=64, max_drafts=2, prefill_chunk=16),
    "snapkv": CacheSpec(
        policy="snapkv", sinks=2, kept=6, window=7, max_drafts=2, observe=4, pool=3,
        prefill_chunk=16,
    ),
    "h2o every 4": CacheSpec(
        policy="h2o", sinks=2, kept=5, window=10, interval=4, max_drafts=2, prefill="chunks",
        prefill_chunk=16,
    ),
}  # fmt: skip
# Around the local window, the sinks and window of each spec, and a chunk.
LENGTHS = (6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17)


class _PerLayer(ListCache):
    """A list for each layer of ``MixedLlama``: its rotation, and its window where that is narrow."""

    def __init__(self, model: MixedLlama, params: Any, spec: CacheSpec) -> None:
        super().__init__(model.config, params, spec)
        self.by_layer = [
            inverse_frequencies(layer.rope.config, layer.rope.head_dim) for layer in model.layers
        ]
        visible = spec.sinks + spec.kept + spec.window
        # Where sinks and kept tokens are as far away as they are in the text, no local layer has any.
        narrow = not spec.by_rank and spec.policy != "full"
        self.narrow = [
            min(w, visible) if w is not None and (w < visible or narrow) else None
            for w in model.windows
        ]

    def visible(self, layer: int, head: int, position: int) -> list[Entry]:
        window = self.narrow[layer]
        if window is None:
            return super().visible(layer, head, position)
        return [e for e in self.entries[layer] if e.position > position - window]

    def _attend(self, layer: int, q: np.ndarray, position: int) -> np.ndarray:
        spec, self.inv_freq = self.spec, self.by_layer[layer]
        if self.narrow[layer] is not None:
            self.spec = dataclasses.replace(spec, positions="text")
        out = super()._attend(layer, q, position)
        self.spec = spec
        return out

    def snapkv(self, length: int) -> None:
        chosen = []
        for layer, inv_freq in enumerate(self.by_layer):
            self.inv_freq = inv_freq
            super().snapkv(length)
            assert self.kept is not None
            chosen.append(self.kept[layer])
        self.kept = chosen


class _PerLayerEvicting(_PerLayer, EvictingList):
    def scores(self, layer: int, lists: list[list[Entry]], next_pos: int) -> list[list[float]]:
        self.inv_freq = self.by_layer[layer]
        return super().scores(layer, lists, next_pos)


@functools.cache
def expected_logits(name: str, prompt: int = 0) -> np.ndarray:
    """Logits ``[T,V]`` by the list, after a prompt of so many tokens was read (0 for one by one)."""
    spec = SPECS[name]
    oracle = (_PerLayerEvicting if spec.evictor else _PerLayer)(MODEL, PARAMS, spec)
    start = prompt if spec.selects(prompt) else 0
    if start:
        oracle.read_prompt(TEXT[:start])
        oracle.snapkv(start)
    logits = [oracle.step(TEXT[at], at) for at in range(start, len(TEXT))]
    return np.concatenate([np.full((start, CONFIG.vocab_size), np.nan), logits])


@functools.partial(jax.jit, static_argnames=("spec", "model"))
def step(
    params: Any,
    cache: Cache,
    inputs: StepInputs,
    n_new: jax.Array,
    *,
    spec: CacheSpec,
    model: Decoder,
) -> tuple[jax.Array, Cache]:
    """Logits of a step of which the first ``n_new [B]`` tokens count, and the cache after it."""
    hidden, cache, pending = forward(params, cache, inputs, model=model, spec=spec)
    after = inputs.next_pos + n_new
    cache = commit(cache, pending, inputs.next_pos, after, model=model, spec=spec)
    return model.logits(params, hidden), cache


def one(
    cache: Cache,
    token: int,
    at: int,
    spec: CacheSpec,
    model: Decoder = MODEL,
    params: Any = PARAMS,
) -> tuple[np.ndarray, Cache]:
    """A step of one token in row 1 of two, the other idle."""
    rows, n_new = inputs_for([None, ([token], at)], spec), jnp.array([0, 1], jnp.int32)
    logits, cache = step(params, cache, rows, n_new, spec=spec, model=model)
    return np.asarray(logits[1, 0]), cache


@pytest.mark.parametrize("name", SPECS)
def test_one_token_at_a_time_equals_the_list(name: str) -> None:
    spec, expected = SPECS[name], expected_logits(name)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for at, token in enumerate(TEXT):
        logits, cache = one(cache, token, at, spec)
        close(logits, expected[at])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_equals_the_list(name: str, length: int) -> None:
    """In chunks, or whole where a policy selects; row 1 is used a second time, after another text."""
    spec, expected = SPECS[name], expected_logits(name, length)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    for text in (TEXT[:-31:-1], TEXT[:length]):
        cache = reset_row(cache, np.int32(1), spec=spec, model=MODEL)
        cache = read_prompt(PARAMS, cache, text, 1, model=MODEL, spec=spec)
    for at in range(length, len(TEXT)):
        logits, cache = one(cache, TEXT[at], at, spec)
        close(logits, expected[at])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_rejected_drafts_leave_no_trace(name: str, seed: int) -> None:
    """Random drafts, of which random prefixes are right, in two rows at different phases."""
    spec, rng = SPECS[name], np.random.default_rng(seed)
    length = (9, 14, 17)[seed]
    expected = expected_logits(name, length)
    cache, at = init_cache(spec, MODEL, 2, jnp.float32), [length, length]
    for row in range(2):
        cache = read_prompt(PARAMS, cache, TEXT[:length], row, model=MODEL, spec=spec)
    while min(at) < len(TEXT):
        rows, right = random_rows(rng, spec, at, TEXT, CONFIG.vocab_size)
        logits, cache = step(
            PARAMS, cache, inputs_for(rows, spec), jnp.array(right, jnp.int32),
            spec=spec, model=MODEL,
        )  # fmt: skip
        for row, count in enumerate(right):
            close(logits[row, :count], expected[at[row] : at[row] + count])
            at[row] += count


def random_rows(
    rng: np.random.Generator, spec: CacheSpec, at: list[int], text: list[int], vocab: int
) -> tuple[list[tuple[list[int], int] | None], list[int]]:
    """A step's rows for ``inputs_for``, some idle, and how many tokens of each are ``text``'s."""
    rows: list[tuple[list[int], int] | None] = []
    right = []
    for start in at:
        if start >= len(text) or rng.random() < 0.2:
            rows.append(None)
            right.append(0)
            continue
        drafts = int(
            rng.integers(0, min(spec.room_for_drafts(start), len(text) - 1 - start), endpoint=True)
        )
        good = int(rng.integers(0, drafts, endpoint=True))
        wrong = rng.integers(0, vocab, drafts - good).tolist()
        rows.append((text[start : start + 1 + good] + wrong, start))
        right.append(1 + good)
    return rows, right


def test_each_layer_holds_what_it_can_see() -> None:
    """Below the total, a layer's own window is all; above it, it follows the spec, but for true positions."""
    spec = SPECS["h2o every 4"]
    own, wide = (
        CacheSpec(sinks=0, window=window, max_drafts=2, positions="text", prefill_chunk=16)
        for window in (LOCAL, spec.total)
    )
    assert Layout.of(spec, MODEL) == Layout(specs=(own, spec, wide), group=(0, 1, 2))
    ranked = SPECS["window"]
    assert Layout.of(ranked, MODEL) == Layout(specs=(own, ranked), group=(0, 1, 1))
    assert (own.capacity, spec.capacity, wide.capacity) == (16, 24, 24)
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    assert [layer.k.data.shape[2] for layer in cache.layers] == [16, 24, 24]
    local, everywhere, _ = cache.layers
    assert local.mass is None
    assert local.kept_pos is None
    assert everywhere.mass is not None
    assert everywhere.kept_pos is not None
    # 2 rows, 2 KV heads of 8 channels, float32: keys and values.
    assert local.k.nbytes + local.v.nbytes == 2 * 2 * 2 * 16 * 8 * 4

    full = init_cache(SPECS["full"], MODEL, 2, jnp.float32)
    assert [layer.k.data.shape[2] for layer in full.layers] == [16, 72, 24]
    assert len(full.slots) == 3


def test_a_window_as_wide_as_the_total_follows_the_spec() -> None:
    spec = SPECS["window"]
    at, below = (MixedLlama(CONFIG, windows=(w, None, None)) for w in (spec.total, spec.total - 1))
    assert Layout.of(spec, at).specs == (spec,)
    assert Layout.of(spec, below).spec(0).window == spec.total - 1


def test_local_layers_are_stored_like_the_others() -> None:
    spec = CacheSpec(sinks=3, window=12, dtype="int8")
    assert {each.dtype for each in Layout.of(spec, MODEL).specs} == {"int8"}
    cache = init_cache(spec, MODEL, 2, jnp.float32)
    assert {layer.k.data.dtype for layer in cache.layers} == {jnp.dtype(jnp.int8)}


def test_a_window_that_no_layer_could_use_is_refused() -> None:
    """Not where some layer is global, nor where nothing is evicted."""
    local = MixedLlama(CONFIG, windows=(LOCAL, WIDE, LOCAL))
    check_layers(CacheSpec(sinks=0, window=WIDE), local)
    check_layers(CacheSpec.full(512), local)
    check_layers(CacheSpec(sinks=0, window=WIDE + 1), MODEL)
    with pytest.raises(UserError, match=r"cache\.window is 21, .* at most 20"):
        check_layers(CacheSpec(sinks=0, window=WIDE + 1), local)


@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(sinks=2, window=WIDE),
        CacheSpec(policy="snapkv", sinks=0, kept=8, window=WIDE - 7),
        CacheSpec(policy="h2o", sinks=0, kept=4, window=8),
        CacheSpec(sinks=2, window=8, positions="text"),
    ],
)
def test_sinks_and_kept_tokens_that_no_layer_would_have_are_refused(spec: CacheSpec) -> None:
    local = MixedLlama(CONFIG, windows=(LOCAL, WIDE, LOCAL))
    with pytest.raises(UserError, match=r"cache\.sinks and cache\.kept are .* set both to 0"):
        check_layers(spec, local)
    check_layers(spec, MODEL)
    check_layers(CacheSpec(sinks=2, window=WIDE - 2), local)


@dataclasses.dataclass(frozen=True)
class WithLayers:
    """A decoder with other layers."""

    decoder: Any
    layers: tuple[AttentionLayer, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


@functools.cache
def mixed(name: str) -> tuple[Any, Any]:
    """A decoder whose local layers see 8 positions, and its parameters."""
    decoder, params, _ = {"gemma": gemma3, "gpt-oss": gpt_oss}[name](1)
    return decoder, params


def read_in_chunks(decoder: Decoder, params: Any, spec: CacheSpec, size: int) -> np.ndarray:
    """Logits ``[T,V]`` of ``LONG_TEXT``, read into row 1 of two."""
    cache, logits = init_cache(spec, decoder, 2, jnp.float32), []
    for start in range(0, len(LONG_TEXT), size):
        hidden, cache = chunk_hidden(
            params,
            cache,
            np.array(LONG_TEXT[start : start + size], np.int32),
            np.int32(1),
            np.int32(start),
            np.int32(size),
            model=decoder,
            spec=spec,
        )
        logits.append(decoder.logits(params, hidden))
    return np.concatenate(logits)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma", "gpt-oss"])
def test_gemma_and_gpt_oss_in_a_window_equal_dense_attention(name: str) -> None:
    """A window alone is a mask; the global layers have one of 11 and the local ones keep theirs."""
    decoder, params = mixed(name)
    spec = CacheSpec(sinks=0, window=11)
    layers = tuple(
        dataclasses.replace(layer, window=layer.window or 11) for layer in decoder.layers
    )
    expected = np.asarray(dense_logits(params, decoder=WithLayers(decoder, layers)))
    close(read_in_chunks(decoder, params, spec, 10), expected)


@pytest.mark.parametrize("name", ["gemma", "gpt-oss"])
def test_gemma_and_gpt_oss_do_not_depend_on_chunks_and_drafts(name: str) -> None:
    """With sinks at their ranks: one token at a time, in chunks, and with random drafts."""
    decoder, params = mixed(name)
    spec = CacheSpec(sinks=3, window=8, max_drafts=2)
    assert Layout.of(spec, decoder).specs[0].window == WINDOW < spec.total
    expected = read_in_chunks(decoder, params, spec, 10)
    cache = init_cache(spec, decoder, 2, jnp.float32)
    for at, token in enumerate(LONG_TEXT):
        logits, cache = one(cache, token, at, spec, decoder, params)
        close(logits, expected[at])

    rng, places = np.random.default_rng(5), [0, 0]
    cache = init_cache(spec, decoder, 2, jnp.float32)
    while min(places) < len(LONG_TEXT):
        rows, right = random_rows(rng, spec, places, LONG_TEXT, decoder.vocab_size)
        n_new = jnp.array(right, jnp.int32)
        logits, cache = step(params, cache, inputs_for(rows, spec), n_new, spec=spec, model=decoder)
        for row, count in enumerate(right):
            close(logits[row, :count], expected[places[row] : places[row] + count])
            places[row] += count
