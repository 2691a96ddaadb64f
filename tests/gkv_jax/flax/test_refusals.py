"""What cannot be served is refused by name, with the way out, before anything is generated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from gkv_jax import CacheSpec, Engine, UserError
from gkv_jax.flax import from_linen, from_nnx
from gkv_jax.models.protocol import AttentionLayer
from tests.gkv_jax.flax.conftest import TOKENIZER, head
from tests.gkv_jax.flax.models import LONGEST, VOCAB, Learned, Linen, made, made_linen


class NoMask(Learned):
    def mask(self, tokens: jax.Array) -> None:
        return None


class Prefix(Learned):
    """The first four tokens see one another."""

    def mask(self, tokens: jax.Array) -> jax.Array:
        at = jnp.arange(tokens.shape[1])
        causal = at[None, :] <= at[:, None]
        return (causal | (at[None, :] < 4))[None, None]


class CountsByItself(Learned):
    def __call__(self, tokens: jax.Array) -> jax.Array:  # type: ignore[override]
        return self.out(self.trunk(tokens, None))


class Direct(Learned):
    """One of its layers attends past the hook."""

    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = super().trunk(tokens, positions)
        q = x[:, :, None, :]
        return x + jax.nn.dot_product_attention(q, q, q, is_causal=True)[:, :, 0]


class Draws(Learned):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:  # type: ignore[override]
        x = self.trunk(tokens, positions)
        return self.out(x + jax.random.normal(self.rngs.noise(), x.shape))


class Counts(Learned):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:  # type: ignore[override]
        self.calls[...] = self.calls[...] + 1.0
        return super().__call__(tokens, positions)


class Pooled(Learned):
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:  # type: ignore[override]
        return self.trunk(tokens, positions).mean(axis=1)


class Remat(Learned):
    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = nnx.remat(type(block).__call__)(block, x, self.mask(tokens))
        return self.norm(x)


class NoAttention(Learned):
    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        return self.norm(self.tokens(tokens))


class Clamps(Learned):
    """A table that is read by indexing, which gives its last row beyond its end."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.table = nnx.Param(jnp.zeros((64, 32)))

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:  # type: ignore[override]
        x = self.tokens(tokens) + self.table[...][positions]
        return self.out(self.blocks[0](x, self.mask(tokens)))


class Averages(Learned):
    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = super().trunk(tokens, positions)
        return x + x.mean(axis=0, keepdims=True)


class FirstRows(Learned):
    """It takes the positions of the first row for everybody's."""

    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        assert positions is not None
        return super().trunk(tokens, positions[:1])


class Biased(Learned):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.out = nnx.Linear(32, VOCAB, rngs=rngs)


class Capped(Learned):
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:  # type: ignore[override]
        return jnp.tanh(super().__call__(tokens, positions))


class Windowed(Learned):
    """A window that a short text does not show."""

    def mask(self, tokens: jax.Array) -> jax.Array:
        at = jnp.arange(tokens.shape[1])
        distance = at[:, None] - at[None, :]
        return ((distance >= 0) & (distance < 60))[None, None]


