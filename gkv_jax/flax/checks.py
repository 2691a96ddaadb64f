"""What must be known of a user's model, found out once, and whether it really attends through us.

A model is traced without being run for its layers and shapes. Its masks are compared with the causal one
at full length. Then a short text goes through the model as it is, in one piece beside another one, and in
two chunks through a cache: whatever the model does that the cache cannot know shows there.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.errors import UserError
from gkv_jax.flax.attention import INSIDE, CausalAttend
from gkv_jax.flax.decoder import AnyDecoder, FlaxDecoder
from gkv_jax.models.protocol import AttentionLayer, Params
from gkv_jax.prefill import chunk_hidden, pad

LONGEST_MASK = 8192
"""Tokens at which masks are looked at, at most: a window as wide is not seen."""
# Tokens compared: of a model with Flax's attention, and with a function of its own.
_SHORT, _LONG = 48, 1024


def completed(
    decoder: AnyDecoder,
    params: Params,
    *,
    layers: Sequence[AttentionLayer] | None,
    example: Sequence[int] | None,
    check: bool,
) -> AnyDecoder:
    """``decoder`` with everything that is known of the model only once it has been traced.

    Args:
      layers: what the caller says of them, or None.
      example: a text to look at the model with; None for random tokens.
      check: whether to compare, too.

    Raises:
      UserError: the model cannot be served, with the reason and the way out.
    """
    try:
        return _completed(decoder, params, layers, example, check)
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(INSIDE) from error


def _completed(
    decoder: AnyDecoder,
    params: Params,
    layers: Sequence[AttentionLayer] | None,
    example: Sequence[int] | None,
    check: bool,
) -> AnyDecoder:
    decoder = _traced(decoder, params, layers)
    text = _text(decoder, example)
    is_custom = False
    if decoder.calling.attend is None:
        decoder, is_custom = _with_windows(decoder, params, text, stated=layers is not None)
    if check:
        with jax.default_matmul_precision("highest"):
            lively = jax.tree.map(_lively, params)
            _compare(decoder, lively, text[: _LONG if is_custom else _SHORT])
    return decoder


def _traced(
    decoder: AnyDecoder, params: Params, layers: Sequence[AttentionLayer] | None
) -> AnyDecoder:
    """With shapes and layers."""
    recorder = _Recorder(min(8, decoder.max_positions))

    uses_positions = decoder.calling.positions is not None

    def run(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        nonlocal uses_positions
        recorder.keys.clear()
        out, inner, _ = decoder.attend_through(params, tokens, recorder)
        uses_positions |= inner.gave_positions
        head = None if decoder.head_of is None else decoder.head_of(decoder.bind(params))
        if not all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(head)):
            raise UserError(
                "head does not depend on its argument: what it gives would stay as it is while the model "
                "trains; take the weights from what it is called with"
            )
        # A key from inside of a transformation of the model's own cannot be used here.
        return out, head, sum((k.sum().astype(jnp.float32) for k in recorder.keys), jnp.zeros(()))

    tokens = jax.ShapeDtypeStruct(recorder.positions.shape, jnp.int32)
    try:
        out, head, _ = jax.eval_shape(run, params, tokens)
    except (UserError, jax.errors.UnexpectedTracerError):
        raise
    except Exception as error:
        raise UserError(
            f"model: calling {decoder.calling.method} failed: {type(error).__name__}: {error}; see the "
            "arguments tokens, positions and options"
        ) from error
    if not recorder.shapes:
        raise UserError(
            "model: no attention was found that can be hooked; attend through the attention_fn of "
            "nnx.MultiHeadAttention or linen.MultiHeadDotProductAttention (or of a module of yours, with "
            "attention_fn among its attributes), or take our attend as an argument"
        )
    if len(set(recorder.shapes)) > 1:
        raise UserError(
            f"model: its layers differ in heads or their width ({sorted(set(recorder.shapes))}: query heads, "
            "KV heads, width); only equal ones are served"
        )
    shape: tuple[int, ...] = getattr(out, "shape", ())
    if len(shape) != 3 or shape[:2] != tokens.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise UserError(
            f"model: {decoder.calling.method} returns {_described(out)} for tokens {list(tokens.shape)}; it "
            "must be logits [B,N,V], or hidden states [B,N,Dm] beside the argument head"
        )
    if decoder.head_of is not None:
        width: tuple[int, ...] = getattr(head, "shape", ())
        if len(width) != 2 or width[1] != shape[2]:
            raise UserError(
                f"head gives {_described(head)}; it must be [V,{shape[2]}], a row for each token: the "
                "embedding as it is, or the transpose of a Linear's kernel"
            )
        vocab_size = width[0]
    else:
        vocab_size = shape[2]
    heads, kv_heads, dim = recorder.shapes[0]
    if layers is not None and len(layers) != len(recorder.shapes):
        raise UserError(f"layers has {len(layers)} entries; the model has {len(recorder.shapes)}")
    return dataclasses.replace(
        decoder,
        vocab_size=vocab_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        layers=tuple(layers or [AttentionLayer(rope=None)] * len(recorder.shapes)),
        dtype=out.dtype,
        cache_dtype=functools.reduce(jnp.promote_types, recorder.dtypes),
        uses_positions=uses_positions,
    )


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else str(list(shape))


class _Recorder:
    """``Attend`` that looks at shapes."""

    def __init__(self, length: int) -> None:
        self.positions = jnp.arange(length)[None]
        self.keys: list[jax.Array] = []
        self.shapes: list[tuple[int, int, int]] = []
        self.dtypes: list[jnp.dtype] = []

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        shapes = [list(each.shape) for each in (q, k, v)]
        if k.shape != v.shape or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
            raise UserError(
                f"model: layer {layer} attends with q, k, v {shapes}; keys and values must be [B,N,Hk,D] and "
                "queries [B,N,Hq,D], Hq a multiple of Hk"
            )
        if layer == 0:
            self.shapes.clear()
            self.dtypes.clear()
        self.keys.append(k)
        self.shapes.append((q.shape[2], k.shape[2], q.shape[3]))
        self.dtypes.append(k.dtype)
        return q


class _Nothing:
    """``Attend`` that sees nothing."""

    def __init__(self, positions: jax.Array) -> None:
        self.positions = positions

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        return jnp.zeros_like(q)


def _text(decoder: FlaxDecoder, example: Sequence[int] | None) -> NDArray[np.int32]:
    """``example``, or random tokens but 0, which often stands for padding: int32 ``[L]``."""
    if example is None:
        random = np.random.default_rng(0)
        first = min(1, decoder.vocab_size - 1)
        return random.integers(first, decoder.vocab_size, _longest(decoder), np.int32)
    text = np.asarray(example, np.int32)[: _longest(decoder)]
    if text.ndim != 1 or text.size < 2 or text.min() < 0 or text.max() >= decoder.vocab_size:
        raise UserError(f"example must be two or more token ids from 0 to {decoder.vocab_size - 1}")
    return text


def _longest(decoder: FlaxDecoder) -> int:
    return min(decoder.max_positions, LONGEST_MASK)


def _with_windows(
    decoder: AnyDecoder, params: Params, text: NDArray[np.int32], *, stated: bool
) -> tuple[AnyDecoder, bool]:
    """With the windows of the masks, and whether attention is a function of the user's own."""
    from_flax: list[bool] = []
    has_mask: list[bool] = []
    text = np.resize(text, _longest(decoder))  # an example may be shorter than a window

    @jax.jit
    def masks(params: Params, tokens: jax.Array) -> jax.Array:
        """Per layer whether it is a causal mask with a window, and that window: int32 ``[layers,2]``."""
        _, _, hook = decoder.attend_through(params, tokens, _Nothing(jnp.arange(text.size)[None]))
        assert hook is not None
        found, known = [], dict[int, jax.Array]()
        for call in hook.calls:
            from_flax.append(call.original.__module__.startswith("flax."))
            has_mask.append(call.mask is not None or call.is_causal)
            key = id(call.mask) * 2 + call.is_causal
            if key not in known:
                known[key] = _window(call.mask, call.is_causal, text.size)
            found.append(known[key])
        return jnp.stack(found)

    found = np.asarray(masks(params, text[None]))
    layers = list(decoder.layers)
    for index, (is_causal, window) in enumerate(found):
        if not has_mask[index]:
            if from_flax[index]:
                raise UserError(
                    f"model: attention layer {index} has no mask, so that tokens see those after them; pass "
                    "a causal one (nnx.make_causal_mask, linen.make_causal_mask)"
                )
            continue
        if not is_causal:
            raise UserError(
                f"model: the mask of attention layer {index} is neither causal nor a causal window, which is "
                "all that a cache can serve; a mask that hides padding is fine if no token of the example "
                "is padding (give example)"
            )
        told = min(layers[index].window or text.size, text.size)
        if not stated:
            layers[index] = dataclasses.replace(
                layers[index], window=int(window) if window < text.size else None
            )
        elif told > window or (told < window and from_flax[index]):
            raise UserError(
                f"layers[{index}].window is {layers[index].window}, but by its mask the layer sees "
                f"{window if window < text.size else 'all'} positions; say the same in both"
            )
    return dataclasses.replace(decoder, layers=tuple(layers)), not all(from_flax)


