"""Quest with its pages in host memory: bit for bit what it is with pages on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import Engine, Guide, Sampling
from gkv_jax.cache import Cache, CacheSpec, offload, reset_row, storage
from gkv_jax.cache.storage import Stored
from gkv_jax.errors import UserError
from gkv_jax.models.llama import Llama
from tests.gkv_jax.cache.test_quest import MODEL, SPEC, drafting, prefilled
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

HOST = dataclasses.replace(SPEC, dtype="int8", memory="host")


KIND = jax.device_put(np.zeros(1), jax.memory.Space.Host).sharding.memory_kind
"""What memory on the host is called here. XLA:CPU of jax 0.7 calls it "device", as it does its own."""


def memories(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def assert_placed(cache: Cache) -> None:
    """Keys and values of the layer with pages on the host, everything else on the device."""
    *dense, paged = cache.layers
    assert memories((paged.k, paged.v)) == {KIND}
    assert offload.is_on_host(paged.k)
    assert offload.is_on_host(paged.v)
    assert memories((paged.bounds, paged.channel, dense, cache.slots)) == {"device"}


def test_a_cache_on_the_host_equals_one_on_the_device() -> None:
    """After a prompt, in a row that was used before, and after drafts; and it stays where it is."""
    results = []
    for spec in (dataclasses.replace(SPEC, dtype="int8"), HOST):
        logits, cache, _ = drafting(spec, 3, prefilled(spec, 24), 24)
        results.append((np.stack(logits[1]), jax.device_get(jax.tree.leaves(cache))))
    assert_placed(cache)
    assert_placed(reset_row(cache, np.int32(0), spec=HOST, model=MODEL))
    (expected, state), (found, host_state) = results
    np.testing.assert_array_equal(found, expected)
    for mine, other in zip(host_state, state, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.full
@pytest.mark.parametrize("loop", ["device", "host"])
def test_the_engine_keeps_it_there(loop: str) -> None:
    """Both loops carry it from step to step; prompts of several chunks, guided and free."""
    model = Llama(text_config(num_layers=3))
    params = random_params(model.config)
    results = []
    for memory in ("device", "host"):
        spec = CacheSpec(
            policy="quest", sinks=0, window=128, page=4, budget=16, prefill_chunk=32, memory=memory
        )
        with Engine(model, params, byte_tokenizer(), slots=2, cache=spec, loop=loop) as engine:
            found = engine.generate(
                ["A prompt of more than a single chunk of tokens", "Short", "and a third one"],
                guide=[None, Guide.regex("[a-z]{20,30}"), None],
                sampling=Sampling(max_tokens=40),
            )
        results.append([(each.tokens, each.finish_reason) for each in found])
    assert results[0] == results[1]
    assert all(len(tokens) > 16 for tokens, _ in results[0])


def stored(dtype: str) -> tuple[Stored, Stored]:
    """The same tokens in device memory and on the host."""
    rng, shape = np.random.default_rng(0), (3, 2, 16, 8)
    values = jnp.asarray(rng.normal(size=(3, 16, 2, 8)), jnp.float32)
    at = jnp.arange(3)[:, None], jnp.broadcast_to(jnp.arange(16)[None, :], (3, 16))
    device, host = storage.empty(shape, dtype), offload.empty(shape, dtype)
    return jax.jit(storage.write)(device, *at, values), jax.jit(offload.write)(host, *at, values)


def assert_equal(host: Stored, device: Stored) -> None:
    for mine, other in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_writing_and_fetching_are_those_of_the_device(dtype: str) -> None:
    device, host = stored(dtype)
    assert offload.is_on_host(host)
    assert not offload.is_on_host(device)
    assert_equal(host, device)
    # Slots outside are dropped.
    at = jnp.array([[2], [0]]), jnp.array([[15, 16], [7, 99]])
    new = jnp.full((2, 2, 2, 8), 5.0)
    device, host = jax.jit(storage.write)(device, *at, new), jax.jit(offload.write)(host, *at, new)
    assert_equal(host, device)
    assert (np.asarray(host.data, np.float32)[2, :, 15] != 0).all()
    rows, pages = jnp.array([2, 0]), jnp.array([[[3, 0], [1, 3]], [[2, 2], [0, 1]]])
    fetch = jax.jit(offload.fetch, static_argnames="page")
    fetched = fetch(host, rows, pages, page=4)
    assert memories(fetched) == {"device"}
    assert_equal(fetched, fetch(device, rows, pages, page=4))
    slots = np.asarray(pages)[..., None] * 4 + np.arange(4)[None, None, None]
    picked = [
        [np.asarray(device.data, np.float32)[r, h, slots[i, h].ravel()] for h in range(2)]
        for i, r in enumerate((2, 0))
    ]
    np.testing.assert_array_equal(np.asarray(fetched.data, np.float32), np.stack(picked))
    row = jax.jit(offload.fetch_row)(host, jnp.int32(1))
    assert memories(row) == {"device"}
    assert_equal(row, jax.tree.map(lambda leaf: leaf[1:2], device))


@pytest.mark.parametrize("policy", ["window", "full"])
def test_only_quest_reads_little_enough(policy: str) -> None:
    with pytest.raises(UserError, match=r"cache\.memory is 'host' under policy"):
        CacheSpec(policy=policy, memory="host")
    with pytest.raises(UserError, match=r"cache\.memory is 'disk'"):
        dataclasses.replace(SPEC, memory="disk")
