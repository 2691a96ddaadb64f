"""Page scores against NumPy, and that they bound what they are to bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.cache.quest import page_bounds, page_scores


@pytest.mark.parametrize("groups", [1, 3])
def test_scores_are_the_least_upper_bounds_of_a_page(groups: int) -> None:
    rng = np.random.default_rng(0)
    batch, n, kv_heads, pages, page, dim = 2, 3, 2, 5, 16, 8
    q = rng.normal(size=(batch, n, kv_heads * groups, dim)).astype(np.float32)
    k = rng.normal(size=(batch, kv_heads, pages * page, dim)).astype(np.float32)
    scores = np.asarray(jax.jit(lambda q, k: page_scores(q, *page_bounds(k, page)))(q, k))
    assert scores.shape == (batch, n, kv_heads * groups, pages)
    for b, t, h in np.ndindex(batch, n, kv_heads * groups):
        keys = k[b, h // groups].astype(np.float64).reshape(pages, page, dim)
        product = q[b, t, h].astype(np.float64) * keys
        np.testing.assert_allclose(scores[b, t, h], product.max(axis=1).sum(axis=-1), rtol=1e-5)
        assert (scores[b, t, h] >= product.sum(axis=-1).max(axis=1) - 1e-5).all()


def test_a_page_of_equal_keys_scores_their_product() -> None:
    q = jnp.asarray([[[[1.0, -2.0]]]])
    k = jnp.broadcast_to(jnp.asarray([3.0, 4.0]), (1, 1, 16, 2))
    assert page_scores(q, *page_bounds(k, 16)).tolist() == [[[[-5.0]]]]
