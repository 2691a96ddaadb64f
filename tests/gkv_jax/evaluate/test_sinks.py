"""What attention sinks are for, on trained weights and real prose."""

from typing import Any

import numpy as np
import pytest

from gkv_jax import CacheSpec
from gkv_jax.evaluate import perplexity, streaming_nll
from gkv_jax.evaluate.texts import DEFAULT_TEXT, load_text
from gkv_jax.weights import LoadedModel

pytestmark = pytest.mark.model


def last_1024(loaded: LoadedModel, params: Any, tokens: int) -> tuple[float, float, float]:
    """Perplexity of the end of a text in the full cache, in 4+252 and in 0+256."""
    text = loaded.tokenizer.encode(load_text(DEFAULT_TEXT), verbose=False)[:tokens]
    assert len(text) == tokens
    specs = (
        CacheSpec.full(tokens), CacheSpec(sinks=4, window=252), CacheSpec(sinks=0, window=256)
    )  # fmt: skip
    nll = [streaming_nll(loaded.model, params, text, spec) for spec in specs]
    full, streaming, window = (perplexity(np.asarray(each[-1024:])) for each in nll)
    return full, streaming, window


def test_sinks_keep_a_window_usable(smollm2: LoadedModel, smollm2_params: Any) -> None:
    full, streaming, window = last_1024(smollm2, smollm2_params, 1536)
    assert full < 60  # the weights are in order
    assert full <= streaming < 1.15 * full
    assert window > 1.6 * full


@pytest.mark.full
def test_sinks_keep_a_window_usable_for_long(smollm2: LoadedModel, smollm2_params: Any) -> None:
    """The numbers that docs/cache-quality.md promises."""
    full, streaming, window = last_1024(smollm2, smollm2_params, 4000)
    assert streaming <= 1.10 * full
    assert window >= 2.0 * full
