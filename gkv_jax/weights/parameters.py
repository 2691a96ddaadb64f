"""Parameter trees from checkpoints, and back: one leaf at a time, by the model's own table."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.parameters import Naming, Parameter
from gkv_jax.models.transformer import Transformer
from gkv_jax.weights.placement import Placement, place_of

Params = dict[str, Any]
Place = Callable[[Parameter, str, np.ndarray], Any]
"""Takes a leaf, its tensor's name in the checkpoint, and the tensor as the tree has it."""

DTYPES = ("float32", "bfloat16", "float16")

_PATIENCE_S = 2.0
"""What takes longer has a progress bar."""

TIED_HEAD = {"huggingface": "lm_head.weight", "gguf": "output.weight"}

# Tensors that checkpoints carry beside the weights.
_NOT_WEIGHTS = (
    "rotary_emb.inv_freq",  # old transformers stored the frequencies; they follow from rope.theta
    "rope_freqs.weight",  # GGUF's Llama 3 scaling factors; they went into config.rope
)


def tree_of(model: Transformer, make: Callable[[Parameter], Any]) -> Params:
    """The parameter tree with what ``make`` gives for each leaf."""
    tree: Params = {"layers": [{} for _ in range(model.num_layers)]}
    for leaf in model.parameters():
        place = tree if leaf.layer is None else tree["layers"][leaf.layer]
        place[leaf.name] = make(leaf)
    return tree


