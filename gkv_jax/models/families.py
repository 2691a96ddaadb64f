"""The families of models, and which of them a checkpoint belongs to."""

from collections.abc import Mapping
from typing import Any

from gkv_jax.errors import UserError
from gkv_jax.models.config import GGUFHeader
from gkv_jax.models.fields import Fields
from gkv_jax.models.gemma import Gemma
from gkv_jax.models.gpt_oss import GptOss
from gkv_jax.models.llama import Llama
from gkv_jax.models.mistral import Mistral
from gkv_jax.models.qwen2 import Qwen2
from gkv_jax.models.qwen3 import Qwen3
from gkv_jax.models.transformer import Transformer

FAMILIES: tuple[type[Transformer], ...] = (Llama, Mistral, Qwen2, Qwen3, Gemma, GptOss)


def from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> Transformer:
    """The model of a ``config.json`` as written by transformers 4 or 5.

    ``generation_config`` (``generation_config.json``) adds its end-of-sequence tokens. Raises
    UserError, naming the field, for an architecture or option that is not served or not known.
    """
    known = {name: family for family in FAMILIES for name in family.MODEL_TYPES}
    fields = Fields(config, "config.json: ")
    kind = fields.get("model_type")
    family = _known("config.json: model_type", kind, known)
    served = family.ARCHITECTURES[family.MODEL_TYPES.index(kind)]
    classes = fields.sequence("architectures", ())
    if classes and served not in classes:
        raise UserError(
            f"config.json: architectures={classes!r} is not served for model_type {kind!r} "
            f"(served: {served})"
        )
    model = family(family.config_from_hf(fields, generation_config or {}))
    fields.finish()
    return model


def from_gguf(header: GGUFHeader) -> Transformer:
    """The model of a GGUF file.

    Raises UserError, naming the key, for an architecture or option that is not served or not known.
    """
    known = {name: family for family in FAMILIES for name in family.GGUF_ARCHITECTURES}
    architecture = header.metadata.get("general.architecture")
    elsewhere = [name.replace("_", "-") for family in FAMILIES for name in family.MODEL_TYPES]
    if architecture in elsewhere and architecture not in [*known]:
        raise UserError(
            f"GGUF: general.architecture {architecture!r} is not read from GGUF; load this model "
            "from its Hugging Face folder or repository"
        )
    family = _known("GGUF: general.architecture", architecture, known)
    prefix = f"{architecture}."
    scoped = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    fields = Fields(scoped, f"GGUF: {prefix}")
    model = family(family.config_from_gguf(fields, header))
    fields.finish()
    return model


def _known(key: str, value: Any, known: Mapping[str, type[Transformer]]) -> type[Transformer]:
    if not isinstance(value, str) or value not in known:
        raise UserError(f"{key} {value!r} is not served; known: {', '.join(known)}")
    return known[value]
