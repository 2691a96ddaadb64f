"""One step of the decode loop on the device: the model's pass, then sampling and verification."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gkv_jax.bridge import IS_BIASED, WANTS_LOGPROBS
from gkv_jax.cache import Cache, CacheSpec, Pending, StepAttend
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.sampling import MAX_LOGPROBS
from pallas_kernels.dispatch import Implementation
from pallas_kernels.masked_head import project, sample_active
from pallas_kernels.masked_sample import Rows, masked_sample

Head = Literal["masked", "full"]
"""How a step reads the LM head: ``masked`` only where some row has a legal token; ``full`` whole, so
that a row's logits have the same bits whatever its neighbours may sample. While a row wants
log-probabilities or has biased logits, it is read whole in any case."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "n_drafts", "active", "logprobs", "go", "next_pos", "biased"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What a step starts from.

    Attributes:
      tokens: int32 ``[B,N]``, the last accepted token and the drafts after it.
      n_drafts: int32 ``[B]``, how many of the N - 1 draft places are used.
      active: bool ``[B]``.
      logprobs: bool scalar, whether some row wants log-probabilities.
      go: bool scalar, whether there is a step to do.
      next_pos: int32 ``[B]``, true position of ``tokens[:, 0]``.
      biased: bool scalar, whether some row's logits are biased.
    """

    tokens: jax.Array
    n_drafts: jax.Array
    active: jax.Array
    logprobs: jax.Array
    go: jax.Array
    next_pos: jax.Array
    biased: jax.Array | bool = False

    @classmethod
    def unpack(cls, answer: jax.Array, next_pos: jax.Array) -> "StepInputs":
        """From what ``submit`` returned, int32 ``[B,N+4]``."""
        return cls(
            tokens=answer[:, :-4],
            n_drafts=answer[:, -4],
            active=answer[:, -3] != 0,
            logprobs=jnp.any(answer[:, -2] & WANTS_LOGPROBS != 0),
            go=answer[0, -1] != 0,
            next_pos=next_pos,
            biased=jnp.any(answer[:, -2] & IS_BIASED != 0),
        )

    @property
    def positions(self) -> jax.Array:
        """True positions of the tokens, int32 ``[B,N]``."""
        return self.next_pos[:, None] + jnp.arange(self.tokens.shape[1])[None, :]

    @property
    def real(self) -> jax.Array:
        """Which tokens exist, bool ``[B,N]``: not those of idle rows and of unused draft places."""
        place = jnp.arange(self.tokens.shape[1])[None, :]
        return self.active[:, None] & (place <= self.n_drafts[:, None])


def forward(
    params: Params,
    cache: Cache,
    inputs: StepInputs,
    *,
    model: Decoder,
    spec: CacheSpec,
    kernel: Implementation | None = None,
) -> tuple[jax.Array, Cache, Pending]:
    """Hidden states ``[B,N,Dm]`` of a step, the cache with its tokens, and what ``commit`` needs."""
    attend = StepAttend(spec, model, cache, inputs.positions, inputs.real, kernel)
    hidden = model.hidden(params, inputs.tokens, attend)
    return hidden, attend.cache, attend.pending


def choose(
    params: Params,
    hidden: jax.Array,
    inputs: StepInputs,
    masks: jax.Array,
    sampling: Rows,
    *,
    model: Decoder,
    kernel: Implementation | None,
    head: Head,
    bias: Callable[[], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample under the masks (as ``collect`` returns them) and verify the drafts.

    ``bias`` gives what ``collect_bias`` returns, float32 ``[B,V+N-1]``; it is asked where ``inputs`` says
    that a row is biased, by a branch of its own, so that other steps have no part in its cost. None is
    for programs that never see such a row.

    Returns int32 ``[B,N+2+N·(1+2k)]`` for ``submit`` (N sampled tokens, how many count, how many rows
    of the LM head were read, and what ``top_logprobs`` gives, or zeros) and the next positions, int32
    ``[B]``.
    """
    words, enabled, sampling = without_idle(masks, inputs.real, sampling)
    weights = model.head(params)
    hidden = hidden.astype(weights.dtype)  # norms may be kept in a wider one
    operands = (words, enabled, inputs.positions, sampling)

    def in_tiles() -> tuple[jax.Array, jax.Array, jax.Array]:
        sampled, rows_read = sample_active(hidden, weights, *operands, implementation=kernel)
        return sampled, rows_read, no_logprobs

    def whole(bias: Callable[[], jax.Array] | None = None) -> tuple[jax.Array, ...]:
        logits = project(hidden, weights)
        biased = logits if bias is None else logits + bias_of_queries(bias(), inputs.tokens)
        sampled = masked_sample(biased, *operands, implementation=kernel)
        wanted = jax.lax.cond(
            inputs.logprobs, lambda: top_logprobs(logits, sampled), lambda: no_logprobs
        )
        return sampled, jnp.int32(weights.shape[0]), wanted

    reported = 1 + 2 * min(weights.shape[0], MAX_LOGPROBS)
    no_logprobs = jnp.zeros((*inputs.tokens.shape, reported), jnp.int32)
    needs_logits = inputs.logprobs | jnp.any(sampling.is_filtered)
    ways: list[Callable[[], tuple[jax.Array, ...]]]
    if head == "full":
        ways, way = [whole], jnp.int32(0)
    else:
        ways, way = [in_tiles, whole], needs_logits.astype(jnp.int32)
    if bias is not None:
        ways.append(functools.partial(whole, bias))
        way = jnp.where(inputs.biased, len(ways) - 1, way)
    sampled, rows_read, logprobs = jax.lax.switch(way, ways)
    place = jnp.arange(sampled.shape[1] - 1)[None, :]
    matches = (sampled[:, :-1] == inputs.tokens[:, 1:]) & (place < inputs.n_drafts[:, None])
    n_new = 1 + jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1)
    # A sampled token is never negative; XLA does not know. So `commit` depends on the last layer's
    # attention even where there are no drafts: else XLA would copy a cache that both might use at once.
    n_new = jnp.where(inputs.active & (sampled[:, 0] >= 0), n_new, 0)
    rows_read = jnp.broadcast_to(rows_read, n_new.shape)
    answer = jnp.concatenate(
        [sampled, n_new[:, None], rows_read[:, None], logprobs.reshape(n_new.shape[0], -1)], axis=1
    )
    return answer, inputs.next_pos + n_new


