"""The parameter tree against checkpoints' names: nothing missing, nothing left over."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig
from gkv_jax.models.llama import Llama
from gkv_jax.weights import parameters as weights_parameters
from gkv_jax.weights.parameters import fill_params, placer, quantize_in_turn, to_hf_state_dict

from .conftest import TINY, State, random_state


def fill(config: ModelConfig, state: State) -> dict:
    return fill_params(Llama(config), state, "huggingface", placer("float32"))


def test_tree_and_inverse(any_config: ModelConfig) -> None:
    state = random_state(any_config)
    params = fill(any_config, state)
    assert ("head" in params) == (not any_config.tie_word_embeddings)
    assert len(params["layers"]) == any_config.num_layers
    assert params["layers"][1]["k"].shape == (64, 2 * 16)
    assert params["layers"][1]["down"].shape == (96, 64)
    back = to_hf_state_dict(Llama(any_config), params)
    if any_config.tie_word_embeddings:
        assert back.pop("lm_head.weight") is back["model.embed_tokens.weight"]
    assert back.keys() == state.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)


def test_one_array_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transfer:
        there = False

        def block_until_ready(self) -> None:
            self.there = True

    transfers: list[Transfer] = []

    def device_put(*_: object) -> Transfer:
        assert all(transfer.there for transfer in transfers)
        transfers.append(Transfer())
        return transfers[-1]

    monkeypatch.setattr(jax, "device_put", device_put)
    fill(TINY, random_state(TINY))
    assert len(transfers) == len(list(Llama(TINY).parameters()))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_quantize_in_turn(tied: bool) -> None:
    config = replace(TINY, tie_word_embeddings=tied, num_layers=3)
    model, state = Llama(config), random_state(config)
    params = fill(config, state)
    wanted = jax.jit(model.quantize)(params)
    layers = params["layers"]
    got = quantize_in_turn(model, params)
    assert params == {}
    assert got["layers"] is layers
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_names_are_those_of_transformers(any_config: ModelConfig) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=any_config.vocab_size,
                hidden_size=any_config.hidden_size,
                intermediate_size=any_config.intermediate_size,
                num_hidden_layers=any_config.num_layers,
                num_attention_heads=any_config.num_heads,
                num_key_value_heads=any_config.num_kv_heads,
                attention_bias=any_config.attention_bias,
                mlp_bias=any_config.mlp_bias,
                tie_word_embeddings=any_config.tie_word_embeddings,
            )
        )
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {leaf.huggingface: leaf.shape for leaf in Llama(any_config).parameters()}
    if any_config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    assert ours == theirs


def test_missing_and_unexpected_are_listed_together() -> None:
    state = random_state(TINY)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
    with pytest.raises(UserError) as caught:
        fill(TINY, state)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "\n" not in message


def test_many_names_are_cut_short() -> None:
    with pytest.raises(UserError, match="and 8 more"):
        fill(TINY, {})


def test_wrong_shape() -> None:
    state = random_state(TINY)
    state["model.norm.weight"] = np.ones(65, np.float32)
    with pytest.raises(UserError, match=r"model.norm.weight \[65\] instead of \[64\]"):
        fill(TINY, state)


def test_stored_rotary_frequencies_are_no_weights() -> None:
    state = random_state(TINY)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    fill(TINY, state)


def test_tied_head_must_equal_the_embedding() -> None:
    state = random_state(TINY)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()
    assert "head" not in fill(TINY, state)
    state["lm_head.weight"][3, 3] += 1
    with pytest.raises(UserError, match="tie_word_embeddings"):
        fill(TINY, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_leaf_has_the_dtype(dtype: str) -> None:
    params = fill_params(Llama(TINY), random_state(TINY), "huggingface", placer(dtype))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}


def test_float16_overflow_is_refused() -> None:
    state = random_state(TINY)
    state["model.norm.weight"][0] = 1e6
    with pytest.raises(UserError, match=r"model.norm.weight does not fit float16"):
        fill_params(Llama(TINY), state, "huggingface", placer("float16"))


def test_unknown_dtype() -> None:
    with pytest.raises(UserError, match="float32, bfloat16, float16"):
        placer("int8")


@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("transposed", [False, True])
def test_conversion_in_blocks(rows: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_parameters, "_BLOCK_BYTES", 400)
    array = np.random.default_rng(0).standard_normal((rows, 33)).astype(np.float32)
    array = array.T if transposed else array
    leaf = next(Llama(TINY).parameters())
    placed = placer("bfloat16")(leaf, "name", array)
    np.testing.assert_array_equal(placed, array.astype(jnp.bfloat16))


def test_placed_where_asked() -> None:
    device = jax.devices("cpu")[0]
    config = replace(TINY, num_layers=1)
    params = fill_params(
        Llama(config), random_state(config), "huggingface", placer("float32", device)
    )
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(params))
