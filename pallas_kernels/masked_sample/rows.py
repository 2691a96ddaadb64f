"""How the rows of a batch sample, as arrays."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.masked_sample import arithmetic


class Rows(NamedTuple):
    """Arrays `[B]`, as `pallas_kernels.masked_sample.masked_sample` describes them.

    Of NumPy on the host, of JAX inside a program.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any

    @property
    def is_random(self) -> jax.Array:
        """Whether a row draws at all, bool `[B]`."""
        random: jax.Array = self.temperature > 0
        return random

    @property
    def is_filtered(self) -> jax.Array:
        """Whether a row drops unlikely tokens, bool `[B]`."""
        filtered: jax.Array = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return filtered & self.is_random

    @property
    def without_filters(self) -> "Rows":
        """The same rows, keeping all tokens: constants, so that compilers drop what filters take."""
        return self._replace(
            top_k=jnp.zeros_like(self.top_k),
            top_p=jnp.ones_like(self.top_p),
            min_p=jnp.zeros_like(self.min_p),
        )

    @property
    def inverse_temperature(self) -> jax.Array:
        """float32 `[B]`; 1 for greedy rows."""
        temperature = jnp.where(self.is_random, self.temperature, 1.0)
        # Not less: logits over it must not all become the largest float, and tie.
        return arithmetic.reciprocal(jnp.maximum(temperature, 1e-30))
