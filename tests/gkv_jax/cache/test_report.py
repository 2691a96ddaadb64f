"""The report against the list cache, and that it is read from the arrays and not from the spec."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import UserError
from gkv_jax.cache import Cache, CacheSpec, init_cache
from gkv_jax.cache.report import CacheReport, HeadReport, LayerReport, report
from gkv_jax.cache.segments import EMPTY
from gkv_jax.models.llama import Llama
from gkv_jax.models.protocol import AttentionLayer
from gkv_jax.prefill import read_prompt
from tests.gkv_jax.cache import test_evict
from tests.gkv_jax.cache.evicting import EvictingList
from tests.gkv_jax.cache.test_snapkv import SPEC as SNAPKV
from tests.gkv_jax.cache.test_streaming import CONFIG, MODEL, PARAMS, TEXT, inputs_for, step
from tests.gkv_jax.cache.test_streaming import SPEC as WINDOW
from tests.gkv_jax.oracle import ListCache
from tests.gkv_jax.tiny import random_params, tiny_config

# Specs and shapes of other modules, so that what they compile is used here.
H2O = dataclasses.replace(test_evict.SPECS["h2o every 4"], prefill="chunks")
QUEST = CacheSpec(policy="quest", sinks=4, window=60, page=4, budget=16)
FULL = CacheSpec(policy="full", sinks=0, window=48)
THREE = tiny_config(num_layers=3)


@dataclasses.dataclass(frozen=True)
class OneLocalLayer(Llama):
    """The first layer sees 5 positions, the second all."""

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        first, *others = super().layers
        return dataclasses.replace(first, window=5), *others


def read(spec: CacheSpec, length: int, model: Llama = MODEL) -> Cache:
    """The first tokens of the text in row 1 of two."""
    params = PARAMS if model.num_layers == 2 else random_params(model.config)
    cache = init_cache(spec, model, 2, jnp.float32)
    return read_prompt(params, cache, TEXT[:length], 1, model=model, spec=spec)


def of(spec: CacheSpec, length: int, model: Llama = MODEL) -> CacheReport:
    return report(read(spec, length, model), 1, length, spec=spec, model=model)


def held(result: CacheReport) -> list[list[list[int]]]:
    """Positions by layer and head."""
    return [[head.held.tolist() for head in layer.heads] for layer in result.layers]


def seen_next(oracle: ListCache, length: int) -> list[list[list[int]]]:
    """What the query after ``length`` tokens will see in the list cache, itself not counted."""
    return [
        [
            sorted(entry.position for entry in oracle.visible(layer, head, length))
            for head in range(CONFIG.num_kv_heads)
        ]
        for layer in range(CONFIG.num_layers)
    ]


@pytest.mark.parametrize("length", [1, 3, 9, 10, 11, 31])
def test_sinks_and_window_are_those_of_the_list(length: int) -> None:
    oracle = ListCache(CONFIG, PARAMS, WINDOW)
    for at, token in enumerate(TEXT[:length]):
        oracle.step(token, at)
    result = of(WINDOW, length)
    assert held(result) == seen_next(oracle, length)
    for layer in result.layers:
        assert layer.live == (min(length, 9),) * 2  # 3 sinks and the 6 before the next token
        assert layer.evicted == (length - min(length, 9),) * 2
        assert layer.kept == (0, 0)
        assert layer.heads[1].sinks.tolist() == list(range(min(length, 3)))


def test_what_snapkv_keeps_is_that_of_the_list() -> None:
    oracle = ListCache(CONFIG, PARAMS, SNAPKV)
    oracle.read_prompt(TEXT[:32])
    oracle.snapkv(32)
    assert oracle.kept is not None
    result = of(SNAPKV, 32)
    assert held(result) == seen_next(oracle, 32)
    for layer, lists in zip(result.layers, oracle.kept, strict=True):
        assert [h.kept.tolist() for h in layer.heads] == [
            [e.position for e in own] for own in lists
        ]
        assert (layer.live, layer.kept, layer.evicted) == ((17, 17), (6, 6), (15, 15))


@pytest.mark.parametrize("length", [5, 24, 27])
def test_what_a_choice_in_decoding_keeps_is_that_of_the_list(length: int) -> None:
    """At 27, three tokens wait for the next choice, visible."""
    oracle = EvictingList(CONFIG, PARAMS, H2O)
    for at, token in enumerate(TEXT[:length]):
        oracle.step(token, at)
    result = of(H2O, length)
    assert held(result) == seen_next(oracle, length)
    assert result.layers[0].live == {5: (5, 5), 24: (12, 12), 27: (15, 15)}[length]


def test_layers_are_reported_each_by_its_own_cache() -> None:
    result = of(SNAPKV, 32, OneLocalLayer(CONFIG))
    local, other = result.layers
    assert (local.policy, other.policy, result.policy) == ("window", "snapkv", "snapkv")
    assert [h.ring.tolist() for h in local.heads] == [[28, 29, 30, 31]] * 2
    assert (local.evicted, other.evicted) == ((28, 28), (15, 15))
    assert local.slots < other.slots
    assert local.nbytes < other.nbytes


@pytest.mark.parametrize(("spec", "length"), [(QUEST, 40), (FULL, 48)])
def test_what_evicts_nothing_holds_everything(spec: CacheSpec, length: int) -> None:
    """Even where it is full to the brim and no token can follow."""
    model = Llama(THREE) if spec is QUEST else MODEL
    result = of(spec, length, model)
    assert held(result) == [[list(range(length))] * 2] * model.num_layers
    assert {layer.evicted for layer in result.layers} == {(0, 0)}
    policies = ["full", "full", "quest"] if spec is QUEST else ["full", "full"]
    assert [layer.policy for layer in result.layers] == policies


def test_rejected_drafts_and_other_rows_are_not_counted() -> None:
    cache = read(WINDOW, 20)
    for rows in ([([5, 6, 7], 4), ([1, 2, 3], 20)], [None, ([8], 20)]):
        _, cache = step(cache, inputs_for(rows, WINDOW), spec=WINDOW)
    result = report(cache, 1, 21, spec=WINDOW, model=MODEL)
    assert held(result)[0][0] == [0, 1, 2, *range(15, 21)]
    # Of row 0 the three tokens at 4 are there, and nothing before them.
    assert held(report(cache, 0, 7, spec=WINDOW, model=MODEL))[0][0] == [4, 5, 6]


def test_an_empty_row() -> None:
    result = of(WINDOW, 0)
    assert held(result) == [[[], []], [[], []]]
    assert result.layers[0].evicted == (0, 0)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_bytes_are_those_of_the_buffers(dtype: str | None) -> None:
    spec = dataclasses.replace(H2O, dtype=dtype)
    results = [
        report(init_cache(spec, MODEL, batch, jnp.float32), 0, 9, spec=spec, model=MODEL)
        for batch in (1, 3)
    ]
    assert results[0].nbytes == results[1].nbytes
    heads, slots, dim = CONFIG.num_kv_heads, spec.capacity, CONFIG.head_dim
    token = {None: 2 * 4 * dim, "bfloat16": 2 * 2 * dim, "int8": 2 * (dim + 4)}[dtype]
    layer = heads * slots * (token + 4) + heads * spec.kept * 4  # attention mass, kept positions
    layer += heads * dim * 4 if dtype == "int8" else 0
    assert [each.nbytes for each in results[0].layers] == [layer] * CONFIG.num_layers
    assert results[0].nbytes == CONFIG.num_layers * layer + (slots + 2) * 4


def test_a_cache_that_lost_its_tokens_shows() -> None:
    """The arrays are changed behind the spec's back: lost sinks, a lost kept token, one held twice."""
    cache = read(SNAPKV, 32)
    (slots,) = cache.slots
    lost = dataclasses.replace(slots, slot_pos=slots.slot_pos.at[1, 1:5].set(EMPTY))
    result = report(dataclasses.replace(cache, slots=(lost,)), 1, 32, spec=SNAPKV, model=MODEL)
    assert result.layers[0].heads[0].sinks.tolist() == [0]
    assert (result.layers[0].kept, result.layers[0].evicted) == ((4, 4), (19, 19))

    layer = cache.layers[0]
    twice = dataclasses.replace(layer, kept_pos=layer.kept_pos.at[1, 0, 0].set(31))
    result = report(
        dataclasses.replace(cache, layers=(twice, cache.layers[1])), 1, 32, spec=SNAPKV, model=MODEL
    )
    assert (result.layers[0].live, result.layers[0].evicted) == ((17, 17), (16, 15))


