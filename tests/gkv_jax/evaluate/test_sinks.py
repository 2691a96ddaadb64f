"""What attention sinks are for, on trained weights and real prose."""

import pytest

from benchmarks.perplexity import LAST, LEAST_COLLAPSE, MOST_LOSS, Score, measure
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text
from gkv_jax.models.llama import Llama
from gkv_jax.weights import load_model

pytestmark = pytest.mark.model


def scores(tokens: int) -> tuple[Score, Score, Score]:
    """Of the full cache, of 4+252 and of 0+256, on the first tokens of the text."""
    loaded = load_model("smollm2-135m-instruct", "float32")
    text = loaded.tokenizer.encode(load_text(DEFAULT_TEXT), verbose=False)[:tokens]
    assert len(text) == tokens
    model = Llama(loaded.config)
    full, streaming, window = measure(
        model, model.from_checkpoint(loaded.params), text, size=256, last=LAST
    )
    assert (streaming.cache, window.cache) == ("4+252", "0+256")
    return full, streaming, window


def test_sinks_keep_a_window_usable() -> None:
    full, streaming, window = scores(1536)
    assert full.last < 60  # the weights are in order
    assert full.last <= streaming.last < 1.15 * full.last
    assert window.last > 1.6 * full.last


@pytest.mark.full
def test_sinks_keep_a_window_usable_for_long() -> None:
    """The numbers that are promised; the benchmark has the same targets."""
    assert (MOST_LOSS, LEAST_COLLAPSE) == (1.10, 2.0)
    full, streaming, window = scores(4000)
    assert streaming.last / full.last <= MOST_LOSS
    assert window.last / full.last >= LEAST_COLLAPSE
