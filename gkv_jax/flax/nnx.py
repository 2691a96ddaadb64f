"""``flax.nnx``: a user's module as a ``Decoder``, and our families as trainable modules."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gkv_jax.errors import UserError
from gkv_jax.flax.attention import INSIDE, AttentionHook, CausalAttend
from gkv_jax.flax.checks import completed
from gkv_jax.flax.decoder import Calling, FlaxDecoder, check_positions
from gkv_jax.flax.versions import import_flax
from gkv_jax.models.protocol import Attend, AttentionLayer, Decoder, Params

nnx = import_flax("nnx")

Path = tuple[str, ...]

_UNREAD = nnx.Any(nnx.RngState, nnx.Intermediate)
"""What an evaluation reads nothing of: nothing is drawn, and what was sown is an output."""


class Structure:
    """An nnx module without its arrays: what ``nnx.split`` gives. Its hash is computed once."""

    def __init__(self, model: Any) -> None:
        try:
            self.graphdef, unread, state = nnx.split(model, _UNREAD, ...)
            hash(self.graphdef)
        except TypeError as error:
            raise UserError(
                f"model holds something that cannot be compared ({error}): make its class "
                "@dataclass(frozen=True), and a dict or list of plain values a tuple"
            ) from error
        self.paths, _, self.treedef = _flatten(state)
        _, leaves, self.unread_treedef = _flatten(unread)
        # They must be there.
        self.unread = tuple(_aval(leaf) for leaf in leaves)
        self._hash = hash((self.graphdef, self.treedef, self.unread_treedef, self.unread))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self is other or (
            self._hash == other._hash
            and self.graphdef == other.graphdef
            and self.treedef == other.treedef
            and self.unread_treedef == other.unread_treedef
            and self.unread == other.unread
        )

    def merge(self, params: Params) -> Any:
        """A module with these parameters, for evaluation. It shares nothing with the user's."""
        leaves = [_lookup(params, path) for path in self.paths]
        unread = [_stand_in(*each) for each in self.unread]
        model = nnx.merge(
            self.graphdef,
            jax.tree.unflatten(self.unread_treedef, unread),
            jax.tree.unflatten(self.treedef, leaves),
        )
        model.eval()
        return model


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxDecoder(FlaxDecoder):
    """A user's ``nnx.Module`` as a ``Decoder``. Parameters are nested dicts of its arrays, by path."""

    structure: Structure

    def bind(self, params: Params) -> Any:
        return self.structure.merge(params)

    def run(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | None = None,
        hook: AttentionHook | None = None,
    ) -> jax.Array:
        model = self.bind(params)
        if hook is not None:
            for module in _modules(model):
                original = getattr(module, "attention_fn", None)
                if callable(original):
                    if getattr(module, "decode", False):
                        raise UserError(
                            "model: an attention layer has decode=True, a cache of its own; build it with "
                            "decode=False"
                        )
                    module.attention_fn = hook.instead_of(original)
        before = _leaves(model, nnx.Not(nnx.Intermediate))
        args, named = self.calling.arguments(tokens, positions, attend)
        out: jax.Array = getattr(model, self.calling.method)(*args, **named)
        after = _leaves(model, nnx.Not(nnx.Intermediate))
        changed = [path for path, leaf in before.items() if after.get(path) is not leaf]
        if any(path in _leaves(model, nnx.Param) for path in changed):
            raise UserError(INSIDE)  # Flax's transformations give back all that they are given
        if changed:
            raise UserError(
                f"model: its forward pass changes {'.'.join(changed[0])}; where a text is read in parts it "
                "must change nothing (batch statistics in training? random numbers of a dropout? a cache?): "
                "turn that off with options"
            )
        return out

    def params_of(self, source: Any) -> Params:
        if isinstance(source, nnx.Module):
            source = nnx.split(source)[1]
        if isinstance(source, nnx.State):
            return _nested(nnx.filter_state(source, nnx.Not(_UNREAD)))
        return source


