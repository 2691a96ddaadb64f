"""One text in one cache, driven from Python a token at a time: what measures are made of."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache import Cache, CacheSpec, cache_dtype, commit, init_cache
from gkv_jax.cache.report import report
from gkv_jax.models.protocol import Decoder, Params
from gkv_jax.prefill import read_prompt
from gkv_jax.step import StepInputs, forward


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model with a cache of one row: what ``Engine`` does, without its loop.

    Attributes:
      model: the architecture.
      params: its parameters; the cache takes the dtype of the first floating one, unless the spec
        names another.
      spec: the cache, without drafts.
    """

    model: Decoder
    params: Params
    spec: CacheSpec

    def read(self, tokens: Sequence[int]) -> Cache:
        """A new cache that has read a prompt, the first token at position 0."""
        cache = init_cache(self.spec, self.model, 1, cache_dtype(self.params, self.model))
        return read_prompt(self.params, cache, tokens, 0, model=self.model, spec=self.spec)

    def step(self, cache: Cache, token: int, position: int) -> tuple[NDArray[np.float32], Cache]:
        """Logits ``[V]`` of what follows ``token``, and the cache with it; the old one is consumed."""
        logits, cache = _step(
            self.params,
            cache,
            np.int32(token),
            np.int32(position),
            model=self.model,
            spec=self.spec,
        )
        return np.asarray(logits), cache

    def continue_greedily(
        self, prompt: Sequence[int], new_tokens: int, stop_token_ids: frozenset[int]
    ) -> list[int]:
        """At most ``new_tokens`` most probable tokens after a prompt, without the one that ends them."""
        cache, token, output = self.read(prompt[:-1]), prompt[-1], []
        for position in range(len(prompt) - 1, len(prompt) - 1 + new_tokens):
            logits, cache = self.step(cache, token, position)
            token = int(logits.argmax())
            if token in stop_token_ids:
                break
            output.append(token)
        return output

    def held(self, cache: Cache, position: int) -> NDArray[np.bool_]:
        """Which positions a query at ``position`` can see, bool ``[num_layers,Hk,position+1]``.

        ``cache`` is that before the query's own token is written. Under ``quest``, which reads a part
        of what it holds, all of them.
        """
        found = report(cache, 0, position, spec=self.spec, model=self.model)
        held = np.zeros((len(found.layers), len(found.layers[0].heads), position + 1), bool)
        held[:, :, position] = True
        for index, layer in enumerate(found.layers):
            for head, tokens in enumerate(layer.heads):
                held[index, head, tokens.held] = True
        return held


@functools.partial(jax.jit, static_argnames=("model", "spec"), donate_argnames=("cache",))
def _step(
    params: Params,
    cache: Cache,
    token: jax.Array,
    position: jax.Array,
    *,
    model: Decoder,
    spec: CacheSpec,
) -> tuple[jax.Array, Cache]:
    inputs = StepInputs(
        tokens=token.reshape(1, 1),
        n_drafts=jnp.zeros(1, jnp.int32),
        active=jnp.ones(1, bool),
        logprobs=jnp.zeros((), bool),
        go=jnp.ones((), bool),
        next_pos=position.reshape(1),
    )
    hidden, cache, pending = forward(params, cache, inputs, model=model, spec=spec)
    cache = commit(cache, pending, inputs.next_pos, inputs.next_pos + 1, model=model, spec=spec)
    return model.logits(params, hidden[0, 0]), cache