def without_idle(
    masks: jax.Array, real: jax.Array, sampling: Rows
) -> tuple[jax.Array, jax.Array, Rows]:
    """Mask words, whether they are enabled, and parameters, such that what does not exist costs nothing.

    ``masks`` int32 ``[B,N,W+1]``, ``real`` bool ``[B,N]``: nothing is legal where there is no token, and a
    row without one is greedy whatever its last request was. It asks for no part of the head, no noise
    and no filters.
    """
    temperature = jnp.where(real.any(axis=1), sampling.temperature, 0.0)
    words = jnp.where(real[..., None], masks[..., :-1], 0)
    return words, jnp.where(real, masks[..., -1], 1), sampling._replace(temperature=temperature)


def bias_of_queries(bias: jax.Array, tokens: jax.Array) -> jax.Array:
    """What to add to the logits of a step's queries, float32 ``[B,N,V]``.

    Args:
      bias: float32 ``[B,V+N-1]``. The first V: each token's bias after the accepted output. The others:
        that of each draft's token after the draft (which the penalties count, too).
      tokens: int32 ``[B,N]``, the step's: the last accepted one and the drafts. Query i sees the first i
        drafts.
    """
    n = tokens.shape[1]
    vocab_size = bias.shape[1] - (n - 1)
    ids = jnp.arange(vocab_size, dtype=tokens.dtype)[None, None, :]
    place = jnp.arange(n)[None, :, None]
    summed = jnp.broadcast_to(bias[:, None, :vocab_size], (*tokens.shape, vocab_size))
    for draft in range(1, n):  # the last of equal drafts counts
        is_seen = (ids == tokens[:, draft, None, None]) & (place >= draft)
        summed = jnp.where(is_seen, bias[:, vocab_size + draft - 1, None, None], summed)
    return summed


def top_logprobs(logits: jax.Array, sampled: jax.Array) -> jax.Array:
    """Log-probabilities by the model itself, before grammar, temperature and filters.

    ``logits`` float32 ``[B,N,V]``, ``sampled`` int32 ``[B,N]``. Returns int32 ``[B,N,1+2k]`` with
    ``k = min(V, MAX_LOGPROBS)``, to travel in the array of the tokens: the bits of the sampled
    token's and of the k highest, falling, then the ids of these k.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, sampled[..., None], axis=-1)
    count = min(logits.shape[-1], MAX_LOGPROBS)
    # XLA:TPU sorts for top_k, which for a large vocabulary takes longer to compile than the loop.
    highest, tokens = jax.lax.platform_dependent(
        logits,
        tpu=lambda logits: _top_k_by_passes(logits, count),
        default=lambda logits: tuple(jax.lax.top_k(logits, count)),
    )
    values = jnp.concatenate([own, highest], axis=-1) - total
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([bits, tokens.astype(jnp.int32)], axis=-1)


def _top_k_by_passes(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` of ``[B,N,V]`` with a pass over the logits for each of the k."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :]

    def one(last: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], Any]:
        value, token = (x[..., None] for x in last)
        is_left = (logits < value) | ((logits == value) & (ids > token))
        left = jnp.where(is_left, logits, -jnp.inf)
        value = left.max(axis=-1)
        token = jnp.where(is_left & (logits == value[..., None]), ids, logits.shape[-1]).min(
            axis=-1
        )
        return (value, token), (value, token)

    start = jnp.full(logits.shape[:-1], jnp.inf), jnp.full(logits.shape[:-1], -1, jnp.int32)
    _, (values, tokens) = jax.lax.scan(one, start, None, length=k)
    return jnp.moveaxis(values, 0, -1), jnp.moveaxis(tokens, 0, -1)
