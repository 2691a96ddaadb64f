"""Perplexity of a text that streams through a bounded cache.

This is how StreamingLLM measures a cache (arXiv 2309.17453, its figure 3): every token of a long
text is predicted from what the cache still holds when its turn comes. Relative figures are what
counts: a policy against ``CacheSpec.full`` on the same text.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache import CacheSpec, cache_dtype, init_cache
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.prefill import chunk_hidden, pad


def streaming_nll(
    model: Decoder,
    params: Params,
    tokens: Sequence[int] | NDArray[np.integer],
    spec: CacheSpec,
    *,
    chunk: int = 256,
) -> NDArray[np.float64]:
    """Negative log-likelihood of each token given the cached part of the text before it.

    The text is teacher-forced through one row of a cache, ``chunk`` tokens a call, or as many as lie
    between two choices of the policy. The result is that of decoding it token by token, whatever
    ``chunk`` is: it only trades memory (the logits of one chunk, ``chunk * V`` float32, exist at a
    time) for speed.

    Args:
      model: the architecture.
      params: its parameters; the cache takes the dtype of the first floating one.
      tokens: the text, T token ids, T >= 2.
      spec: the cache, of a policy without scores or with ``prefill="chunks"``.
      chunk: tokens per call, >= 1.

    Returns:
      float64 ``[T-1]``, in nats: entry i is for ``tokens[i + 1]``. Log-softmax is float32.

    Raises:
      UserError: fewer than two tokens, ids outside of the vocabulary, a text longer than a ``full``
        cache, one longer than the positions of a model that uses them in code of its own, or a policy
        that chooses tokens of a prompt as a whole (there is no prompt here).
    """
    text = np.asarray(tokens, np.int32)
    _check(text, model.vocab_size, spec, chunk)
    if any(layer.rope is None for layer in model.layers) and text.size - 1 > model.max_positions:
        raise UserError(
            f"tokens has {text.size} entries, but the model uses positions in code of its own, and was made "
            f"for {model.max_positions} of them; use a shorter text"
        )
    inputs, targets = text[:-1], text[1:]
    cache = init_cache(spec, model, 1, cache_dtype(params, model))
    row = np.int32(0)
    parts = []
    chunk = chunk if spec.selector is None else min(chunk, spec.interval)
    start = 0
    while start < len(inputs):
        length = min(chunk, len(inputs) - start)
        if spec.selector is not None:
            length = min(length, spec.chunk_at(start))
        hidden, cache = chunk_hidden(
            params,
            cache,
            pad(inputs[start : start + length], chunk),
            row,
            np.int32(start),
            np.int32(length),
            model=model,
            spec=spec,
        )
        scores = target_nll(
            params, hidden, pad(targets[start : start + length], chunk), model=model
        )
        parts.append(np.asarray(scores, np.float64)[:length])
        start += length
    return np.concatenate(parts)


def perplexity(nll: NDArray[np.floating]) -> float:
    """``exp`` of the mean of ``nll`` (nats per token, any shape), accumulated in float64.

    Raises:
      UserError: ``nll`` is empty.
    """
    if nll.size == 0:
        raise UserError("nll is empty; there is no token to take the perplexity of")
    return float(np.exp(np.mean(nll, dtype=np.float64)))


@functools.partial(jax.jit, static_argnames=("model",))
def target_nll(
    params: Params, hidden: jax.Array, targets: jax.Array, *, model: Decoder
) -> jax.Array:
    """float32 ``[L]``, all that leaves the device, of hidden ``[L,Dm]`` and targets ``[L]``."""
    logits = model.logits(params, hidden)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _check(text: NDArray[np.int32], vocab_size: int, spec: CacheSpec, chunk: int) -> None:
    if text.ndim != 1 or text.size < 2:
        raise UserError(f"tokens has shape {list(text.shape)}; it must be a list of two or more")
    if text.min() < 0 or text.max() >= vocab_size:
        raise UserError(f"tokens holds ids outside of 0..{vocab_size - 1}")
    if chunk < 1:
        raise UserError(f"chunk is {chunk}; it must be at least 1")
    if spec.selector is not None and spec.prefill == "whole":
        raise UserError(
            f"cache.policy {spec.policy_name!r} chooses from a whole prompt, and a stream has none; "
            "set prefill to 'chunks', or use policy 'window' or 'full'"
        )
    if spec.max_tokens is not None and text.size - 1 > spec.max_tokens:
        raise UserError(
            f"tokens has {text.size} entries, the cache holds {spec.max_tokens} under policy "
            f"{spec.policy_name!r}; use CacheSpec.full with as many"
        )