def listed(names: Collection[str], limit: int = 12) -> str:
    """The first of them in order, for a message, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def check_dtype(dtype: str) -> None:
    """Raises UserError for a dtype that weights cannot take."""
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not served; known: {', '.join(DTYPES)}")


def placer(dtype: str, placement: Placement = None) -> Place:
    """A function that converts one host array to ``dtype`` and puts it where ``placement`` says.

    On the host it takes the memory of the result, which on CPUs becomes the array itself, and is
    dropped elsewhere once the copy is there: one is on its way while the next is converted. It raises
    UserError, naming the tensor, when a finite value overflows float16.
    """
    check_dtype(dtype)
    target = jax.numpy.dtype(dtype)
    on_its_way: list[jax.Array] = []

    def place(leaf: Parameter, name: str, array: np.ndarray) -> jax.Array:
        converted = _converted(array, target)
        if dtype == "float16" and not np.isfinite(converted).all():
            raise UserError(f"tensor {name} does not fit float16; use dtype bfloat16 or float32")
        while on_its_way:
            on_its_way.pop().block_until_ready()
        placed = jax.device_put(converted, place_of(placement, leaf.path, array.shape))
        on_its_way.append(placed)
        return placed

    return place


_BLOCK_BYTES = 8 << 20
_ALIGNMENT = 64
"""JAX takes over host memory that begins at a multiple of this, instead of copying it."""


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy of ``array`` in ``dtype``, made in blocks of rows as they lie in memory."""
    size = array.size * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    out = memory[start : start + size].view(dtype).reshape(array.shape)
    rows_last = array.ndim == 2 and abs(array.strides[0]) < abs(array.strides[1])
    source, target = (array.T, out.T) if rows_last else (array, out)
    step = max(1, _BLOCK_BYTES * len(source) // max(size, 1))
    with np.errstate(over="ignore"):
        for row in range(0, len(source), step):
            target[row : row + step] = source[row : row + step]
    return out


def fill_params(
    model: Transformer,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    place: Place,
) -> Params:
    """Build the tree from ``tensors``, reading, transposing and placing one tensor at a time.

    ``tensors`` maps the checkpoint's names to arrays, linear weights ``[out, in]``; a lazy mapping
    keeps host memory at one tensor. Raises UserError that lists tensors which are missing,
    unexpected or misshapen, or when a tied checkpoint stores a head that differs from its embedding.
    A progress bar appears on terminals when it takes long.
    """
    from tqdm import tqdm

    tensors = model.checkpoint(tensors, naming)
    wanted = {leaf.key(naming) for leaf in model.parameters()}
    _compare_names(model, wanted, set(tensors), naming)

    def read(leaf: Parameter) -> Any:
        key = leaf.key(naming)
        array = tensors[key]
        if array.shape != leaf.shape:
            _refuse_shapes(model, tensors, naming, leaf)
        if leaf.name == "embed" and model.config.tie_word_embeddings:
            _check_tied_head(array, tensors, naming)
        placed = place(leaf, key, array.T if leaf.linear else array)
        bar.update()
        return placed

    with tqdm(
        total=len(wanted), desc="weights", unit="tensor", delay=_PATIENCE_S, disable=None
    ) as bar:
        return tree_of(model, read)


def quantize_in_turn(model: Transformer, params: Params) -> Params:
    """``model.quantize(params)``, one layer after the other, each of whose floats goes before the next.

    Beside ``params``, which it empties, it takes the memory of one layer. Layers of a model have the
    same leaves.
    """
    layers = params.pop("layers")
    one = jax.jit(
        lambda rest, layer: model.quantize({**rest, "layers": [layer]})["layers"][0],
    )
    for index in range(len(layers)):
        layers[index] = jax.block_until_ready(one(params, layers[index]))
    rest = jax.jit(lambda rest: model.quantize({**rest, "layers": []}))(params)
    params.clear()
    return {**rest, "layers": layers}


def to_hf_state_dict(model: Transformer, params: Params) -> dict[str, np.ndarray]:
    """The inverse of :func:`fill_params`: host arrays under the names of transformers' class.

    As in torch's ``state_dict``, a tied model has ``lm_head.weight`` too (the embedding itself).
    """
    state = {}
    for leaf in model.parameters():
        node = params if leaf.layer is None else params["layers"][leaf.layer]
        array = np.asarray(node[leaf.name])
        state[leaf.huggingface] = array.T if leaf.linear else array
    if model.config.tie_word_embeddings:
        state[TIED_HEAD["huggingface"]] = state["model.embed_tokens.weight"]
    return state


def _compare_names(model: Transformer, wanted: set[str], found: set[str], naming: Naming) -> None:
    extra = {name for name in found - wanted if not name.endswith(_NOT_WEIGHTS)}
    if model.config.tie_word_embeddings:
        extra.discard(TIED_HEAD[naming])  # _check_tied_head looks at its values
    missing = wanted - found
    faults = []
    if missing:
        faults.append(f"missing: {listed(missing)}")
    if extra:
        faults.append(f"unexpected: {listed(extra)}")
    if faults:
        hint = "; the configuration may belong to another checkpoint"
        raise UserError("the tensors do not fit the configuration; " + "; ".join(faults) + hint)


def _refuse_shapes(
    model: Transformer, tensors: Mapping[str, np.ndarray], naming: Naming, first: Parameter
) -> NoReturn:
    """The misshapen tensors of the first layer that has one, and those outside of the layers."""
    layers = (None, first.layer or 0)
    faults = []
    for leaf in (leaf for leaf in model.parameters() if leaf.layer in layers):
        shape = tensors[leaf.key(naming)].shape
        if shape != leaf.shape:
            faults.append(f"{leaf.key(naming)} {list(shape)} instead of {list(leaf.shape)}")
    raise UserError(
        f"the tensors have other shapes than the configuration says: {'; '.join(faults)}; "
        "the configuration may belong to another checkpoint"
    )


def _check_tied_head(embed: np.ndarray, tensors: Mapping[str, np.ndarray], naming: Naming) -> None:
    key = TIED_HEAD[naming]
    if key in tensors and not np.array_equal(tensors[key], embed):
        raise UserError(
            f"tie_word_embeddings is true, but {key} differs from the embedding; "
            "set tie_word_embeddings to false in config.json if the head is its own"
        )
