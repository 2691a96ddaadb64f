"""Prefill of a whole prompt of one row: attend in full, then keep what a policy selects.

Sinks and the window are pinned by mask, not by score; the policy's highest scores per KV head stay, in
order of position. The prompt itself attends in full, a block of queries at a time, and a layer's full
keys and values die with the layer.
"""

import dataclasses

import jax
import jax.numpy as jnp

from gkv_jax.cache.layout import Layout
from gkv_jax.cache.policies.base import Evidence, Policy, QueryStatistics
from gkv_jax.cache.rotation import Rotations
from gkv_jax.cache.segments import EMPTY, Cache, LayerCache, Slots
from gkv_jax.cache.spec import CacheSpec
from gkv_jax.cache.storage import Stored, channel_scale, fill_row, scale_queries
from gkv_jax.models.protocol import AttentionLayer, Decoder
from gkv_jax.rope import rotate
from pallas_kernels.decode_attention.xla import attend

_QUERY_BLOCK = 256  # queries per attention block: memory is one block by L, not L by L


class PromptAttend:
    """``Attend`` for a whole prompt of one row (a batch of one). Use once, then take ``cache``.

    The prompt must be longer than ``sinks + window - 1``; a shorter one loses nothing and belongs
    to ``ChunkAttend``.
    """

    def __init__(
        self,
        spec: CacheSpec,
        model: Decoder,
        cache: Cache,
        row: jax.Array,
        length: jax.Array,
        padded: int,
    ) -> None:
        """``row`` and ``length`` are int32 scalars; the ``padded - length`` last tokens are padding."""
        self._layout, self._model = Layout.of(spec, model), model
        self._cache, self._row, self._length = cache, row, length
        self.positions = jnp.arange(padded)[None]
        self._rotations = Rotations(self.positions, [None] * len(self._layout.specs))
        self._slots = [_slots_after(each, length) for each in self._layout.specs]
        self._layers: list[LayerCache] = []

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        spec, kind = self._layout.spec(layer), self._model.layers[layer]
        rotation = self._rotations.of(self._layout.group[layer], kind.rope)
        (rotated_q,) = rotation.queries(q)
        prompt = PromptLayer(
            kind=kind,
            length=self._length,
            q=q,
            rotated_q=rotated_q,
            k=k,
            rotated_k=rotation.keys(k),
            v=v,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        needs = {policy.needs for policy in (spec.selector, spec.evictor) if policy}
        out, mass = prompt.attention(with_mass="attention_mass" in needs)
        chosen = None
        if spec.selector is not None:
            evidence = prompt.evidence(spec.selector, spec, mass)
            chosen = select(spec, spec.selector.score(evidence, spec)[0], self._length)
        before = self._cache.layers[layer]
        slots = self._slots[self._layout.group[layer]]
        self._layers.append(self._compact(before, spec, slots, prompt, chosen, mass))
        return out

    @property
    def cache(self) -> Cache:
        """The cache after the prompt."""
        slots = tuple(
            old.with_row(self._row, new)
            for old, new in zip(self._cache.slots, self._slots, strict=True)
        )
        return Cache(layers=tuple(self._layers), slots=slots)

    def _compact(
        self,
        before: LayerCache,
        spec: CacheSpec,
        slots: Slots,
        prompt: "PromptLayer",
        chosen: jax.Array | None,
        mass: jax.Array | None,
    ) -> LayerCache:
        """Write sinks, chosen tokens ``[Hk,kept]`` and the ring to the row."""
        row, heads = self._row, jnp.arange(prompt.k.shape[2])[:, None]
        ring = jnp.maximum(slots.slot_pos[0, spec.prefix :], 0)
        source = jnp.zeros((len(heads), 0), jnp.int32) if chosen is None else jnp.maximum(chosen, 0)
        rotated = prompt.rotated_k[0]
        kept_k = rotated[source, heads]
        if spec.by_rank:
            assert prompt.kind.rope is not None  # see `Layout`
            ranks = jnp.broadcast_to(spec.sinks + jnp.arange(spec.kept)[None, :], source.shape)
            kept_k = rotate(prompt.k[0][source, heads], prompt.kind.rope.angles(ranks))

        def segments(tokens: jax.Array, kept: jax.Array) -> jax.Array:
            """``tokens [L,Hk,...]`` and ``kept [Hk,kept,...]`` to ``[Hk,C,...]``."""
            ends = (tokens[: spec.sinks].swapaxes(0, 1), tokens[ring].swapaxes(0, 1))
            return jnp.concatenate([ends[0], kept, ends[1]], axis=1)

        keys = segments(rotated, kept_k)
        channel = before.channel
        if channel is not None:
            rotary_dim = prompt.kind.rotary_dim(prompt.k.shape[3])
            own = channel_scale(rotated, prompt.real, rotary_dim)
            keys = keys / own[:, None]
            channel = channel.at[row].set(own)
        kept_pos, total, observed = before.kept_pos, before.mass, before.observed
        if kept_pos is not None and chosen is not None:
            kept_pos = kept_pos.at[row].set(chosen)
        if total is not None and mass is not None:
            by_token = mass.swapaxes(0, 1)  # [L,Hk]
            total = total.at[row].set(segments(by_token, by_token[source, heads]))
        if observed is not None:
            at = _latest(self._length - 1, jnp.arange(observed.shape[1]), observed.shape[1])
            latest = prompt.rotated_q[:, jnp.maximum(at, 0)]
            if channel is not None:
                latest = scale_queries(latest, channel[row][None]).astype(latest.dtype)
            observed = observed.at[row].set(latest[0])
        return dataclasses.replace(
            before,
            k=self._fill(before.k, keys),
            v=self._fill(before.v, segments(prompt.v[0], prompt.v[0][source, heads])),
            channel=channel,
            kept_pos=kept_pos,
            mass=total,
            observed=observed,
        )

    def _fill(self, stored: Stored, values: jax.Array) -> Stored:
        return fill_row(stored, self._row, values)


@dataclasses.dataclass(frozen=True)
class PromptLayer:
    """One layer's view of a prompt, a batch of one.

    Attributes:
      kind: the layer.
      length: real tokens of the L, int32 scalar.
      q, rotated_q: ``[1,L,Hq,D]``. k, rotated_k, v: ``[1,L,Hk,D]``.
      scale, soft_cap, sinks: as in ``Attend``.
    """

    kind: AttentionLayer
    length: jax.Array
    q: jax.Array
    rotated_q: jax.Array
    k: jax.Array
    rotated_k: jax.Array
    v: jax.Array
    scale: float
    soft_cap: float | None
    sinks: jax.Array | None

    @property
    def positions(self) -> jax.Array:
        return jnp.arange(self.k.shape[1])

    @property
    def real(self) -> jax.Array:
        return self.positions < self.length

    def rows(self, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Output ``[1,n,Hq,D]`` and probabilities ``[1,n,Hk,L]`` (mean of the group) at ``at [n]``."""
        seen = self.positions[None, :] <= at[:, None]
        if self.kind.window is not None:
            seen &= self.positions[None, :] > at[:, None] - self.kind.window
        attended = attend(
            (self.rotated_q[:, jnp.maximum(at, 0)],),
            self.rotated_k.swapaxes(1, 2),
            self.v.swapaxes(1, 2),
            seen[None, None],
            jnp.zeros(self.k.shape[1], bool),
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            return_slot_sums=True,
        )
        assert attended.slot_sums is not None
        groups = self.q.shape[2] // self.k.shape[2]
        return attended.out, attended.slot_sums / groups

    def attention(self, *, with_mass: bool) -> tuple[jax.Array, jax.Array | None]:
        """Output ``[1,L,Hq,D]``, and the sum of all probabilities ``[Hk,L]`` if it is wanted."""
        padded, heads = self.k.shape[1:3]
        block = min(_QUERY_BLOCK, padded)

        def one(mass: jax.Array | None, start: jax.Array) -> tuple[jax.Array | None, jax.Array]:
            at = start + jnp.arange(block)
            out, rows = self.rows(at)
            if mass is not None:
                mass += jnp.where((at < self.length)[:, None, None], rows[0], 0.0).sum(axis=0)
            return mass, out[0]

        start = jnp.zeros((heads, padded), jnp.float32) if with_mass else None
        mass, blocks = jax.lax.scan(one, start, jnp.arange(0, padded, block))
        return blocks.reshape(self.q.shape), mass

    def evidence(self, policy: Policy, spec: CacheSpec, mass: jax.Array | None) -> Evidence:
        """What ``policy`` may see."""
        batch, padded, heads, _ = self.k.shape
        positions = jnp.where(self.real, self.positions, EMPTY)
        attention = queries = None
        if policy.needs == "attention_mass":
            assert mass is not None
            attention = mass[None]
        if policy.needs == "window_attention":
            voters = self.length - spec.observers(policy) + jnp.arange(spec.observers(policy))
            _, rows = self.rows(voters)
            # A voter before the text sees nothing, and its row is zero.
            count = jnp.minimum(self.length, len(voters)).astype(jnp.float32)
            attention = rows.sum(axis=1) / count
        if policy.needs == "query_statistics":
            queries = self._statistics(spec)
        return Evidence(
            k=self.rotated_k.swapaxes(1, 2),
            v=self.v.swapaxes(1, 2),
            positions=jnp.broadcast_to(positions[None, None, :], (batch, heads, padded)),
            next_pos=self.length[None],
            in_order=True,
            rope=self.kind.rope,
            attention=attention,
            queries=queries,
        )

    def _statistics(self, spec: CacheSpec) -> QueryStatistics:
        """Of the queries beyond the sinks, whose own are unlike all others."""
        counted = self.real & (self.positions >= spec.sinks)
        weight = counted.astype(jnp.float32) / jnp.maximum(counted.sum(), 1).astype(jnp.float32)
        # As if every model scaled by D ** -0.5.
        q = self.q.astype(jnp.float32) * (self.scale * self.q.shape[3] ** 0.5)
        mean = jnp.einsum("l,blhd->bhd", weight, q)
        centred = q - mean[:, None]
        covariance = jnp.einsum("l,blhd,blhe->bhde", weight, centred, centred)
        return QueryStatistics(mean, covariance)


def select(spec: CacheSpec, scores: jax.Array, length: jax.Array) -> jax.Array:
    """Positions of the prompt tokens to keep, int32 ``[Hk,kept]``, ascending, unused ones last.

    Args:
      spec: the layer's.
      scores: float32 ``[Hk,L]``, by position.
      length: real tokens of the L, int32 scalar.

    Returns:
      Per KV head the chosen positions in ``[sinks, length - window]``, then ``EMPTY``.
    """
    padded = scores.shape[1]
    positions = jnp.arange(padded)
    candidate = (positions >= spec.sinks) & (positions <= length - spec.window)
    scores = jnp.where(candidate[None], finite(scores), -jnp.inf)
    best, index = jax.lax.top_k(scores, min(spec.kept, padded))
    index = jnp.sort(jnp.where(best > -jnp.inf, index, padded), axis=-1)
    index = jnp.pad(index, ((0, 0), (0, spec.kept - index.shape[1])), constant_values=padded)
    return jnp.where(index < padded, index, EMPTY)


def finite(scores: jax.Array) -> jax.Array:
    """Scores that can be compared: a policy's NaN and infinities as the extremes of float32."""
    extremes = jnp.finfo(jnp.float32)
    return jnp.nan_to_num(scores, nan=extremes.min, posinf=extremes.max, neginf=extremes.min)


def _slots_after(spec: CacheSpec, length: jax.Array) -> Slots:
    """What the cache holds after a prompt, a batch of one."""
    # The next query, at `length`, sees the window - 1 tokens before it in the ring.
    ring_start = jnp.maximum(length - spec.window + 1, spec.sinks)
    kept_count = jnp.minimum(ring_start - spec.sinks, spec.kept)
    slots = jnp.arange(spec.prefix)
    held = jnp.where(slots < spec.sinks + kept_count, slots, EMPTY)
    at = _latest(length - 1, spec.sinks + jnp.arange(spec.ring), spec.ring)
    ring = jnp.where(at >= ring_start, at, EMPTY)
    return Slots(
        slot_pos=jnp.concatenate([held, ring])[None],
        prefix_len=(spec.sinks + kept_count)[None],
        ring_start=ring_start[None],
    )


def _latest(last: jax.Array, congruent_to: jax.Array, modulus: int) -> jax.Array:
    """The highest number up to ``last`` that is congruent to each of ``congruent_to``."""
    return last - jnp.mod(last - congruent_to, modulus)