def from_nnx(
    model: Any,
    *,
    max_positions: int,
    method: str | Callable[..., Any] = "__call__",
    tokens: str | None = None,
    positions: str = "positions",
    attend: str = "attend",
    options: Mapping[str, Any] | None = None,
    head: Callable[[Any], jax.Array] | None = None,
    layers: Sequence[AttentionLayer] | None = None,
    example: Sequence[int] | None = None,
    check: bool = True,
) -> tuple[NnxDecoder, Params]:
    """A decoder of your own, as an ``nnx.Module``, for ``Engine``.

    Its attention reaches the cache in one of two ways. Where its method has an argument ``attend``, it is
    given ours, see ``gkv_jax.models.protocol.Attend``. Else ours takes the place of ``attention_fn`` in
    ``nnx.MultiHeadAttention``, and in any module of yours with that attribute, in a copy: your model stays
    as it is. It is called in evaluation mode (``model.eval()``), whatever mode yours is in.

    Args:
      model: gives logits ``[B,N,V]`` for tokens int32 ``[B,N]``; or hidden states, see ``head``.
      max_positions: rows of its position table, or the length that its rotations were trained for.
      method: to be called, by name or as the class has it.
      tokens, positions, attend: names of its arguments; the first is for tokens unless named. It need
        not have the others. ``positions`` are int32 ``[B,N]``; texts come in parts, so that a model that
        counts positions by itself is refused.
      options: arguments that are the same in every call, such as ``{"train": False}``.
      head: where ``method`` gives final hidden states ``[B,N,Dm]``: from the model to its LM head
        ``[V,Dm]``, which is then read only where the grammar allows a token. It is all that lies between
        the two: no bias, no scale; ``SoftCapped(head, cap)`` of ``pallas_kernels.masked_head`` for a soft
        cap. Define it once: another function is another model to the compiler.
      layers: rotations and windows, one for each layer: with a rotation, keys and queries are to come to
        ``attend`` without theirs. None: rotated by your code or not at all, windows as in the masks.
      example: a text to look at the model with; random tokens if None.
      check: whether to compare the model through a cache with itself, which compiles it twice.

    Returns:
      The decoder, equal for models of one structure, and its parameters, which share their arrays with
      ``model``. ``Engine.update_params(model)`` takes newer ones.

    Raises:
      UserError: the model cannot be served, with the reason and the way out.
    """
    if not isinstance(model, nnx.Module):
        raise UserError(f"model is {type(model).__name__}; give an nnx.Module, or use from_linen")
    check_positions(max_positions)
    if jax.tree.leaves(nnx.state(model, nnx.Cache)):
        raise UserError(
            "model holds nnx.Cache variables, a cache of its own; build it with decode=False and without "
            "init_cache"
        )
    decoder = NnxDecoder(
        calling=Calling.of(
            type(model),
            method=method,
            tokens=tokens,
            positions=positions,
            attend=attend,
            options=options,
        ),
        max_positions=max_positions,
        head_of=head,
        structure=Structure(model),
    )
    params = decoder.params_of(model)
    return completed(decoder, params, layers=layers, example=example, check=check), params


