"""Rotary position embedding as a configuration states it: base, width and frequency scaling."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gkv_jax.errors import UserError
from gkv_jax.models.fields import REQUIRED, Fields


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
    def from_hf(cls, config: Fields, max_position_embeddings: int) -> "RopeConfig":
        """Read a ``config.json`` of transformers 4 or 5.

        ``max_position_embeddings`` is what YaRN falls back on, as in transformers.
        Raises UserError, naming the field, for a scaling or an option that is not served.
        """
        # transformers 5 keeps everything in rope_parameters; 4 has base and scaling apart.
        new, old = config.get("rope_parameters"), config.get("rope_scaling")
        field = f"{config.where}{'rope_parameters' if new else 'rope_scaling'}"
        return cls.from_options(
            new or old or {},
            field,
            max_position_embeddings,
            theta=config.number("rope_theta", 10000.0),
            partial_rotary_factor=config.number("partial_rotary_factor", 1.0),
            original=config.get("original_max_position_embeddings"),
        )

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        field: str,
        max_position_embeddings: int,
        *,
        theta: float = 10000.0,
        partial_rotary_factor: float = 1.0,
        original: int | None = None,
    ) -> "RopeConfig":
        """Read ``rope_parameters`` or ``rope_scaling``, which ``field`` names in errors.

        The keyword arguments are what stands beside them: base and share go after what ``options``
        say, ``original`` (positions before scaling) before.
        """
        rest = dict(options)
        theta = _first(rest.pop("rope_theta", None), theta)
        partial = _first(rest.pop("partial_rotary_factor", None), partial_rotary_factor)
        scaling = _scaling_from_hf(rest, field, original, max_position_embeddings)
        return cls(float(theta), scaling, float(partial))

    @classmethod
    def from_gguf(
        cls, metadata: Fields, context_length: int, rope_factors: np.ndarray | None
    ) -> "RopeConfig":
        """Read GGUF metadata; YaRN as llama.cpp computes it.

        ``rope_factors`` is the tensor ``rope_freqs.weight``, if the file has one.
        Raises UserError, naming the key, for a scaling that is not served.
        """
        theta = metadata.number("rope.freq_base", 10000.0)
        metadata.inert("rope.scaling.finetuned")  # whether the model was trained with it
        metadata.serve_only("rope.scaling.type", None, "none", "linear", "yarn")
        kind = metadata.get("rope.scaling.type", "none")
        if kind == "none":
            return cls(theta, None if rope_factors is None else llama3_scaling(rope_factors, theta))
        if rope_factors is not None:
            raise UserError(
                f"{metadata.where}rope.scaling.type {kind} together with rope_freqs.weight is not "
                "served; load the model from its Hugging Face folder"
            )
        factor = metadata.number("rope.scaling.factor", REQUIRED)
        if kind == "linear":
            return cls(theta, LinearScaling(factor))
        # llama.cpp's attention factor is a multiple of the paper's, not in its place.
        multiple = metadata.number("rope.scaling.attn_factor", 1.0)
        return cls(
            theta,
            YarnScaling(
                factor,
                metadata.integer("rope.scaling.original_context_length", context_length),
                multiple * yarn_attention_factor(factor),
                metadata.number("rope.scaling.yarn_beta_fast", 32.0),
                metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            ),
        )


def llama3_scaling(factors: np.ndarray, theta: float) -> Llama3Scaling:
    """The scaling whose divisors per frequency are ``factors``, float32 ``[D/2]``.

    GGUF keeps only the divisors. Every published Llama 3 model has low_freq_factor 1,
    high_freq_factor 4 and 8192 original positions, so only the factor is unknown, and the divisors
    tell whether that holds. Raises UserError when it does not.
    """
    scaling = Llama3Scaling(float(factors.max()), 1.0, 4.0, 8192)
    pairs = factors.shape[0]
    wavelengths = 2 * math.pi * theta ** (np.arange(pairs, dtype=np.float64) / pairs)
    turns = scaling.original_max_position_embeddings / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0.0):
        raise UserError(
            "GGUF: rope_freqs.weight is not the scaling of Llama 3; "
            "load the model from its Hugging Face folder"
        )
    return scaling


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
        raise UserError(f"{field} of type {kind!r} is not served; known: {', '.join(_OPTIONS)}")
    required, optional = _OPTIONS[kind]
    if original is not None and kind in ("llama3", "yarn"):  # outside of the options, it goes first
        options["original_max_position_embeddings"] = original
    missing = [name for name in required if name not in options]
    if missing:
        raise UserError(f"{field} of type {kind!r} lacks {', '.join(missing)}")
    unknown = sorted(
        name
        for name, value in options.items()
        if name not in required + optional and value is not None
    )
    if unknown:
        raise UserError(
            f"{field} of type {kind!r} has options that are not served: {', '.join(unknown)}"
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
