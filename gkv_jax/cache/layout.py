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
    if layer.window is not None and layer.window < spec.total:
        # The model's own sliding window: bounded as it is, and exact. Token sinks and kept tokens
        # would be keys that this layer never saw in training.
        return CacheSpec(
            sinks=0,
            window=layer.window,
            max_drafts=spec.max_drafts,
            positions="text",
            dtype=spec.dtype,
            prefill_chunk=spec.prefill_chunk,
        )
    if spec.policy == "quest" and index < _QUEST_DENSE_LAYERS:
        return dataclasses.replace(spec, policy="full", budget=0, memory="device")
    return spec


def check_layers(spec: CacheSpec, model: Decoder) -> None:
    """Raise UserError where no layer of ``model`` could use the window of ``spec``."""
    windows = [layer.window for layer in model.layers]
    longest = max((window or spec.window) for window in windows)
    if spec.max_tokens is None and spec.window > longest:
        raise UserError(
            f"cache.window is {spec.window}, but no layer of the model sees more than {longest} "
            f"positions; set window to at most {longest}"
        )
