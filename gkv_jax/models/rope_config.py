"""Rotary position embedding as a configuration states it: base, width and frequency scaling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gkv_jax.errors import UserError


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 and later.

    Frequencies with a wavelength above ``original_max_position_embeddings / low_freq_factor`` are
    divided by ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` are
    kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearScaling:
    """RoPE position interpolation: every frequency is divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by parts, and a temperature for attention.

    Over ``original_max_position_embeddings``, channel pairs that turn ``beta_fast`` times or more
    keep their frequency, those that turn ``beta_slow`` times or less have it divided by ``factor``,
    with a linear ramp between the two pairs (at whole indices if ``truncate``).
    ``attention_factor`` stands before the cosines and sines of queries and of keys alike, so its
    square scales their product; ``yarn_attention_factor`` gives the paper's value.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """``0.1 ln(factor) + 1``, the paper's; with both ``mscale`` and ``mscale_all_dim``, DeepSeek's."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a head, half-split ("rotate half") layout.

    ``theta`` is the base: pair i of d rotary channels turns by ``theta ** (-2i / d)`` radians per
    position, before ``scaling``. ``partial_rotary_factor`` is the share of the head's channels, from
    the first on, that turn; the others pass through.
    """

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None = None
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.partial_rotary_factor <= 1.0:
            raise UserError(
                f"partial_rotary_factor must be above 0 and at most 1, "
                f"not {self.partial_rotary_factor}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Channels that turn, of a head of ``head_dim``."""
        return int(head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], max_position_embeddings: int) -> "RopeConfig":
        """Read a ``config.json`` of transformers 4 or 5.

        ``max_position_embeddings`` is what YaRN falls back on, as in transformers.
        Raises UserError, naming the field, for a scaling or an option that is not served.
        """
        # transformers 5 keeps everything in rope_parameters; 4 has base and scaling apart.
        field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        options = dict(config.get(field) or {})
        theta = _first(options.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
        partial = _first(
            options.pop("partial_rotary_factor", None), config.get("partial_rotary_factor"), 1.0
        )
        scaling = _scaling_from_hf(
            options, field, config.get("original_max_position_embeddings"), max_position_embeddings
        )
        return cls(float(theta), scaling, float(partial))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], context_length: int, llama3_scaling: Llama3Scaling | None
    ) -> "RopeConfig":
        """Read GGUF metadata, its keys without the architecture; YaRN as llama.cpp computes it.

        ``llama3_scaling`` is what the tensor ``rope_freqs.weight`` says, if the file has one.
        Raises UserError, naming the key, for a scaling that is not served.
        """
        theta = float(metadata.get("rope.freq_base", 10000.0))
        kind = metadata.get("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise UserError(
                f"GGUF: llama.rope.scaling.type {kind!r} is not served; known: none, linear, yarn"
            )
        if kind == "none":
            return cls(theta, llama3_scaling)
        if llama3_scaling is not None:
            raise UserError(f"GGUF: llama.rope.scaling.type {kind} together with rope_freqs.weight")
        if "rope.scaling.factor" not in metadata:
            raise UserError(
                f"GGUF: llama.rope.scaling.type {kind} without llama.rope.scaling.factor; "
                "the file is incomplete"
            )
        factor = float(metadata["rope.scaling.factor"])
        if kind == "linear":
            return cls(theta, LinearScaling(factor))
        # llama.cpp's attention factor is a multiple of the paper's, not in its place.
        multiple = float(metadata.get("rope.scaling.attn_factor", 1.0))
        return cls(
            theta,
            YarnScaling(
                factor,
                int(metadata.get("rope.scaling.original_context_length", context_length)),
                multiple * yarn_attention_factor(factor),
                float(metadata.get("rope.scaling.yarn_beta_fast", 32.0)),
                float(metadata.get("rope.scaling.yarn_beta_slow", 1.0)),
            ),
        )


# Options that a scaling must have, and those that it may have.
_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",  # of the first YaRN models: whether they were trained with it
        ),
    ),
}


def _scaling_from_hf(
    options: dict[str, Any], field: str, original: int | None, max_position_embeddings: int
) -> Llama3Scaling | LinearScaling | YarnScaling | None:
    kind = options.pop("rope_type", None)
    kind = options.pop("type", None) or kind or "default"  # the older spelling beside the newer
    if kind not in _OPTIONS:
        raise UserError(
            f"config.json: {field} of type {kind!r} is not served; known: {', '.join(_OPTIONS)}"
        )
    required, optional = _OPTIONS[kind]
    if original is not None and kind in ("llama3", "yarn"):  # outside of the options, it goes first
        options["original_max_position_embeddings"] = original
    missing = [name for name in required if name not in options]
    if missing:
        raise UserError(f"config.json: {field} of type {kind!r} lacks {', '.join(missing)}")
    unknown = sorted(
        name
        for name, value in options.items()
        if name not in required + optional and value is not None
    )
    if unknown:
        raise UserError(
            f"config.json: {field} of type {kind!r} has options that are not served: "
            f"{', '.join(unknown)}"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(options["factor"]))
    if kind == "yarn":
        return _yarn_from_hf(options, max_position_embeddings)
    return Llama3Scaling(
        float(options["factor"]),
        float(options["low_freq_factor"]),
        float(options["high_freq_factor"]),
        int(options["original_max_position_embeddings"]),
    )


def _yarn_from_hf(options: Mapping[str, Any], max_position_embeddings: int) -> YarnScaling:
    original = int(_first(options.get("original_max_position_embeddings"), max_position_embeddings))
    factor = float(_first(options["factor"], max_position_embeddings / original))
    attention_factor = options.get("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(
            factor, options.get("mscale"), options.get("mscale_all_dim")
        )
    return YarnScaling(
        factor,
        original,
        float(attention_factor),
        float(options.get("beta_fast") or 32.0),
        float(options.get("beta_slow") or 1.0),
        bool(options.get("truncate", True)),
    )


def _first(*values: Any) -> Any:
    """The first value that is not None; the last is the default."""
    return next(value for value in values if value is not None)
