"""What the cache and the compiled decode loop occupy, in bytes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gkv_jax import CacheSpec
from gkv_jax.cache import init_cache
from gkv_jax.decode import device_loop
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.sampling import greedy_rows
from gkv_jax.step import StepInputs, forward


def cache_bytes_at(
    model: Decoder, params: Params, spec: CacheSpec, batch: int, positions: Sequence[int]
) -> dict[int, int]:
    """``Cache.nbytes`` after a real step at each position of the text, for ``batch`` rows."""
    step = jax.jit(forward, static_argnames=("model", "spec"), donate_argnames=("cache",))
    sizes = {}
    for position in positions:
        inputs = StepInputs(
            tokens=jnp.zeros((batch, spec.queries), jnp.int32),
            n_drafts=jnp.zeros(batch, jnp.int32),
            active=jnp.ones(batch, bool),
            logprobs=jnp.array(False),
            go=jnp.array(True),
            next_pos=jnp.full(batch, position, jnp.int32),
        )
        cache = init_cache(spec, model, batch, jnp.dtype(jnp.float32))
        _, cache, _ = step(params, cache, inputs, model=model, spec=spec)
        assert int(cache.slots[0].slot_pos.max()) == position
        sizes[position] = cache.nbytes
    return sizes


def loop_memory(model: Decoder, params: Params, spec: CacheSpec, batch: int) -> dict[str, int]:
    """The compiled loop's temporary bytes beside those of one layer's cache and of the whole cache.

    A copy of the cache, or of one layer, would show up in the first figure.
    """
    cache = init_cache(spec, model, batch, jnp.dtype(jnp.float32))
    compiled = device_loop.lower(
        params,
        cache,
        np.zeros((batch, spec.queries + 4), np.int32),
        np.zeros(batch, np.int32),
        greedy_rows(batch),
        np.int32(0),
        model=model,
        spec=spec,
    ).compile()
    return {
        "loop_temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "layer_cache_bytes": cache.layers[0].k.nbytes + cache.layers[0].v.nbytes,
        "cache_bytes": cache.nbytes,
    }
