"""A draft model without a second model: the target itself, without some of its layers.

Self-speculative decoding, "Draft & Verify" (arXiv 2309.08168), but with whole layers left out and a
cache of the draft's own. It needs no memory for weights: they are shared.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gkv_jax import DraftModel, UserError
from gkv_jax.models.protocol import Params
from gkv_jax.models.transformer import Transformer

# Found greedily: of the layers but the first and the last, one after the other was left out, each time the
# one without which the draft's best token is most often the whole model's (teacher-forced, without masks,
# 960 tokens of documents that the model wrote under schemas). On other documents (2,037 tokens) that is
# so for 35, 62 and 80 % of tokens. With ten layers it is under 1 %.
SMOLLM2_LAYERS: dict[int, tuple[int, ...]] = {
    15: (0, 1, 2, 8, 11, 15, 16, 17, 18, 19, 20, 24, 27, 28, 29),
    20: (0, 1, 2, 5, 7, 8, 9, 11, 15, 16, 17, 18, 19, 20, 22, 23, 24, 27, 28, 29),
    25: (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 27, 28, 29),
}  # fmt: skip
"""For SmolLM2-135M-Instruct, which has 30 layers: those that are kept, by their number."""


def layers_of(name: str, model: Transformer) -> tuple[int, ...]:
    """The layers that ``skip:K`` keeps.

    Raises:
      UserError: none were chosen for this K or this model.
    """
    known = {f"skip:{count}": layers for count, layers in SMOLLM2_LAYERS.items()}
    if name not in known or (model.num_layers, model.config.hidden_size) != (30, 576):
        raise UserError(
            f"--draft-model {name}: layers were chosen for smollm2-135m-instruct and {', '.join(known)}"
        )
    return known[name]


def skipping(
    model: Transformer, params: Params, layers: Sequence[int]
) -> tuple[Transformer, Params]:
    """A model with these layers of ``model``, and its parameters; the weights are shared."""
    config = dataclasses.replace(model.config, num_layers=len(layers))
    kept = {**params, "layers": [params["layers"][index] for index in layers]}
    return dataclasses.replace(model, config=config), kept


def self_draft(
    model: Transformer, params: Params, tokenizer: Any, layers: Sequence[int]
) -> DraftModel:
    """``model`` with these of its layers."""
    return DraftModel(*skipping(model, params, layers), tokenizer)
