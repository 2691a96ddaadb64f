"""Models kept with Orbax: in the model's own layout and dtype, restored straight onto their devices.

A folder is complete or refused: its files are compared by size, and all but the large ones by checksum
(changed bytes within a large one, the values of weights, go unnoticed)::

    gkv_jax.json                    format, dtype, quantisation, leaves, sizes and checksums of files
    config.json, ... or gguf.json   what the publisher wrote (``gkv_jax.weights.published``)
    tokenizer.json, ...
    params/                         an Orbax checkpoint: a dict from the leaves' names to arrays

Needs ``orbax-checkpoint``, which is imported where it is used.
"""

import json
import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gkv_jax.errors import UserError
from gkv_jax.models.transformer import Transformer
from gkv_jax.weights import published as publishing
from gkv_jax.weights.folders import locked, replacing
from gkv_jax.weights.parameters import Params, check_dtype, listed, tree_of
from gkv_jax.weights.placement import Placement, place_of
from gkv_jax.weights.published import Published
from gkv_jax.weights.registry import LoadedModel
from pallas_kernels.int8_matmul import Int8Matrix

MANIFEST = "gkv_jax.json"
PARAMS = "params"

_FORMAT = 2
_CHECKSUM_BYTES = 1 << 20
"""Larger files have no checksum: reading them twice would take as long as loading the model.

The smaller ones hold Orbax's own records. It must not meet damage there: it reads in parallel, and what
still comes in after the first error is printed as errors that nobody can catch."""
_IN_FLIGHT_BYTES = 128 << 20
"""What Orbax may hold beside the arrays while it reads."""


class Manifest(NamedTuple):
    """``gkv_jax.json``: the leaves' shapes and dtypes by their paths, the files' prints by theirs."""

    dtype: str
    int8: bool
    leaves: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, "Print"]


class Print(NamedTuple):
    """What a file must be: its size in bytes, and its CRC-32 unless it is large."""

    size: int
    crc32: int | None

    @classmethod
    def of(cls, path: Path) -> "Print":
        size = path.stat().st_size
        return cls(size, zlib.crc32(path.read_bytes()) if size <= _CHECKSUM_BYTES else None)

    def is_of(self, path: Path) -> bool:
        """Whether a file is there, can be read, and is what it must be."""
        try:
            return path.is_file() and self == Print.of(path)
        except OSError:
            return False


