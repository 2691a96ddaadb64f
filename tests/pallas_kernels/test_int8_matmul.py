"""Products with int8 matrices against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int8_matmul import Int8Matrix, int8_matmul, quantize

RNG = np.random.default_rng(0)
matmul = jax.jit(int8_matmul)


def matrix(out: int, width: int) -> np.ndarray:
    """Rows of very different size, one of them zero."""
    rows = RNG.normal(0, 1, (out, width)) * 10.0 ** RNG.integers(-3, 3, (out, 1))
    rows[0] = 0.0
    return rows.astype(np.float32)


def test_weights_are_rounded_by_half_a_step_at_most() -> None:
    weights = matrix(40, 24)
    rounded = quantize(jnp.asarray(weights))
    assert rounded.values.dtype == jnp.int8
    assert rounded.shape == (40, 24)
    values, scale = (np.asarray(a, np.float64) for a in (rounded.values, rounded.scale))
    assert np.abs(values).max() == 127
    steps = np.abs(values * scale[:, None] - weights) / scale[:, None]
    assert steps.max() <= 0.5 + 1e-4
    assert (values[0] == 0).all()


@pytest.mark.parametrize("shape", [(24,), (1, 24), (3, 5, 24), (70, 24)])
def test_products_have_fifteen_bits_of_the_activations(shape: tuple[int, ...]) -> None:
    rounded = quantize(jnp.asarray(matrix(40, 24)))
    x = (RNG.normal(0, 1, shape) * 10.0 ** RNG.integers(-2, 3, (*shape[:-1], 1))).astype(np.float32)
    x[..., 0] *= 30  # an outlier, as language models have them
    out = np.asarray(matmul(jnp.asarray(x), rounded))
    values, scale = (np.asarray(a, np.float64) for a in (rounded.values, rounded.scale))
    exact = x.astype(np.float64) @ (values * scale[:, None]).T
    assert out.shape == exact.shape
    step = np.abs(x).max(axis=-1, keepdims=True) / 127 / 254
    bound = 0.51 * step * (np.abs(values) * scale[:, None]).sum(axis=1) + 2e-6 * np.abs(exact).max()
    assert (np.abs(out - exact) <= bound).all()


def test_a_row_s_product_does_not_depend_on_its_neighbours() -> None:
    """Integers add up to the same bits in any order: so it is the same in every width of the loop."""
    rounded = quantize(jnp.asarray(matrix(300, 96)))
    x = jnp.asarray(RNG.normal(0, 1, (24, 96)), jnp.float32)
    together = np.asarray(matmul(x, rounded))
    for row in range(24):
        np.testing.assert_array_equal(
            np.asarray(matmul(x[row : row + 1], rounded))[0], together[row]
        )


def test_rows_of_a_matrix() -> None:
    rounded = quantize(jnp.asarray(matrix(40, 24)))
    x = jnp.asarray(RNG.normal(0, 1, (2, 24)), jnp.float32)
    part = jax.jit(lambda x, m, start: int8_matmul(x, m.rows(start, 8)))(x, rounded, jnp.int32(16))
    np.testing.assert_array_equal(part, matmul(x, rounded)[:, 16:24])


def test_zeros() -> None:
    rounded = quantize(jnp.zeros((4, 8)))
    assert not np.asarray(matmul(jnp.ones((2, 8)), rounded)).any()
    assert not np.asarray(matmul(jnp.zeros((2, 8)), quantize(jnp.ones((4, 8))))).any()


def test_widths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"x: must be \[..., 8\], got \[2, 7\]"):
        int8_matmul(jnp.ones((2, 7)), Int8Matrix(jnp.ones((4, 8), jnp.int8), jnp.ones(4)))
