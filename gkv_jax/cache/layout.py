"""Which cache each layer of a model gets: layers may differ, and like ones share their bookkeeping."""

import dataclasses
import functools

from gkv_jax.cache.spec import CacheSpec
from gkv_jax.errors import UserError
from gkv_jax.models.protocol import AttentionLayer, Decoder

_QUEST_DENSE_LAYERS = 2  # the paper's: attention is too even there to be worth a selection


@dataclasses.dataclass(frozen=True)
class Layout:
    """The distinct specs of a model's layers.

    Attributes:
      specs: each as a cache for some of the layers.
      group: for each layer, the index of its spec.
    """

    specs: tuple[CacheSpec, ...]
    group: tuple[int, ...]

    @classmethod
    def of(cls, spec: CacheSpec, model: Decoder) -> "Layout":
        """The layout of ``spec`` for ``model``."""
        return _layout(spec, model.layers)

    def spec(self, layer: int) -> CacheSpec:
        """The spec of a layer."""
        return self.specs[self.group[layer]]


@functools.lru_cache(maxsize=64)
def _layout(spec: CacheSpec, layers: tuple[AttentionLayer, ...]) -> Layout:
    own = [_layer_spec(spec, index, layer) for index, layer in enumerate(layers)]
    specs = tuple(dict.fromkeys(own))
    return Layout(specs, tuple(specs.index(each) for each in own))


def _layer_spec(spec: CacheSpec, index: int, layer: AttentionLayer) -> CacheSpec:
    if layer.rope is None and spec.by_rank:
        # Keys that came rotated cannot be moved to their rank.
        spec = dataclasses.replace(spec, positions="text")
    if _keeps_its_window(spec, layer):
        # The model's own sliding window: bounded as it is, and exact. Token sinks and kept tokens
        # would be keys at distances that this layer never saw in training.
        return CacheSpec(
            sinks=0,
            window=min(layer.window or spec.total, spec.total),
            max_drafts=spec.max_drafts,
            positions="text",
            dtype=spec.dtype,
            prefill_chunk=spec.prefill_chunk,
        )
    if spec.policy == "quest" and index < _QUEST_DENSE_LAYERS:
        return dataclasses.replace(
            spec, policy="full", budget=0, page=CacheSpec.page, memory="device"
        )
    return spec


def _keeps_its_window(spec: CacheSpec, layer: AttentionLayer) -> bool:
    if layer.window is None:
        return False
    # At ranks, no distance exceeds what the cache holds; at true positions those of sinks and kept
    # tokens grow with the text.
    follows = spec.by_rank or spec.max_tokens is not None or spec.prefix == 0
    return layer.window < spec.total or not follows


def longest_text(spec: CacheSpec, model: Decoder) -> float:
    """Tokens that a text may have with a model.

    Where its own code uses positions (it rotates keys itself, or says ``uses_positions``), those that it was
    made for are the last: nobody could move the tokens that stay to lower ones.
    """
    longest = spec.longest_text(model.max_positions)
    is_own = any(layer.rope is None for layer in model.layers)
    is_own |= getattr(model, "uses_positions", False)
    return min(longest, model.max_positions) if is_own else longest


def check_layers(spec: CacheSpec, model: Decoder) -> None:
    """Raise UserError where no layer of ``model`` could use what ``spec`` asks for."""
    if any(layer.rope is None for layer in model.layers):
        _check_unrotated(spec)
    if spec.max_tokens is not None or any(layer.window is None for layer in model.layers):
        return
    longest = max(layer.window or 0 for layer in model.layers)
    if spec.window > longest:
        raise UserError(
            f"cache.window is {spec.window}, but no layer of the model sees more than {longest} "
            f"positions; set window to at most {longest}"
        )
    if spec.prefix and all(_keeps_its_window(spec, layer) for layer in model.layers):
        raise UserError(
            f"cache.sinks and cache.kept are {spec.sinks} and {spec.kept}, but every layer of the model "
            f"sees a window of its own, {longest} positions at most; set both to 0, or positions "
            f"'cache' and sinks + kept + window to at most {longest}"
        )


def _check_unrotated(spec: CacheSpec) -> None:
    """Of a model that rotates keys itself, or not at all."""
    if spec.by_rank and spec.positions == "cache":
        raise UserError(
            "cache.positions is 'cache', but the model's keys come with their positions in them and cannot "
            "be moved to others; use positions 'text'"
        )
    policy = spec.selector
    if policy is not None and policy.needs == "query_statistics":
        raise UserError(
            f"cache.policy {policy.name!r} needs queries before rotation, but the model's come with their "
            "positions in them; use 'snapkv', 'h2o', 'tova' or 'keydiff'"
        )