def save(
    folder: str | Path,
    model: Transformer,
    params: Params,
    tokenizer: Any,
    *,
    published: Published | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model so that :func:`load`, ``load_model`` and ``Engine.from_pretrained`` read it.

    ``params`` may be those of ``model.quantize``. The folder appears when all of it is there; after a
    failure it is as it was. Of two that write it at once, one waits.

    Args:
      folder: a new one, or an empty one, or a link to where it shall be.
      tokenizer: a ``transformers`` tokenizer.
      published: the publisher's own files (``LoadedModel.published``); by default a config.json
        is written from ``model.config``, where ``gkv_jax.weights.published.of_model`` can.
      overwrite: replace a folder that holds such a model.

    Raises:
      UserError: the folder is taken, or parameters or ``published`` are not those of ``model``.
    """
    from gkv_jax.weights.gguf_tokenizer import save_tokenizer

    ocp = import_orbax()
    leaves, int8 = named_leaves(params), is_quantized(params)
    compare_shapes(
        named_shapes(_abstract(model, int8, "float32")),
        named_shapes(params),
        "params: the leaves are not those of the model",
    )
    dtype = str(params["embed"].dtype)
    check_dtype(dtype)
    folder = Path(folder).expanduser().resolve()
    _check_free(folder, overwrite)  # before anything is created
    with locked(folder):
        _check_free(folder, overwrite)
        try:
            with replacing(folder) as scratch:
                for name, text in (published or publishing.of_model(model)).items():
                    (scratch / name).write_text(text, encoding="utf-8")
                if publishing.read(scratch) != model:
                    raise UserError("published: it describes another model than `model`")
                save_tokenizer(tokenizer, scratch)
                with _checkpointer(ocp) as checkpointer:
                    checkpointer.save(scratch / PARAMS, args=ocp.args.PyTreeSave(leaves))
                _write_manifest(scratch, dtype, int8, leaves)
                _check_free(folder, overwrite)  # others need not know of the lock
        except OSError as error:
            raise UserError(f"cannot write {folder} ({error.strerror or error})") from error


def load(
    folder: str | Path, dtype: str | None = None, *, placement: Placement = None
) -> LoadedModel:
    """Restore what :func:`save` wrote, every leaf straight onto its device or sharding.

    Args:
      dtype: float32, bfloat16 or float16 for the floating-point leaves (int8 matrices stay what
        they are, and multiply in this dtype); None for what is stored.
      placement: a device, a sharding for every leaf, or a rule by the leaf's name
        (``gkv_jax.weights.placement``); None for JAX's default device.

    Raises:
      UserError: the folder holds no such model, is of a later version, or incomplete: a file is
        missing, unreadable or changed (bytes changed within a large one go unnoticed); its leaves are
        not those of its configuration; a value does not fit float16.
    """
    from gkv_jax.weights.huggingface import read_tokenizer

    if dtype is not None:
        check_dtype(dtype)
    folder = Path(folder).expanduser().absolute()
    manifest = _read_manifest(folder)
    ocp = import_orbax()
    model = publishing.read(folder)
    tree = _abstract(model, manifest.int8, dtype or manifest.dtype)
    wanted, stored = named_leaves(tree), manifest.leaves
    compare_shapes(
        named_shapes(tree),
        {name: shape for name, (shape, _) in stored.items()},
        f"{folder / MANIFEST}: the leaves are not those of the model's configuration",
    )
    targets = {
        name: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype if dtype else jnp.dtype(stored[name][1]),
            sharding=place_of(placement, name, leaf.shape),
        )
        for name, leaf in wanted.items()
    }
    largest = max(jnp.dtype(kind).itemsize * math.prod(shape) for shape, kind in stored.values())
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            # A dtype, even the stored one, costs a turn of another thread.
            dtype=None if target.dtype == stored[name][1] else target.dtype,
            sharding=target.sharding,
            global_shape=target.shape,
        )
        for name, target in targets.items()
    }
    args = ocp.args.PyTreeRestore(targets, restore_args=restore_args)
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(read_tokenizer, folder)  # takes as long as a small model's arrays
        try:
            with _checkpointer(ocp, max(largest, _IN_FLIGHT_BYTES)) as checkpointer:
                leaves = checkpointer.restore(folder / PARAMS, args=args)
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"{folder / PARAMS} is damaged ({first[:200]}); convert it again"
            ) from error
        tokenizer = reading.result()
    if dtype == "float16":
        _check_finite(leaves, stored)
    params = jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in wanted])
    return LoadedModel(model, params, tokenizer, publishing.of_folder(folder))


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is one that :func:`save` wrote, or what a copy has of one so far."""
    if (folder / MANIFEST).is_file():
        return True
    return (folder / PARAMS).is_dir() and not any(folder.glob("*.safetensors"))


def read_model(folder: Path) -> Transformer:
    """The architecture of such a folder. Raises UserError as :func:`load` does."""
    _read_manifest(folder)
    return publishing.read(folder)


def is_quantized(params: Params) -> bool:
    """Whether the tree holds int8 matrices."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, Int8Matrix))
    return any(isinstance(leaf, Int8Matrix) for leaf in leaves)


def named_leaves(params: Any) -> dict[str, Any]:
    """The leaves of a tree by their path: ``layers.0.q``, ``layers.0.qkv.values``, in tree order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def named_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Their shapes by their path."""
    return {name: tuple(leaf.shape) for name, leaf in named_leaves(params).items()}


def import_orbax() -> Any:
    """``orbax.checkpoint``. Raises UserError, naming the extra, when it is not installed."""
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise UserError(
            f"checkpoints need orbax-checkpoint ({error}): pip install 'gkv_jax[orbax]'"
        ) from error
    return ocp


def _checkpointer(ocp: Any, in_flight_bytes: int = _IN_FLIGHT_BYTES) -> Any:
    """Uncompressed: weights hardly shrink, and decompression takes longer than reading."""
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_compression=False, restore_concurrent_gb=in_flight_bytes / 1e9
        )
    )


def _abstract(model: Transformer, int8: bool, dtype: str) -> Params:
    """The model's tree with shapes in the place of arrays."""

    def leaf(parameter: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(parameter.tree_shape, jnp.dtype(dtype))

    tree = tree_of(model, leaf)
    quantized: Params = jax.eval_shape(model.quantize, tree) if int8 else tree
    return quantized


def compare_shapes(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raise UserError, beginning with ``what``, that lists leaves which differ."""
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(faults.values()):
        texts = [f"{kind}: {listed(names)}" for kind, names in faults.items() if names]
        raise UserError(f"{what}; {'; '.join(texts)}")


def _check_finite(leaves: Mapping[str, jax.Array], stored: Mapping[str, tuple[Any, str]]) -> None:
    for name, leaf in leaves.items():
        narrowed = leaf.dtype == jnp.float16 and stored[name][1] != "float16"
        if narrowed and not bool(jnp.isfinite(leaf).all()):
            raise UserError(f"leaf {name} does not fit float16; use dtype bfloat16 or float32")


def _write_manifest(folder: Path, dtype: str, int8: bool, leaves: Mapping[str, Any]) -> None:
    manifest = {
        "format": _FORMAT,
        "dtype": dtype,
        "quantization": "int8" if int8 else None,
        "leaves": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()},
        "files": {
            path.relative_to(folder).as_posix(): Print.of(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete folder."""
    from gkv_jax.weights.huggingface import read_json

    path = folder / MANIFEST
    if not path.is_file():
        if (folder / PARAMS).is_dir():
            raise UserError(
                f"{folder} is incomplete: it has {PARAMS}/, but no {MANIFEST}; copy all of it, or "
                "convert the model again"
            )
        raise UserError(
            f"{folder} has no {MANIFEST}; make such a folder with "
            "python -m gkv_jax.weights.convert NAME FOLDER"
        )
    content = read_json(path)
    if content.get("format") != _FORMAT:
        raise UserError(
            f"{path}: format {content.get('format')!r} is not served (served: {_FORMAT}); convert "
            "the model again with this version of gkv_jax"
        )
    try:
        manifest = Manifest(
            content["dtype"],
            {"int8": True, None: False}[content["quantization"]],
            {
                name: (tuple(map(index, shape)), jnp.dtype(kind).name)
                for name, (shape, kind) in content["leaves"].items()
            },
            {
                name: Print(index(size), None if crc32 is None else index(crc32))
                for name, (size, crc32) in content["files"].items()
            },
        )
        check_dtype(manifest.dtype)
    except (AttributeError, LookupError, TypeError, ValueError, UserError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy or convert the model again"
        ) from error
    wrong = [name for name, wanted in manifest.files.items() if not wanted.is_of(folder / name)]
    if wrong:
        raise UserError(
            f"{folder} is incomplete or damaged: {listed(wrong)} missing, unreadable or changed; "
            "copy or convert it again"
        )
    return manifest


def _check_free(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise UserError(f"{folder} is there already; choose another folder, or overwrite it")
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} has no {MANIFEST}; what else it holds is not overwritten")