def _window(mask: jax.Array | None, is_causal: bool, length: int) -> jax.Array:
    """Whether a mask is causal, with a window, and the window: int32 ``[2]``."""
    at = jnp.arange(length)
    distance = at[:, None] - at[None, :]
    seen = jnp.ones((1, 1, length, length), bool) if mask is None else mask.astype(bool)
    seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
    if is_causal:
        seen &= (distance >= 0)[None, None]
    window = jnp.where(seen, distance[None, None], 0).max() + 1
    expected = (distance >= 0) & (distance < window)
    return jnp.stack([jnp.all(seen == expected[None, None]).astype(jnp.int32), window])


def _compare(decoder: FlaxDecoder, params: Params, text: NDArray[np.int32]) -> None:
    """Raise UserError if the model says something else through a cache than by itself."""
    own, beside_another = _own(decoder, params, text)
    cached, at_the_end = _through_cache(decoder, params, text)
    if not np.isfinite(own.out).all() or not np.isfinite(cached).all():
        raise UserError("model: it gives NaN or infinities for a short text; see its weights")
    if not np.isfinite(at_the_end).all():
        raise UserError(
            f"model: it gives NaN at position {decoder.max_positions - 1}; set max_positions to the rows of "
            "its position table"
        )
    _check_last_positions(decoder, cached[0], at_the_end)
    floats = [leaf.dtype for leaf in jax.tree.leaves(params) if _is_floating(leaf)]
    dtypes = [decoder.dtype, decoder.cache_dtype, *floats]
    tolerance = 2e-3 if min(jnp.finfo(dtype).bits for dtype in dtypes) >= 32 else 0.15
    if (error := _error(own.out, beside_another.out).max()) > tolerance:
        raise UserError(
            f"model: the rows of a batch depend on one another ({error:.2g} of its outputs' spread), by "
            "sums over the batch or by the positions of another row; requests share batches, so make "
            "each row's output its own"
        )
    if own.projected is not None and (error := _error(own.logits, own.projected).max()) > tolerance:
        raise UserError(
            f"head: hidden states of {decoder.calling.method} times it differ from what the model's __call__ "
            f"gives ({error:.2g} of its spread): a bias, scale, soft cap or norm lies between. Let method do "
            "the norm, fold a scale into the head, cap with pallas_kernels.masked_head.SoftCapped(head, "
            "cap); with a bias leave head and method out, so that the model gives its logits"
        )
    errors = _error(own.out, cached)
    if errors.max() <= tolerance:
        return
    what = (
        f"model: through a cache it differs from itself ({errors.max():.2g} of its outputs' spread)"
    )
    if errors[: _first_chunk(text.size)].max() > tolerance:
        raise UserError(
            f"{what} already in a text's first tokens: attention is not softmax(q·k / sqrt(D)) under its "
            "mask (a scale, soft cap or rotation in an attention_fn of its own?), or the pass is random; "
            "rotate before attention_fn is called, and take our attend as an argument for the rest"
        )
    if _mixes(decoder, params, text):
        raise UserError(
            f"{what}: tokens see each other past attention_fn or attend, where no cache is (attention "
            "called directly, as by jax.nn.dot_product_attention? a convolution?); attend through "
            "attention_fn, or take our attend as an argument"
        )
    known = decoder.calling.positions
    raise UserError(
        f"{what}: a chunk is taken for the beginning of a text, "
        + (
            "since the model counts positions by itself; give it an argument positions, int32 [B,N], to be "
            "used wherever it needs them (or say how yours is called)"
            if known is None
            else f"so {known} is not used wherever the model needs positions; if masks have windows wider "
            "than a text can show, say so in layers"
        )
    )


