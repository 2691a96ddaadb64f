"""Hugging Face checkpoints: a local folder or a hub repository with safetensors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models import families
from gkv_jax.models.mxfp4 import BLOCKS, SCALES
from gkv_jax.models.transformer import Transformer

_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
# Second copies of the weights in the layouts of other libraries.
_NOT_PATTERNS = ["consolidated*", "original/*", "onnx/*", "runs/*"]

# What a family that reads MXFP4 (gkv_jax.models.mxfp4) takes as it is stored.
_MXFP4 = (BLOCKS, SCALES)


@dataclass(frozen=True)
class SafetensorsCheckpoint(Mapping[str, np.ndarray]):
    """The tensors of one or several safetensors files: views of the files, mapped when looked up.

    A view is read while it is converted, and its memory is free again when it is dropped.
    """

    _stored: dict[str, "_Stored"]

    @classmethod
    def open(cls, folder: Path) -> "SafetensorsCheckpoint":
        """Read the headers of ``model.safetensors``, or of the shards that the index names.

        Raises UserError when there is no such file, or when a shard is missing or damaged.
        """
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map", {})
            file_of = {name: folder / file for name, file in weight_map.items()}
        else:
            files = sorted(folder.glob("*.safetensors"))
            if len(files) != 1:
                raise UserError(
                    f"{folder}: expected model.safetensors or model.safetensors.index.json, found "
                    f"{len(files)} safetensors files; convert other formats with save_pretrained"
                )
            file_of = dict.fromkeys(_stored(files[0]), files[0])
        stored: dict[str, _Stored] = {}
        for file in sorted(set(file_of.values())):
            present = _stored(file)
            claimed = {name for name, other in file_of.items() if other == file}
            if claimed != present.keys():
                wrong = ", ".join(sorted(claimed ^ present.keys())[:8])
                raise UserError(f"{file.name} and {index.name} disagree about: {wrong}")
            stored |= present
        return cls(stored)

    def __getitem__(self, name: str) -> np.ndarray:
        stored = self._stored[name]
        floating = stored.dtype in _FLOATING
        if not floating and not (stored.dtype == "U8" and name.endswith(_MXFP4)):
            raise UserError(
                f"tensor {name} is stored as {stored.dtype}; quantised safetensors are not served"
            )
        dtype = np.dtype(_FLOATING[stored.dtype] if floating else np.uint8)
        if 0 in stored.shape:
            return np.empty(stored.shape, dtype)
        mapped = np.memmap(stored.file, dtype, "r", stored.start, stored.shape)
        return mapped.view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _Stored(NamedTuple):
    """Where a tensor lies: ``dtype`` as safetensors calls it, ``start`` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


_FLOATING = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


def read_model(folder: Path) -> Transformer:
    """The architecture that ``config.json``, and ``generation_config.json`` if any, describe.

    Raises UserError, naming the field, for what is not served.
    """
    generation = folder / "generation_config.json"
    return families.from_hf(
        read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None
    )


def read_tokenizer(folder: Path) -> Any:
    """The ``transformers`` tokenizer of a folder; it never looks anything up on the network.

    Raises UserError when there is none that can be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # tokenizer.json says everything. AutoTokenizer of transformers 5 would let the class named in
    # tokenizer_config.json replace its pre-tokenizer: "GPT2Tokenizer", as SmolLM2 has it, drops the
    # digit splitting, and the tokens are not those that the model was trained on.
    whole = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises bare Exceptions for a damaged file.
        raise UserError(f"{folder}: the tokenizer cannot be read ({_first_line(error)})") from error


def download_repository(repository: str, revision: str | None = None) -> Path:
    """The local folder of a hub repository, downloading what is missing, with progress bars.

    Files already in the hub's own cache are not downloaded again, and serve offline. Raises
    UserError when the repository cannot be had.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=_PATTERNS,
                ignore_patterns=_NOT_PATTERNS,
            )
        )
    except Exception as error:
        # The hub client lets the errors of its HTTP library through, and that library has changed
        # twice; all that is done with any of them is to say so.
        raise UserError(
            f"cannot download {repository} from the Hugging Face hub ({_first_line(error)}); check "
            "the name, the network and `hf auth login`, or give a local folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def _stored(file: Path) -> dict[str, _Stored]:
    """The header of a file, which the safetensors package has found to be whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except FileNotFoundError as error:
        raise UserError(f"{file.parent} has no {file.name}, which its index names") from error
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is truncated or damaged ({_first_line(error)}); download it again"
        ) from error
    return {
        name: _Stored(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