class TrainableDecoder(nnx.Module):  # type: ignore[name-defined]
    """One of our decoders as a module to be trained. See ``trainable``."""

    def __init__(self, decoder: Decoder, params: Params, remat: bool) -> None:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        self.decoder, self.remat = decoder, remat
        self.weights = _Weights()
        for path, leaf in leaves:
            node = self.weights
            *parents, name = (_name(key) for key in path)
            for parent in parents:
                if not hasattr(node, parent):
                    setattr(node, parent, _Weights())
                node = getattr(node, parent)
            setattr(node, name, nnx.Param(leaf))
        paths = tuple(tuple(_name(key) for key in path) for path, _ in leaves)
        self.shape = _Shape(treedef, paths)

    def __call__(self, tokens: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Tokens int32 ``[B,N]`` to float32 logits ``[B,N,V]``, attending causally.

        ``mask`` bool ``[B,N]`` says which tokens exist, so that texts may be padded on either side; the
        logits of the others have no meaning.
        """
        params = self.params()
        layers, shape = self.decoder.layers, (tokens.shape[0], tokens.shape[1])
        attend = CausalAttend(layers, shape, mask=mask, remat=self.remat)
        logits: jax.Array = self.decoder.logits(params, self.decoder.hidden(params, tokens, attend))
        return logits

    def params(self) -> Params:
        """The live weights, in the decoder's own layout: for ``Engine.update_params``."""
        leaves = []
        for path in self.shape.paths:
            node = self.weights
            for name in path:
                node = getattr(node, name)
            leaves.append(_value(node))
        return jax.tree.unflatten(self.shape.treedef, leaves)


class _Weights(nnx.Module):  # type: ignore[name-defined]
    """A dict or list of parameters."""


@dataclasses.dataclass(frozen=True)
class _Shape:
    treedef: Any
    paths: tuple[Path, ...]


def trainable(decoder: Decoder, params: Params, *, remat: bool = True) -> TrainableDecoder:
    """One of our decoders, and its parameters, as an ``nnx.Module`` to be trained.

    Every weight is an ``nnx.Param``, under ``weights`` and its path in ``params``. The arrays are shared
    until the first step of an optimiser.

    Args:
      decoder: as ``load_model`` gives it.
      params: in floating point.
      remat: whether attention is computed again in the backward pass, so that its scores,
        ``[B,Hq,N,N]`` float32 a layer, are not kept.

    Raises:
      UserError: weights that are not floating, or a decoder that comes from a Flax model already.
    """
    if isinstance(decoder, FlaxDecoder):
        raise UserError(
            "decoder comes from a Flax model of yours; train that, and give it to update_params"
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            raise UserError(
                f"params{name} is {leaf.dtype}, which cannot be trained; load the model without quantize"
            )
    return TrainableDecoder(decoder, params, remat)


def _modules(model: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]


def _flatten(state: Any) -> tuple[tuple[Path, ...], list[Any], Any]:
    """Paths, arrays and structure of an ``nnx.State``, which holds Variables and plain arrays."""

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    paths: list[Path] = []
    leaves: list[Any] = []
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)[0]:
        for inside, leaf in jax.tree_util.tree_flatten_with_path(node)[0]:
            # The first step into a Variable leads to its value and has no name.
            inside = inside[1:] if is_variable(node) else inside
            paths.append(tuple(_name(key) for key in (*path, *inside)))
            leaves.append(leaf)
    return tuple(paths), leaves, jax.tree.structure(state)


def _leaves(model: Any, kind: Any = ...) -> dict[Path, Any]:
    paths, leaves, _ = _flatten(nnx.state(model, kind))
    return dict(zip(paths, leaves, strict=True))


def _nested(state: Any) -> dict[str, Any]:
    paths, leaves, _ = _flatten(state)
    nested: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node = nested
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return nested


def _lookup(params: Params, path: Path) -> Any:
    for name in path:
        params = params[name]
    return params


def _name(key: Any) -> str:
    """Of a step in a path of ``jax.tree_util``: the key of a dict, the index of a list, an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _value(variable: Any) -> jax.Array:
    (leaf,) = jax.tree.leaves(variable)
    return leaf


def _aval(leaf: Any) -> tuple[tuple[int, ...], Any, str | None]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf.shape, leaf.dtype, str(jax.random.key_impl(leaf)) if is_key else None


def _stand_in(shape: tuple[int, ...], dtype: Any, impl: str | None) -> jax.Array:
    if impl is None:
        return jnp.zeros(shape, dtype)
    return jnp.broadcast_to(jax.random.key(0, impl=impl), shape)
