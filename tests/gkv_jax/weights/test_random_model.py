"""The random model of the registry: like any other, but for fetching and sense."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from gkv_jax import CacheSpec, Engine, Guide, Sampling, UserError
from gkv_jax.weights import load_model
from gkv_jax.weights.entries import find_model
from gkv_jax.weights.random_model import ROLES, STOP, byte_tokenizer
from gkv_jax.weights.registry import LoadedModel
from gkv_jax.weights.store import fetch_model, find_fetched

NAME = "tiny-random"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(NAME, dtype="float32")


def test_a_token_is_a_byte(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    text = "".join(map(chr, range(32, 127))) + "é\n\t €"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode(STOP) == [256] == [tokenizer.eos_token_id]
    assert loaded.model.config.eos_token_ids == (256,)
    assert len(tokenizer) == loaded.model.vocab_size == 257 + len(ROLES)


def test_roles_of_a_chat_are_tokens() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "!"}]
    tokens = byte_tokenizer().apply_chat_template(
        [*chat, chat[0]], add_generation_prompt=True, return_dict=False
    )
    assert tokens == [258, *b"hi", 259, *b"!", 258, *b"hi", 259]


def test_roles_may_be_others() -> None:
    tokenizer = byte_tokenizer(("<user>", "<model>"), "<model>")
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokens == [257, *b"hi", 258]


def test_the_same_weights_every_time(loaded: LoadedModel) -> None:
    again = load_model(NAME, dtype="float32")
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), loaded.params, again.params)
    )
    leaves = jax.tree.leaves(loaded.params)
    matrices = [np.asarray(leaf).tobytes() for leaf in leaves if leaf.ndim == 2]
    assert len(set(matrices)) == len(matrices)  # each tensor has noise of its own


def test_there_is_nothing_to_fetch(tmp_path) -> None:
    entry = find_model(NAME)
    assert entry.sources == ()
    assert find_fetched(entry, tmp_path) is None
    with pytest.raises(UserError, match="nothing to fetch"):
        fetch_model(entry, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--source", "pypi"], 2)])
def test_fetch_says_so(options: list[str], code: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gkv_jax.weights.fetch", NAME, *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == code
    assert "nothing to fetch" in (run.stdout if code == 0 else run.stderr)
    assert "Traceback" not in run.stderr


def test_free_text_is_legible_and_endless_and_guides_are_obeyed() -> None:
    with Engine.from_pretrained(NAME, cache=CacheSpec(sinks=4, window=28), slots=2) as engine:
        free, guided = engine.generate(
            ["Once", "Once"],
            guide=[None, Guide.choice(["yes", "no"])],
            sampling=Sampling(max_tokens=64),
        )
    assert (free.finish_reason, len(free.tokens)) == ("length", 64)
    assert free.text.isascii()
    assert free.text.isprintable()
    assert guided.text in ("yes", "no")
