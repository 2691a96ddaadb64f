"""``flax.linen``: a user's module and its variables as a ``Decoder``."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gkv_jax.errors import UserError
from gkv_jax.flax.attention import AttentionHook
from gkv_jax.flax.checks import completed
from gkv_jax.flax.decoder import Calling, FlaxDecoder, check_positions
from gkv_jax.flax.versions import import_flax
from gkv_jax.models.protocol import Attend, AttentionLayer, Params

linen = import_flax("linen")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinenDecoder(FlaxDecoder):
    """A user's ``linen.Module`` as a ``Decoder``. Parameters are its variables: ``{"params": ...}``."""

    module: Any
    collections: tuple[str, ...]

    def bind(self, params: Params) -> Any:
        return params

    def run(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | None = None,
        hook: AttentionHook | None = None,
    ) -> jax.Array:
        args, named = self.calling.arguments(tokens, positions, attend)
        with contextlib.nullcontext() if hook is None else _hooked(hook):
            out: jax.Array = self.module.apply(params, *args, method=self.calling.method, **named)
        return out

    def params_of(self, source: Any) -> Params:
        if not isinstance(source, Mapping):
            return source
        # Boxes of linen.with_partitioning are what init gives; training states hold what is in them.
        variables = {name: _plain(tree) for name, tree in linen.meta.unbox(source).items()}
        if self.collections == ("params",) and "params" not in variables:
            return {"params": variables}
        return variables


def from_linen(
    module: Any,
    variables: Mapping[str, Any],
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
) -> tuple[LinenDecoder, Params]:
    """A decoder of your own, as a ``linen.Module`` and its variables, for ``Engine``.

    As ``from_nnx``, but for ``linen.MultiHeadDotProductAttention``; ``module`` itself is never changed.

    Args:
      module: hashable, so with tuples where its attributes are lists.
      variables: ``{"params": ...}`` and whatever else it reads, or its parameters alone.
      head: from the variables to the LM head ``[V,Dm]``, where ``method`` gives hidden states.
      max_positions, method, tokens, positions, attend, options, layers, example, check: as in ``from_nnx``.

    Returns:
      The decoder, equal for equal modules, and its parameters. ``Engine.update_params`` takes newer
      variables, or their ``"params"`` alone where there is nothing else.

    Raises:
      UserError: the model cannot be served, with the reason and the way out.
    """
    if not isinstance(module, linen.Module):
        raise UserError(f"module is {type(module).__name__}; give a linen.Module, or use from_nnx")
    check_positions(max_positions)
    try:
        hash(module)
    except TypeError as error:
        raise UserError(
            f"module is not hashable ({error}); give tuples where its attributes are lists or dicts"
        ) from error
    if not isinstance(variables, Mapping) or not variables:
        raise UserError("variables must be what module.init gives, {'params': ...}")
    if "cache" in variables:
        raise UserError(
            "variables hold 'cache', a cache of the model's own; build it with decode=False and leave it out"
        )
    names = tuple(sorted(variables)) if "params" in variables else ("params",)
    decoder = LinenDecoder(
        calling=Calling.of(
            type(module),
            method=method,
            tokens=tokens,
            positions=positions,
            attend=attend,
            options=options,
        ),
        max_positions=max_positions,
        head_of=head,
        module=module,
        collections=names,
    )
    params = decoder.params_of(variables)
    return completed(decoder, params, layers=layers, example=example, check=check), params


@contextlib.contextmanager
def _hooked(hook: AttentionHook) -> Iterator[None]:
    """In this thread, modules with ``attention_fn`` are called with the hook's in its place.

    They are the copies that ``apply`` binds, not the user's own, and are put back as they were.
    """

    def intercept(call: Any, args: Any, named: Any, context: Any) -> Any:
        module = context.module
        original = getattr(module, "attention_fn", None)
        if context.method_name != "__call__" or not callable(original):
            return call(*args, **named)
        if getattr(module, "decode", False):
            raise UserError(
                "model: an attention layer has decode=True, a cache of its own; build it with decode=False"
            )
        object.__setattr__(module, "attention_fn", hook.instead_of(original))
        try:
            return call(*args, **named)
        finally:
            object.__setattr__(module, "attention_fn", original)

    with linen.intercept_methods(intercept):
        yield


def _plain(tree: Any) -> Any:
    """With dicts in place of Flax's frozen ones."""
    return (
        {name: _plain(each) for name, each in tree.items()} if isinstance(tree, Mapping) else tree
    )