def scaled(query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
    """An attention_fn of a user's own, which the hook would replace by another."""
    return nnx.dot_product_attention(3.0 * query, key, value, **options)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (NoMask, {}, "layer 0 has no mask"),
        (Prefix, {}, "neither causal nor a causal window"),
        (Draws, {}, "changes rngs"),
        (Counts, {}, "changes calls"),
        (Pooled, {}, r"returns \[1, 32\]"),
        (Remat, {}, "own jit, remat, scan or vmap"),
        (NoAttention, {}, "no attention was found"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_models(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_nnx(made(model, **options), max_positions=LONGEST, check=False)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (CountsByItself, {}, "counts positions by itself"),
        (Direct, {}, "past attention_fn or attend"),
        (functools.partial(Learned, attention_fn=scaled), {}, "attention is not softmax"),
        (Clamps, {}, "94 and 95 are the same to it"),
        (Averages, {}, "rows of a batch depend on one another"),
        (FirstRows, {}, "rows of a batch depend on one another"),
        (Biased, {"method": "states", "head": head}, "a bias, scale, soft cap or norm"),
        (Capped, {"method": Capped.states, "head": head}, "a bias, scale, soft cap or norm"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_models_that_differ_through_a_cache(
    model: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        from_nnx(made(model), max_positions=LONGEST, **given)


def test_windows_are_seen_at_full_length_and_must_be_those_of_layers() -> None:
    model = made(Windowed)
    given: dict[str, Any] = {"max_positions": LONGEST, "check": False}
    for more in ({"example": [1, 2, 3]}, {"layers": [AttentionLayer(None, window=60)]}):
        decoder, _ = from_nnx(model, **given, **more)
        assert [layer.window for layer in decoder.layers] == [60]
    for window in (None, 59, 61):
        with pytest.raises(UserError, match=f"window is {window}, but .* sees 60 positions"):
            from_nnx(model, **given, layers=[AttentionLayer(None, window)])
    with pytest.raises(UserError, match=r"window is 60, but .* sees all positions"):
        from_nnx(made(Learned), **given, layers=[AttentionLayer(None, 60)])


def test_a_head_that_would_not_be_trained() -> None:
    model = made(Learned)
    with pytest.raises(UserError, match="head does not depend on its argument"):
        from_nnx(
            model,
            max_positions=LONGEST,
            method="states",
            head=lambda _: model.tokens.embedding[...],
            check=False,
        )


@dataclasses.dataclass
class Options:
    layers: int = 1


def test_a_model_that_cannot_be_compared() -> None:
    model = made(Learned)
    model.options = Options()
    with pytest.raises(UserError, match=r"'Options'.*frozen=True"):
        from_nnx(model, max_positions=LONGEST, check=False)


class Asks(Learned):
    """Attention of a user's own that gives its function more than Flax's layers do."""

    def __init__(self, rngs: nnx.Rngs, attention_fn: Any, **asked: Any) -> None:
        super().__init__(rngs)
        self.attention_fn, self.asked = attention_fn, tuple(asked.items())

    def trunk(self, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        x = self.tokens(tokens) + self.places(positions)
        q = x.reshape(*tokens.shape, 4, 8)
        out = self.attention_fn(q, q, q, is_causal=True, **dict(self.asked))
        return self.norm(x + out.reshape(x.shape))


def test_what_attention_functions_are_asked() -> None:
    plain = jax.nn.dot_product_attention
    given: dict[str, Any] = {"max_positions": LONGEST}
    # Compared with the model as it is: the scale has arrived, whoever gave it.
    from_nnx(made(Asks, attention_fn=plain, scale=0.1, implementation="xla"), **given)
    from_nnx(made(Asks, attention_fn=functools.partial(plain, scale=0.1)), **given)
    with pytest.raises(UserError, match=r"local_window_size.*take our attend"):
        from_nnx(made(Asks, attention_fn=plain, local_window_size=(7, 0)), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_positions": 0}, "max_positions is 0"),
        ({"method": "forward"}, "'forward', which Learned does not have"),
        ({"positions": "offsets"}, "positions is 'offsets'"),
        ({"options": {"names": []}}, "not hashable"),
        ({"options": {"loud": True}}, "unexpected keyword argument 'loud'"),
        ({"method": "states", "head": lambda model: model.out.kernel[...]}, r"must be \[V,32\]"),
        ({"layers": [AttentionLayer(None)] * 2}, "layers has 2 entries; the model has 1"),
        ({"method": Linen.setup}, "'setup', which Learned does not have"),
        ({"example": [VOCAB]}, "token ids from 0 to 289"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_nnx(made(Learned), **{"max_positions": LONGEST, "check": False} | given)


def test_caches_of_the_models_own() -> None:
    model = made(Learned)
    model.blocks[0].attention.decode = True
    with pytest.raises(UserError, match="decode=True"):
        from_nnx(model, max_positions=LONGEST, check=False)
    model.blocks[0].attention.init_cache((1, 8, 32))
    with pytest.raises(UserError, match=r"nnx\.Cache"):
        from_nnx(model, max_positions=LONGEST, check=False)
    variables = made_linen(Linen(), train=False)
    given: dict[str, Any] = {"max_positions": LONGEST, "options": {"train": False}, "check": False}
    with pytest.raises(UserError, match="decode=True"):
        from_linen(Linen(decode=True), variables, **given)
    with pytest.raises(UserError, match="'cache'"):
        from_linen(Linen(), variables | {"cache": {}}, **given)


def test_linen() -> None:
    variables = made_linen(Linen(), train=False)
    given: dict[str, Any] = {"max_positions": LONGEST, "check": False}
    with pytest.raises(UserError, match="dropout"):
        from_linen(Linen(), variables, options={"train": True}, **given)
    with pytest.raises(UserError, match="own jit, remat, scan or vmap"):
        from_linen(
            Linen(remat=True),
            made_linen(Linen(remat=True), train=False),
            options={"train": False},
            **given,
        )
    with pytest.raises(UserError, match="train"):
        from_linen(Linen(), variables, **given)
    with pytest.raises(UserError, match=r"give a linen\.Module"):
        from_linen(made(Learned), variables, **given)
    with pytest.raises(UserError, match=r"give an nnx\.Module"):
        from_nnx(Linen(), **given)

    class Batched(linen.Module):
        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = linen.Embed(VOCAB, 32)(tokens)
            x = linen.MultiHeadDotProductAttention(4)(x, mask=linen.make_causal_mask(tokens))
            return linen.BatchNorm(use_running_average=False)(x)

    with pytest.raises(UserError, match="ModifyScopeVariableError"):
        from_linen(Batched(), made_linen(Batched()), **given)


def test_caches_that_would_need_unrotated_keys() -> None:
    decoder, params = from_nnx(made(Learned), max_positions=LONGEST, check=False)

    def engine(**cache: Any) -> Engine:
        return Engine(decoder, params, TOKENIZER, cache=CacheSpec(**cache))

    with pytest.raises(UserError, match="positions 'text'"):
        engine(sinks=4, window=60, positions="cache")
    with pytest.raises(UserError, match="queries before rotation"):
        engine(kept=8, window=60, policy="expected_attention")
    with pytest.raises(UserError, match="more than the 96 positions"):
        engine(sinks=4, window=200)
