"""SmolLM2-135M-Instruct itself: what is known about its configuration, weights and tokenizer.

The token ids were checked against llama.cpp's tokenizer on the same file.
"""

import pytest
import torch

from benchmarks.peer import llama_for_causal_lm
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.weights import LoadedModel, load_model
from gkv_jax.weights.entries import find_model
from gkv_jax.weights.store import fetch_model

pytestmark = pytest.mark.model

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(NAME, "float32")


def test_config(model: LoadedModel) -> None:
    config = model.config
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope == RopeConfig(100000.0)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_fetch_is_a_no_op(model: LoadedModel) -> None:
    assert not fetch_model(find_model(NAME)).downloaded


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("Hello world", [19556, 905]),
        ("1234 12.5", [33, 34, 35, 36, 216, 33, 34, 30, 37]),
        ("x =   1", [104, 446, 333, 33]),
        ("\t\t1", [1656, 33]),
        ("  a   b\n\n\t x", [216, 253, 256, 278, 14436, 1792]),
        ("½ ² Ⅷ ٣٤", [16738, 216, 19133, 216, 173, 223, 117, 216, 164, 113, 164, 114]),
        ("don't I'LL", [12420, 982, 339, 23, 16421]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("<|endoftext|>", [0]),
    ],
)
def test_tokens(model: LoadedModel, text: str, ids: list[int]) -> None:
    assert model.tokenizer.encode(text) == ids
    assert model.tokenizer.decode(ids) == text


def test_special_tokens(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    assert len(tokenizer) == model.config.vocab_size
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert sorted(tokenizer.added_tokens_decoder) == list(range(17))
    assert tokenizer.decode([1, 6004, 2], skip_special_tokens=True) == "hi"


def test_chat_template(model: LoadedModel) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_transformers_with_these_weights_knows_the_capital_of_france(model: LoadedModel) -> None:
    """Wrong head order, rotation or tokens would all show here."""
    network = llama_for_causal_lm(model.model, model.params)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = model.tokenizer.encode("The capital of France is Paris.<|im_end|>")
    with torch.no_grad():
        logits = network(torch.tensor([ids + answer])).logits[0]
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer
