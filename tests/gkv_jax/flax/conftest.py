"""Engines that the tests share: each takes seconds to compile."""

from collections.abc import Iterator
from typing import Any

import pytest

from gkv_jax import CacheSpec, Engine
from gkv_jax.flax import from_linen, from_nnx
from tests.gkv_jax.flax.models import (
    LONGEST,
    Grouped,
    Learned,
    Linen,
    Rotated,
    made,
    made_linen,
)
from tests.gkv_jax.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


class Served:
    """A user's model, its engine with a bounded cache, and how it is called without a cache."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "linen":
            self.model: Any = Linen()
            self.variables = made_linen(self.model, train=False)
            self.decoder, self.params = from_linen(
                self.model, self.variables, max_positions=LONGEST, options={"train": False}
            )
        elif kind == "learned":
            self.model = made(Learned, dropout=0.1)  # in training mode, which it stays in
            self.decoder, self.params = from_nnx(
                self.model,
                max_positions=LONGEST,
                method="states",
                head=head,
            )
        elif kind == "rotated":
            self.model = made(Rotated, window=7)
            self.decoder, self.params = from_nnx(
                self.model, max_positions=LONGEST, tokens="ids", positions="where"
            )
        else:
            self.model = made(Grouped)
            self.decoder, self.params = from_nnx(self.model, max_positions=LONGEST)
        spec = CacheSpec(sinks=0, window=64, max_drafts=2, prefill_chunk=32)
        self.engine = Engine(
            self.decoder, self.params, TOKENIZER, cache=spec, slots=2, verify="always"
        )


def head(model: Any) -> Any:
    return model.out.kernel[...].T


@pytest.fixture(scope="package")
def served() -> Iterator[Any]:
    """``Served`` of a kind, made once."""
    made_: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind not in made_:
            made_[kind] = Served(kind)
        return made_[kind]

    yield get
    for each in made_.values():
        each.engine.close()
