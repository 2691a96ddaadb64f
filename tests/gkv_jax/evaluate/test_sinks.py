"""What attention sinks are for, on trained weights and real prose."""

import pytest

from benchmarks.perplexity import measure
from benchmarks.texts import DEFAULT_TEXT, load_text
from gkv_jax.models.llama import Llama
from gkv_jax.weights import load_model

pytestmark = pytest.mark.model


def test_sinks_keep_a_window_usable() -> None:
    loaded = load_model("smollm2-135m-instruct", "float32")
    tokens = loaded.tokenizer.encode(load_text(DEFAULT_TEXT), verbose=False)[:1536]
    model = Llama(loaded.config)
    full, streaming, window = measure(
        model, model.from_checkpoint(loaded.params), tokens, last=1024
    )
    assert full.last < 60  # the weights are in order
    assert full.last <= streaming.last < 1.15 * full.last
    assert window.last > 1.6 * full.last