Array = NDArray[np.float64]


def _error(expected: Array, found: Array) -> Array:
    """How far outputs ``[L,...]`` lie from each other: ``[L]``."""
    # Against what differs between the tokens of the text: logits have much in common.
    differs = expected - expected.mean(axis=(0, -1), keepdims=True)
    differs -= differs.mean(axis=0, keepdims=True)
    spread = max(float(np.sqrt(np.mean(differs**2))), 1e-12)
    error: Array = np.sqrt(np.mean((expected - found) ** 2, axis=-1)) / spread
    return error


def _first_chunk(length: int) -> int:
    return length // 2 + 1


class _Own(NamedTuple):
    """Outputs ``[L,...]`` of the model as it is; where they compare, its logits and those by the head."""

    out: Array
    logits: Array
    projected: Array | None


def _own(decoder: FlaxDecoder, params: Params, text: NDArray[np.int32]) -> tuple[_Own, _Own]:
    """Of the text beside itself, and beside another one at other positions."""
    whole = _whole(decoder)

    def call(decoder: FlaxDecoder, params: Params, tokens: jax.Array, real: jax.Array) -> jax.Array:
        attend = CausalAttend(decoder.layers, (2, text.size), mask=real)
        given = attend if decoder.calling.needs_attend else None
        return decoder.run(params, tokens, attend.positions, given)

    tokens, real = np.stack([text, text]), np.ones((2, text.size), bool)
    if whole is not None:
        try:
            shape = jax.eval_shape(functools.partial(call, whole), params, tokens, real).shape
        except Exception:  # it has other arguments
            shape = ()
        if shape != (*tokens.shape, decoder.vocab_size):
            whole = None

    @jax.jit
    def run(
        params: Params, tokens: jax.Array, real: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        out = call(decoder, params, tokens, real)
        if whole is None:
            return out, out, None
        return out, call(whole, params, tokens, real), decoder.logits(params, out)

    def row(index: int) -> _Own:
        found: _Own = jax.tree.map(
            lambda x: np.asarray(x[index], np.float64), _Own(*run(params, tokens, real))
        )
        return found

    alone = row(0)
    tokens[0], real[0, 0] = np.roll(text, 1), False  # positions count what exists
    return alone, row(1)


def _whole(decoder: FlaxDecoder) -> FlaxDecoder | None:
    """The decoder that calls the model itself, where the one given calls another method."""
    if decoder.head_of is None or decoder.calling.method == "__call__":
        return None
    calling = dataclasses.replace(decoder.calling, method="__call__")
    return dataclasses.replace(decoder, calling=calling, head_of=None)


def _through_cache(
    decoder: FlaxDecoder, params: Params, text: NDArray[np.int32]
) -> tuple[Array, Array]:
    """Outputs ``[L,...]`` of two chunks through a cache; of its first token at the last two positions.

    All of them come from one program.
    """
    spec, split = CacheSpec.full(text.size), _first_chunk(text.size)

    def empty() -> Cache:
        return init_cache(spec, decoder, 1, jnp.dtype(decoder.cache_dtype))

    def read(cache: Cache, start: int, part: NDArray[np.int32]) -> tuple[Array, Cache]:
        at = np.int32(0), np.int32(start), np.int32(part.size)
        tokens = pad(part, split)
        out, cache = chunk_hidden(params, cache, tokens, *at, model=decoder, spec=spec)
        return np.asarray(out[: part.size], np.float64), cache

    first, cache = read(empty(), 0, text[:split])
    second, _ = read(cache, split, text[split:])
    last = [read(empty(), decoder.max_positions - back, text[:1])[0] for back in (2, 1)]
    return np.concatenate([first, second]), np.concatenate(last)


def _check_last_positions(decoder: FlaxDecoder, at_0: Array, at_the_end: Array) -> None:
    """Raise UserError if a model that knows positions cannot tell the last two apart."""
    if decoder.max_positions < 4 or not np.array_equal(*at_the_end):
        return
    if np.abs(at_the_end[1] - at_0).max() > 1e-2 * np.abs(at_0).max():
        last = decoder.max_positions - 1
        raise UserError(
            f"model: it knows positions, but {last - 1} and {last} are the same to it, as where a table is "
            "read beyond its end; set max_positions to the rows of its position table"
        )


def _mixes(decoder: FlaxDecoder, params: Params, text: NDArray[np.int32]) -> bool:
    """Whether the last output depends on earlier tokens although attention sees nothing."""

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        return decoder.hidden(params, tokens, _Nothing(jnp.arange(text.size)[None]))[0, -1]

    other = np.append(np.roll(text[:-1], 1), text[-1])
    one, another = (np.asarray(run(params, each[None]), np.float64) for each in (text, other))
    return not np.allclose(one, another, rtol=1e-5, atol=1e-5 * np.abs(one).max())


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


@jax.jit
def _is_constant(leaf: jax.Array) -> jax.Array:
    return jnp.all(leaf == leaf.reshape(-1)[0])


def _lively(leaf: Any) -> Any:
    """A weight as it might be once trained: tables and projections that begin at 0 would hide mistakes."""
    if not _is_floating(leaf) or leaf.size == 0 or not _is_constant(leaf):
        return leaf
    size = 0.5 if leaf.ndim < 2 else 0.1
    noise = size * np.sin(1.7 * np.arange(leaf.size, dtype=np.float32) + 1.0)
    lively = (np.asarray(leaf, np.float32) + noise.reshape(leaf.shape)).astype(leaf.dtype)
    return jax.device_put(lively, leaf.sharding) if isinstance(leaf, jax.Array) else lively
