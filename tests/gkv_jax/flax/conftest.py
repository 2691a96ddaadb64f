"""Engines that the tests share: each takes seconds to compile."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from gkv_jax import CacheSpec, Engine
from gkv_jax.flax import from_linen, from_nnx
from gkv_jax.models.protocol import AttentionLayer
from gkv_jax.models.rope_config import RopeConfig
from gkv_jax.rope import Rope
from pallas_kernels.masked_head import SoftCapped
from tests.gkv_jax.flax.models import (
    LONGEST,
    Grouped,
    Learned,
    Linen,
    Rotated,
    made,
    made_linen,
    made_mixed,
)
from tests.gkv_jax.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
MESH = Mesh(np.array(jax.devices()[:1]), ("all",))
ROTATED = AttentionLayer(Rope(RopeConfig(theta=100.0), head_dim=8))


class Served:
    """A user's model, its engine with a bounded cache, and how it is called without a cache."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "linen":
            self.model: Any = Linen()
            self.variables = made_linen(self.model, 8, train=False)
            self.decoder, self.params = from_linen(
                self.model, self.variables, max_positions=LONGEST, options={"train": False}
            )
        elif kind == "learned":
            self.model = made(Learned, 8, dropout=0.1)  # in training mode, which it stays in
            self.decoder, self.params = from_nnx(
                self.model,
                max_positions=LONGEST,
                method="states",
                head=head,
            )
        elif kind == "mixed":
            self.model = made_mixed()
            self.decoder, self.params = from_nnx(
                self.model, max_positions=LONGEST, layers=[ROTATED], method="states", head=capped
            )
        elif kind == "rotated":
            self.model = made(Rotated, window=7)
            self.decoder, self.params = from_nnx(
                self.model, max_positions=LONGEST, tokens="ids", positions="where"
            )
        else:
            self.model = made(Grouped)
            self.decoder, self.params = from_nnx(self.model, max_positions=LONGEST)
        # A step of several tokens is another program for each model.
        drafts = 2 if kind == "linen" else 0
        spec = CacheSpec(sinks=0, window=64, max_drafts=drafts, prefill_chunk=32)
        self.engine = Engine(
            self.decoder, self.params, TOKENIZER, cache=spec, slots=2, verify="always"
        )


def capped(model: Any) -> SoftCapped:
    return SoftCapped(model.head.kernel[...].T.astype("bfloat16"), 3.0)


def head(model: Any) -> Any:
    return model.out.kernel[...].T


@pytest.fixture(scope="package")
def served() -> Iterator[Any]:
    """``Served`` of a kind, made once."""
    made_: dict[str, Served] = {}

    def get(kind: str) -> Served:
        if kind not in made_:
            # An engine serves under the mesh under which it was made.
            with jax.set_mesh(MESH) if kind == "mixed" else contextlib.nullcontext():
                made_[kind] = Served(kind)
        return made_[kind]

    yield get
    for each in made_.values():
        each.engine.close()
