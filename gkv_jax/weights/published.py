"""What a model's publisher wrote about it, kept as text so that later versions read it anew.

A mapping of file names to texts: ``config.json`` and perhaps ``generation_config.json``, or for a
model from a GGUF file ``gguf.json``, its metadata without the tokenizer's lists.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.config import GGUFHeader
from gkv_jax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from gkv_jax.models.transformer import Transformer
from gkv_jax.weights.huggingface import read_json, read_model

Published = Mapping[str, str]

CONFIG, GENERATION, GGUF = "config.json", "generation_config.json", "gguf.json"


def of_folder(folder: Path) -> Published:
    """The files that a folder has of them."""
    files = [folder / GGUF, folder / CONFIG, folder / GENERATION]
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}


def of_gguf(header: GGUFHeader) -> Published:
    """Of a GGUF file."""
    prefix = header.metadata["general.architecture"]
    tokens = header.metadata.get("tokenizer.ggml.tokens", ())
    metadata = {f"{prefix}.vocab_size": len(tokens)} | {
        key: value
        for key, value in header.metadata.items()
        if not (key.startswith("tokenizer.") and isinstance(value, list | str))
    }
    factors = header.rope_factors
    content = {
        "metadata": metadata,
        "tensors": sorted(header.tensors),
        "rope_factors": None if factors is None else [float(factor) for factor in factors],
    }
    return {GGUF: json.dumps(content, indent=1) + "\n"}


def of_model(model: Transformer) -> Published:
    """A ``config.json`` written from the model's configuration, for one that no file describes.

    Raises UserError when reading it does not give the same model again.
    """
    config = model.config
    kind = config.architecture if config.architecture in model.MODEL_TYPES else model.MODEL_TYPES[0]
    values: dict[str, Any] = {
        "architectures": [model.ARCHITECTURES[model.MODEL_TYPES.index(kind)]],
        "model_type": kind,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rope_parameters": _rope_parameters(config.rope),
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    renamed = {"architecture", "num_layers", "num_heads", "num_kv_heads", "rope", "eos_token_ids"}
    for field in dataclasses.fields(config):
        if field.name not in renamed | {"windows"}:
            values[field.name] = getattr(config, field.name)
    if config.windows:
        values["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ]
        values["sliding_window"] = max(window or 0 for window in config.windows)
        values["use_sliding_window"] = True
    tries = (values, {k: v for k, v in values.items() if k not in _OPTIONAL})
    for each in tries:
        try:
            if families.from_hf(each) == model:
                return {CONFIG: json.dumps(each, indent=2) + "\n"}
        except (UserError, TypeError):
            continue
    raise UserError(
        f"no config.json can be written from this {type(model).__name__}'s configuration; save it "
        "with `published`, the text of the one that it was made from"
    )


def read(folder: Path) -> Transformer:
    """The model that the files in ``folder`` describe. Raises UserError for one not served."""
    if not (folder / GGUF).is_file():
        return read_model(folder)
    content = read_json(folder / GGUF)
    try:
        factors = content["rope_factors"]
        header = GGUFHeader(
            content["metadata"],
            content["tensors"],
            None if factors is None else np.array(factors, np.float32),
        )
    except KeyError as error:
        raise UserError(f"{folder / GGUF} lacks {error}") from error
    return families.from_gguf(header)


# Fields that not every family's config.json has, and those that only some know.
_OPTIONAL = frozenset({"attention_bias", "mlp_bias", "use_sliding_window"})


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    kinds = {Llama3Scaling: "llama3", LinearScaling: "linear", YarnScaling: "yarn"}
    options: dict[str, Any] = {"rope_type": "default"}
    if rope.scaling is not None:
        options = dataclasses.asdict(rope.scaling) | {"rope_type": kinds[type(rope.scaling)]}
    if rope.partial_rotary_factor != 1.0:
        options["partial_rotary_factor"] = rope.partial_rotary_factor
    return options | {"rope_theta": rope.theta}
