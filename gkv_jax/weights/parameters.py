"""The parameter tree, and the one table that ties it to the names used in checkpoints.

    params = {"embed": [V, Dm], "norm": [Dm], "head": [V, Dm],          # "head" only when not tied
              "layers": [{"attn_norm": [Dm], "q": [Hq*D, Dm], "k": [Hk*D, Dm], "v": [Hk*D, Dm],
                          "o": [Dm, Hq*D], "mlp_norm": [Dm], "gate": [F, Dm], "up": [F, Dm],
                          "down": [Dm, F], ...}, ...]}

plus ``q_bias``, ``k_bias``, ``v_bias``, ``o_bias`` with ``attention_bias`` and ``gate_bias``,
``up_bias``, ``down_bias`` with ``mlp_bias``. Matrices are ``[out, in]`` and heads are in the order
of Hugging Face checkpoints (half-split rotary embeddings), so that reading one moves no element.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.config import ModelConfig

Params = dict[str, Any]
Naming = Literal["huggingface", "gguf"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Parameter:
    """One leaf of the tree, and its names elsewhere. ``layer`` is None outside the layers."""

    name: str
    layer: int | None
    huggingface: str
    gguf: str
    shape: tuple[int, ...]

    def key(self, naming: Naming) -> str:
        return self.huggingface if naming == "huggingface" else self.gguf


# name -> (module in a Hugging Face layer, tensor in a GGUF block)
_LAYER_MODULES = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}

TIED_HEAD = {"huggingface": "lm_head.weight", "gguf": "output.weight"}

# Tensors that checkpoints carry beside the weights.
_NOT_WEIGHTS = (
    "rotary_emb.inv_freq",  # old transformers stored the frequencies; they follow from rope.theta
    "rope_freqs.weight",  # GGUF's Llama 3 scaling factors; they went into config.rope
)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every leaf that a model of this configuration has, in the order of the network."""
    hidden, vocab = config.hidden_size, config.vocab_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    shapes = {
        "attn_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    biased = (("q", "k", "v", "o") if config.attention_bias else ()) + (
        ("gate", "up", "down") if config.mlp_bias else ()
    )
    yield Parameter(
        "embed", None, "model.embed_tokens.weight", "token_embd.weight", (vocab, hidden)
    )
    for layer in range(config.num_layers):
        for name, (module, block) in _LAYER_MODULES.items():
            prefixes = f"model.layers.{layer}.{module}", f"blk.{layer}.{block}"
            yield Parameter(
                name, layer, f"{prefixes[0]}.weight", f"{prefixes[1]}.weight", shapes[name]
            )
            if name in biased:
                yield Parameter(
                    f"{name}_bias",
                    layer,
                    f"{prefixes[0]}.bias",
                    f"{prefixes[1]}.bias",
                    shapes[name][:1],
                )
    yield Parameter("norm", None, "model.norm.weight", "output_norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield Parameter("head", None, "lm_head.weight", "output.weight", (vocab, hidden))


def tree_of(config: ModelConfig, make: Callable[[Parameter], Any]) -> Params:
    """The parameter tree with what ``make`` gives for each leaf."""
    tree: Params = {"layers": [{} for _ in range(config.num_layers)]}
    for leaf in parameters(config):
        place = tree if leaf.layer is None else tree["layers"][leaf.layer]
        place[leaf.name] = make(leaf)
    return tree


def placer(
    dtype: str, device: jax.Device | jax.sharding.Sharding | None = None
) -> Callable[[str, np.ndarray], jax.Array]:
    """A function that converts one host array to ``dtype`` and puts it on ``device``.

    It takes the tensor's name for its error: UserError when a finite value overflows float16.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is not served; known: {', '.join(DTYPES)}")
    target = jax.numpy.dtype(dtype)

    def place(name: str, array: np.ndarray) -> jax.Array:
        with np.errstate(over="ignore"):
            converted = array.astype(target, copy=False)
        if dtype == "float16" and not np.isfinite(converted).all():
            raise UserError(f"tensor {name} does not fit float16; use dtype bfloat16 or float32")
        return jax.device_put(converted, device)

    return place


def fill_params(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    place: Callable[[str, np.ndarray], Any],
) -> Params:
    """Build the tree from ``tensors``, reading and placing one tensor at a time.

    ``tensors`` maps the checkpoint's names to arrays ``[out, in]``; a lazy mapping keeps host
    memory at one tensor. Raises UserError that lists tensors which are missing, unexpected or
    misshapen, or when a tied checkpoint stores a head that differs from its embedding.
    """
    wanted = list(parameters(config))
    _compare_names(config, {leaf.key(naming) for leaf in wanted}, set(tensors), naming)

    def read(leaf: Parameter) -> Any:
        key = leaf.key(naming)
        array = tensors[key]
        if array.shape != leaf.shape:
            raise UserError(
                f"tensor {key} has shape {list(array.shape)}, but the configuration "
                f"says {list(leaf.shape)}"
            )
        if leaf.name == "embed" and config.tie_word_embeddings:
            _check_tied_head(array, tensors, naming)
        return place(key, array)

    return tree_of(config, read)


def to_hf_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """The inverse of :func:`fill_params`: host arrays under the names of ``LlamaForCausalLM``.

    As in torch's ``state_dict``, a tied model has ``lm_head.weight`` too (the embedding itself).
    """
    state = {}
    for leaf in parameters(config):
        node = params if leaf.layer is None else params["layers"][leaf.layer]
        state[leaf.huggingface] = np.asarray(node[leaf.name])
    if config.tie_word_embeddings:
        state[TIED_HEAD["huggingface"]] = state["model.embed_tokens.weight"]
    return state


def _compare_names(config: ModelConfig, wanted: set[str], found: set[str], naming: Naming) -> None:
    extra = {name for name in found - wanted if not name.endswith(_NOT_WEIGHTS)}
    if config.tie_word_embeddings:
        extra.discard(TIED_HEAD[naming])  # _check_tied_head looks at its values
    missing = wanted - found
    faults = []
    if missing:
        faults.append(f"missing: {_listed(missing)}")
    if extra:
        faults.append(f"unexpected: {_listed(extra)}")
    if faults:
        hint = "; the configuration may belong to another checkpoint"
        raise UserError("the tensors do not fit the configuration; " + "; ".join(faults) + hint)


def _listed(names: set[str], limit: int = 12) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def _check_tied_head(embed: np.ndarray, tensors: Mapping[str, np.ndarray], naming: Naming) -> None:
    key = TIED_HEAD[naming]
    if key in tensors and not np.array_equal(tensors[key], embed):
        raise UserError(
            f"tie_word_embeddings is true, but {key} differs from the embedding; "
            "set tie_word_embeddings to false in config.json if the head is its own"
        )