def test_as_json() -> None:
    result = of(SNAPKV, 32)
    whole = json.loads(json.dumps(result.as_dict()))
    assert {key: whole[key] for key in ("policy", "text_length", "bytes")} == {
        "policy": "snapkv", "text_length": 32, "bytes": result.nbytes,
    }  # fmt: skip
    for layer, told in zip(result.layers, whole["layers"], strict=True):
        for head, runs in zip(layer.heads, told["heads"], strict=True):
            assert (runs["sinks"], runs["ring"]) == ([[0, 2]], [[24, 31]])
            listed = [at for first, last in runs["kept"] for at in range(first, last + 1)]
            assert listed == head.kept.tolist()
    for layer in whole["layers"]:
        del layer["heads"]
    assert whole == json.loads(json.dumps(result.summary()))


def test_runs_are_as_long_as_they_can_be() -> None:
    kept = np.array([4, 5, 6, 9, 11, 12], np.int32)
    none = np.zeros(0, np.int32)
    layer = LayerReport("snapkv", 13, 8, 100, (HeadReport(none, kept, none),))
    assert layer.as_dict()["heads"] == [
        {"sinks": [], "kept": [[4, 6], [9, 9], [11, 12]], "ring": []}
    ]


@pytest.mark.parametrize(
    ("row", "next_pos", "name"), [(2, 5, "row"), (-1, 5, "row"), (0, -1, "next_pos")]
)
def test_what_cannot_be_is_refused(row: int, next_pos: int, name: str) -> None:
    cache = init_cache(WINDOW, MODEL, 2, jnp.float32)
    with pytest.raises(UserError, match=name):
        report(cache, row, next_pos, spec=WINDOW, model=MODEL)


def test_keys_and_values_stay_on_the_device() -> None:
    """And the cache can be used on: nothing is donated."""
    cache = read(WINDOW, 9)
    report(cache, 1, 9, spec=WINDOW, model=MODEL)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
