"""A user's own Flax model as a ``Decoder``: how it is called, and what is found out about it once."""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gkv_jax.errors import UserError
from gkv_jax.flax.attention import AttentionHook, InOrder
from gkv_jax.models.protocol import Attend, AttentionLayer, Params
from pallas_kernels.masked_head import GivenLogits, Head, project


@dataclasses.dataclass(frozen=True)
class Calling:
    """How the forward pass of a user's model is called.

    Attributes:
      method: name of the method.
      tokens: the argument for tokens, int32 ``[B,N]``; None for the first one.
      positions: the argument for their positions, int32 ``[B,N]``; None where there is none.
      attend: the argument for ``Attend``; None where attention is hooked.
      needs_attend: whether ``attend`` has no default.
      options: other arguments, the same in every call.
    """

    method: str
    tokens: str | None
    positions: str | None
    attend: str | None
    needs_attend: bool
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        model: type,
        *,
        method: str | Callable[..., Any],
        tokens: str | None,
        positions: str,
        attend: str,
        options: Mapping[str, Any] | None,
    ) -> "Calling":
        """Of a method of a class; ``positions`` and ``attend`` count if it has them.

        Raises:
          UserError: no such method or argument.
        """
        if not isinstance(method, str):  # Linen's way to name one: Model.encode
            method = getattr(method, "__name__", repr(method))
        function = getattr(model, method, None)
        if not callable(function):
            raise UserError(f"method is {method!r}, which {model.__name__} does not have")
        found = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in found.values())
        wanted = {"tokens": (tokens, None), "positions": (positions, "positions")}
        wanted["attend"] = attend, "attend"
        for field, (name, default) in wanted.items():
            if name not in (None, default, *found) and not takes_any:
                raise UserError(
                    f"{field} is {name!r}, but {model.__name__}.{method} has no such argument; it has "
                    f"{', '.join(list(found)[1:])}"
                )
        given = tuple(sorted((options or {}).items()))
        try:
            hash(given)
        except TypeError as error:
            raise UserError(
                f"options hold something that is not hashable ({error}); give numbers, strings, tuples"
            ) from error

        def has(name: str, default: str) -> bool:
            return name in found or (takes_any and name != default)

        takes_attend = has(attend, "attend")
        return cls(
            method=method,
            tokens=tokens,
            positions=positions if has(positions, "positions") else None,
            attend=attend if takes_attend else None,
            needs_attend=attend in found and found[attend].default is inspect.Parameter.empty,
            options=given,
        )

    def arguments(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments of a call."""
        named: dict[str, Any] = dict(self.options)
        if self.positions is not None:
            named[self.positions] = positions
        if attend is not None and self.attend is not None:
            named[self.attend] = attend
        if self.tokens is None:
            return (tokens,), named
        return (), named | {self.tokens: tokens}


@dataclasses.dataclass(frozen=True)
class FlaxDecoder(abc.ABC):
    """A ``Decoder`` made of a user's model. Hashable, and equal for models of one structure.

    Attributes:
      calling: how the model is called.
      max_positions: positions that it was made for: no text gets longer.
      head_of: from what ``bind`` gives to the LM head ``[V,Dm]``; None where the model gives logits.
      vocab_size, num_heads, num_kv_heads, head_dim, layers: as in ``Decoder``.
      dtype: of the logits or hidden states.
      cache_dtype: of the keys as the model gives them; None until they have been seen.
      uses_positions: whether the model's own code is given positions.
    """

    calling: Calling
    max_positions: int
    head_of: Callable[[Any], jax.Array] | None
    vocab_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    layers: tuple[AttentionLayer, ...] = ()
    dtype: DTypeLike = jnp.float32
    cache_dtype: DTypeLike | None = None
    uses_positions: bool = True

    @abc.abstractmethod
    def bind(self, params: Params) -> Any:
        """What ``head_of`` is given: the model with these parameters (nnx), or its variables (linen)."""

    @abc.abstractmethod
    def run(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend | None = None,
        hook: AttentionHook | None = None,
    ) -> jax.Array:
        """Call the model: with ``attend``, or with ``hook`` in its attention layers, or as it is."""

    @abc.abstractmethod
    def params_of(self, source: Any) -> Params:
        """The parameters of a model in training, as ``Engine.update_params`` takes them.

        Parameters come back as they are. The structure is for the engine to compare.
        """

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def attend_through(
        self, params: Params, tokens: jax.Array, attend: Attend
    ) -> tuple[jax.Array, InOrder, AttentionHook | None]:
        """Logits or hidden states ``[B,N,...]``; also what the model has called."""
        # Padding may stand beyond the last position, and a table may have NaN for that.
        positions = jnp.minimum(attend.positions, self.max_positions - 1)
        inner = InOrder(attend, self.cache_dtype, positions)
        if self.calling.attend is not None:
            return self.run(params, tokens, positions, attend=inner), inner, None
        hook = AttentionHook(inner)
        return self.run(params, tokens, positions, hook=hook), inner, hook

    def hidden(self, params: Params, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Tokens ``[B,N]`` int32 to hidden states ``[B,N,Dm]``, or to the model's own logits ``[B,N,V]``."""
        out, inner, _ = self.attend_through(params, tokens, attend)
        if inner.count != self.num_layers:
            raise UserError(
                f"model has called attention {inner.count} times, and {self.num_layers} times when it was "
                "looked at; it must not depend on the number of tokens"
            )
        return out

    def head(self, params: Params) -> Head:
        """The LM head ``[V,Dm]``, or one that takes the model's logits as they are."""
        if self.head_of is None:
            return GivenLogits(self.vocab_size)
        return self.head_of(self.bind(params))

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states ``[..., Dm]`` to float32 logits ``[..., V]``."""
        head = self.head(params)
        return project(hidden.astype(head.dtype), head)


AnyDecoder = TypeVar("AnyDecoder", bound=FlaxDecoder)


def check_positions(max_positions: int) -> None:
    """Raise UserError unless it is a number of positions."""
    if not isinstance(max_positions, int) or isinstance(max_positions, bool) or max_positions < 2:
        raise UserError(
            f"max_positions is {max_positions!r}; give the positions that the model was made for: rows of "
            "its position table, or the length that its rotations were trained for"
        )
