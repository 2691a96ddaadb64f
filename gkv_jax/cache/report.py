"""What a row of the cache holds of its text, read from the arrays.

Nothing here follows from the spec alone: bytes are those of the buffers, positions those that the masks
compare. So a cache that held more than it says, or lost what it should keep, would show.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from gkv_jax.cache.layout import Layout
from gkv_jax.cache.segments import Cache, Slots
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import Decoder

Positions = NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class HeadReport:
    """What one KV head of one layer holds: true positions, int32, ascending.

    Attributes:
      sinks: of the first tokens, which stay. The same in all heads of a layer.
      kept: of the tokens that a score policy selected.
      ring: of the most recent tokens, and of those that wait for the next choice. The same in all
        heads of a layer.
    """

    sinks: Positions
    kept: Positions
    ring: Positions

    @property
    def live(self) -> int:
        """Tokens that the next query can see, itself not counted."""
        return len(self.sinks) + len(self.kept) + len(self.ring)

    @property
    def held(self) -> Positions:
        """Their positions, ascending; a position that lay in two places would be there once."""
        return np.unique(np.concatenate([self.sinks, self.kept, self.ring]))


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What one layer holds.

    Attributes:
      policy: the layer's own: ``window`` in a layer with a sliding window of the model's, ``full`` in
        the layers that Quest reads whole.
      text_length: tokens read.
      slots: physical slots per KV head, which is at least what the layer can hold.
      nbytes: bytes of one row, without the bookkeeping that layers share.
      heads: one report per KV head.
    """

    policy: str
    text_length: int
    slots: int
    nbytes: int
    heads: tuple[HeadReport, ...]

    @property
    def live(self) -> tuple[int, ...]:
        """Tokens that the next query can see, per KV head."""
        return tuple(head.live for head in self.heads)

    @property
    def kept(self) -> tuple[int, ...]:
        """How many of them a score policy selected, per KV head."""
        return tuple(len(head.kept) for head in self.heads)

    @property
    def evicted(self) -> tuple[int, ...]:
        """Tokens of the text that no query will see again, per KV head."""
        return tuple(self.text_length - len(head.held) for head in self.heads)

    def summary(self) -> dict[str, Any]:
        """Sizes and counts, ready for JSON; lists are by KV head."""
        return {
            "policy": self.policy,
            "slots": self.slots,
            "bytes": self.nbytes,
            "live": list(self.live),
            "kept": list(self.kept),
            "evicted": list(self.evicted),
        }

    def as_dict(self) -> dict[str, Any]:
        """The summary and ``heads``: for each, ``sinks``, ``kept`` and ``ring`` as ``[first, last]``."""
        heads = [
            {"sinks": _runs(head.sinks), "kept": _runs(head.kept), "ring": _runs(head.ring)}
            for head in self.heads
        ]
        return self.summary() | {"heads": heads}


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """What the cache holds of one request's text.

    Attributes:
      policy: name of the spec's policy; ``LayerReport.policy`` is that of a layer.
      text_length: tokens read.
      nbytes: bytes of one row of the cache, bookkeeping included. It does not depend on the text.
      layers: one report per layer.
    """

    policy: str
    text_length: int
    nbytes: int
    layers: tuple[LayerReport, ...]

    def summary(self) -> dict[str, Any]:
        """All but the positions, ready for JSON: short enough for every reply of a server."""
        return self._head() | {"layers": [layer.summary() for layer in self.layers]}

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; positions as runs, ``[first, last]`` each."""
        return self._head() | {"layers": [layer.as_dict() for layer in self.layers]}

    def _head(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "text_length": self.text_length,
            "bytes": self.nbytes,
        }


def report(
    cache: Cache, row: int, next_pos: int, *, spec: CacheSpec, model: Decoder
) -> CacheReport:
    """What ``row`` holds after ``next_pos`` tokens of its text.

    The bookkeeping is fetched in one read, keys and values stay where they are. The first call for a
    shape of cache compiles a gather.

    Args:
      cache: the batch's; not donated.
      row: of the batch.
      next_pos: tokens read, which is the true position of the next one.
      spec, model: those the cache was made for.

    Raises:
      UserError: ``row`` or ``next_pos`` is out of range.
    """
    batch = cache.slots[0].slot_pos.shape[0]
    if not 0 <= row < batch:
        raise UserError(f"row is {row}; the cache has rows 0 to {batch - 1}")
    if next_pos < 0:
        raise UserError(f"next_pos is {next_pos}; it is the number of tokens read, 0 or more")
    layout = Layout.of(spec, model)
    kept_pos = tuple(layer.kept_pos for layer in cache.layers)
    slots, kept = jax.device_get(_row(cache.slots, kept_pos, np.int32(row)))
    layers = []
    for index, layer in enumerate(cache.layers):
        group = layout.group[index]
        layers.append(
            LayerReport(
                policy=layout.specs[group].policy_name,
                text_length=next_pos,
                slots=layer.k.data.shape[2],
                nbytes=_nbytes(layer) // batch,
                heads=_heads(
                    layout.specs[group],
                    slots[group].slot_pos,
                    kept[index],
                    layer.k.data.shape[1],
                    next_pos,
                ),
            )
        )
    return CacheReport(spec.policy_name, next_pos, cache.nbytes // batch, tuple(layers))


@jax.jit
def _row(slots: Any, kept_pos: Any, row: jax.Array) -> tuple[tuple[Slots, ...], Any]:
    picked: tuple[tuple[Slots, ...], Any] = jax.tree.map(lambda leaf: leaf[row], (slots, kept_pos))
    return picked


def _heads(
    spec: CacheSpec,
    slot_pos: Positions,
    kept_pos: Positions | None,
    heads: int,
    next_pos: int,
) -> tuple[HeadReport, ...]:
    """Of one layer: ``slot_pos [C]``, ``kept_pos [Hk,kept]`` or None where it keeps none."""
    # The next query's mask. A cache that evicts nothing may be full, without a next query.
    at = next_pos if spec.max_tokens is None else min(next_pos, spec.max_tokens - 1)
    seen = (slot_pos >= 0) & (slot_pos < next_pos)  # what lies beyond are rejected drafts
    seen[spec.prefix :] &= slot_pos[spec.prefix :] > at - spec.reach
    sinks = np.sort(slot_pos[: spec.sinks][seen[: spec.sinks]])
    ring = np.sort(slot_pos[spec.prefix :][seen[spec.prefix :]])
    if kept_pos is None:
        kept_pos = np.zeros((heads, 0), np.int32)
    is_kept = seen[spec.sinks : spec.prefix]
    return tuple(HeadReport(sinks, np.sort(own[is_kept]), ring) for own in kept_pos)


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _runs(positions: Positions) -> list[list[int]]:
    """Ascending positions as ``[first, last]`` of each run of consecutive ones."""
    if not len(positions):
        return []
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [[int(part[0]), int(part[-1])] for part in parts]
