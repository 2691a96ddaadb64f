"""One set of tests for every implementation of `decode_attention`, against loops over the slots."""

import functools
import importlib
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_attention import LOWEST, Attended, decode_attention
from pallas_kernels.dispatch import IMPLEMENTATIONS, choose

MODULES = {
    name: importlib.import_module(f"pallas_kernels.decode_attention.{name}")
    for name in IMPLEMENTATIONS
}
KERNELS = tuple(name for name in IMPLEMENTATIONS if name != "xla")
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}

every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
every_kernel = pytest.mark.parametrize("name", KERNELS)


class Case(NamedTuple):
    """Operands of a call; `static` has what is not an array."""

    queries: tuple[np.ndarray, ...]
    k: np.ndarray
    v: np.ndarray
    slot_pos: np.ndarray
    positions: np.ndarray
    sinks: np.ndarray | None
    static: dict
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Out, LSE (−inf where nothing is visible) and slot sums, one query and slot at a time."""
    batch, n, heads, dim = case.queries[0].shape
    _, kv_heads, capacity, _ = case.k.shape
    queries = [q.astype(np.float64) for q in case.queries]
    k, v = case.k.astype(np.float64), case.v.astype(np.float64)
    if case.k_scale is not None:
        k, v = k * case.k_scale[..., None], v * case.v_scale[..., None]
    prefix, window = case.static["prefix"], case.static["window"]
    soft_cap = case.static.get("soft_cap")
    scale = case.static.get("scale") or 1 / math.sqrt(dim)
    out = np.zeros((batch, n, heads, dim))
    lse = np.full((batch, n, heads), -np.inf)
    slot_sums = np.zeros((batch, n, kv_heads, capacity))
    for b, i, h in np.ndindex(batch, n, heads):
        head, at = h // (heads // kv_heads), case.positions[b, i]
        score = {}
        for slot in range(capacity):
            held = (
                case.slot_pos[b, slot] if case.slot_pos.ndim == 2 else case.slot_pos[b, head, slot]
            )
            if held < 0 or held > at:
                continue
            if slot >= prefix and held <= at - window:
                continue
            q = queries[-1] if slot < prefix else queries[0]
            s = scale * (q[b, i, h] @ k[b, head, slot])
            score[slot] = s if soft_cap is None else soft_cap * math.tanh(s / soft_cap)
        exponents = [*score.values(), *([] if case.sinks is None else [float(case.sinks[h])])]
        if not exponents:
            continue
        lse[b, i, h] = np.logaddexp.reduce(exponents)
        for slot, s in score.items():
            p = math.exp(s - lse[b, i, h])
            out[b, i, h] += p * v[b, head, slot]
            slot_sums[b, i, head, slot] += p
    return out, lse, slot_sums


def ring_case(
    *,
    batch: int = 2,
    n: int = 1,
    kv_heads: int = 2,
    groups: int = 3,
    dim: int = 16,
    sinks: int = 2,
    kept: int = 3,
    window: int = 20,
    slots: int | None = None,
    lengths: tuple[int, ...] = (70, 9),
    rotations: int = 2,
    per_head: bool = False,
    learned_sinks: bool = False,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    seed: int = 0,
    **static,
) -> Case:
    """A bounded cache in which row b has seen `lengths[b]` tokens, its N queries the last of them.

    Kept slots hold old positions; where `per_head`, each head has other ones, and one of them none.
    """
    rng = np.random.default_rng(seed)
    prefix, ring = sinks + kept, slots or window + n - 1
    capacity = prefix + ring
    slot_pos = np.full((batch, kv_heads, capacity), -1, np.int32)
    for b in range(batch):
        for position in range(lengths[b]):
            slot = position if position < sinks else prefix + (position - sinks) % ring
            slot_pos[b, :, slot] = position
        for h in range(kv_heads if kept else 0):
            live = rng.integers(0, kept + 1) if per_head else kept
            held = rng.choice(max(lengths[b], kept), size=live, replace=False)
            slot_pos[b, h, sinks : sinks + live] = np.sort(held)
    if not per_head:
        slot_pos = slot_pos[:, 0]
    at = np.stack([np.arange(n) + length - n for length in lengths]).astype(np.int32)
    stored = jnp.dtype(cache_dtype or dtype)
    cache, heads = (batch, kv_heads, capacity, dim), kv_heads * groups

    def buffer() -> np.ndarray:
        return (
            rng.integers(-127, 128, size=cache, dtype=np.int8)
            if stored == np.int8
            else rng.normal(size=cache).astype(stored)
        )

    def scale() -> np.ndarray | None:
        wanted = stored == np.int8
        return np.exp2(rng.normal(-6, size=cache[:3])).astype(np.float32) if wanted else None

    return Case(
        queries=tuple(
            rng.normal(size=(batch, n, heads, dim)).astype(jnp.dtype(dtype))
            for _ in range(rotations)
        ),
        k=buffer(),
        v=buffer(),
        slot_pos=slot_pos,
        positions=at,
        sinks=rng.normal(size=heads).astype(np.float32) if learned_sinks else None,
        static={"prefix": prefix, "window": window, **static},
        k_scale=scale(),
        v_scale=scale(),
    )


@functools.cache
def compiled(name: str, outputs: bool, interpret, static: tuple):
    function = functools.partial(
        MODULES[name].decode_attention,
        **dict(static),
        return_lse=outputs,
        return_slot_sums=outputs,
        **({} if name == "xla" else {"interpret": interpret}),
    )
    # Compiling an interpreted kernel takes far longer than running it.
    options = {} if name == "xla" else {"xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)


def attend(name: str, case: Case, outputs: bool = True, interpret=True) -> Attended:
    """Runs one implementation, with all outputs or none but the first."""
    static = {"soft_cap": None, "scale": case.k.shape[-1] ** -0.5, **case.static}
    function = compiled(name, outputs, interpret, tuple(static.items()))
    operands = case.queries, case.k, case.v, case.slot_pos, case.positions
    return function(*operands, sinks=case.sinks, k_scale=case.k_scale, v_scale=case.v_scale)


def assert_matches(attended: Attended, case: Case) -> None:
    out, lse, slot_sums = oracle(case)
    dtype = case.queries[0].dtype
    assert attended.out.dtype == dtype
    near = functools.partial(np.testing.assert_allclose, rtol=0)
    # Rounding of scores grows with them; only bfloat16 and float16 inputs are rounded at all.
    near(np.asarray(attended.out, np.float64), out, atol=TOLERANCES[dtype.name] * 2)
    if attended.lse is not None:
        assert attended.lse.dtype == jnp.float32
        near(attended.lse, np.maximum(lse, LOWEST), atol=TOLERANCES[dtype.name] * 2)
    if attended.slot_sums is not None:
        assert attended.slot_sums.dtype == jnp.float32
        near(attended.slot_sums, slot_sums, atol=TOLERANCES[dtype.name] * 4)


SHAPES = {
    "one query": {},
    "drafts": {"n": 5, "groups": 1},
    "wide": {"n": 5, "groups": 8, "kv_heads": 1, "dim": 128},
    "one kv head per query head": {"groups": 1, "dim": 64},
    "four groups": {"groups": 4, "dim": 64},
    "many heads": {"n": 2, "kv_heads": 5, "groups": 3, "dim": 24},
    "batch of one": {"batch": 1, "lengths": (33,)},
    "no prefix": {"sinks": 0, "kept": 0, "rotations": 1},
    "one rotation": {"rotations": 1},
    "a ring that has just filled": {"lengths": (22, 21)},
    "slack in the ring": {"slots": 31, "n": 5, "lengths": (100, 30)},
    "a full cache with no ring": {"sinks": 25, "kept": 0, "window": 1, "lengths": (20, 24)},
    "window of one": {"window": 1},
    "heads evict independently": {"per_head": True, "n": 2},
    "learned sinks": {"learned_sinks": True, "n": 2},
    "soft cap": {"soft_cap": 1.5},
    "scale": {"scale": 0.7},
    "all of them": {"per_head": True, "learned_sinks": True, "soft_cap": 4.0, "n": 5, "dim": 64},
}


class TestEveryImplementation:
    @pytest.mark.thinned(3)
    @pytest.mark.parametrize("shape", SHAPES)
    @every_implementation
    def test_matches_the_oracle(self, name, shape):
        case = ring_case(**SHAPES[shape])
        assert_matches(attend(name, case), case)

    @every_implementation
    def test_output_alone(self, name):
        case = ring_case(n=2)
        attended = attend(name, case, outputs=False)
        assert (attended.lse, attended.slot_sums) == (None, None)
        assert_matches(attended, case)

    @pytest.mark.thinned(3)
    @pytest.mark.parametrize(
        ("dtype", "cache_dtype"),
        [
            ("bfloat16", "bfloat16"),
            ("float16", "float16"),
            ("float32", "bfloat16"),
            ("bfloat16", "float32"),
            ("float32", "int8"),
            ("bfloat16", "int8"),
            ("float32", "float8_e4m3fn"),
        ],
    )
    @every_implementation
    def test_dtypes(self, name, dtype, cache_dtype):
        case = ring_case(dtype=dtype, cache_dtype=cache_dtype, n=2, dim=64)
        if unsupported(name, case):
            pytest.skip(unsupported(name, case))
        assert_matches(attend(name, case), case)

    @pytest.mark.parametrize("slots", [600, 1100])
    @every_implementation
    def test_several_blocks_the_last_of_which_sticks_out(self, name, slots):
        lengths = (slots + 70, slots // 2)
        case = ring_case(window=slots - 4, slots=slots, n=2, lengths=lengths, dim=8)
        assert_matches(attend(name, case), case)

    @every_implementation
    def test_several_blocks_of_scales(self, name):
        """Heads with slots of their own: each has its scale, and what lies beyond C is not used."""
        case = ring_case(
            window=596, slots=600, n=2, lengths=(670, 300), dim=8,
            cache_dtype="int8", per_head=True, learned_sinks=True, soft_cap=4.0,
        )  # fmt: skip
        assert_matches(attend(name, case), case)

    @pytest.mark.parametrize("learned_sinks", [False, True])
    @every_implementation
    def test_a_query_that_sees_nothing(self, name, learned_sinks):
        """An empty row, and a row whose slots all lie behind its window or in its future."""
        case = ring_case(learned_sinks=learned_sinks, n=2, sinks=0, kept=0)
        case.slot_pos[0] = -1
        case.slot_pos[1] = np.where(np.arange(case.k.shape[2]) % 2, 1000, 10)
        case.positions[1] = [500, 600]
        attended = attend(name, case)
        assert np.all(np.asarray(attended.out) == 0)
        assert np.all(np.asarray(attended.slot_sums) == 0)
        if learned_sinks:
            np.testing.assert_allclose(
                attended.lse, np.broadcast_to(case.sinks, attended.lse.shape), rtol=1e-6
            )
        else:
            assert np.all(np.asarray(attended.lse) == np.float32(LOWEST))

    @pytest.mark.parametrize("learned_sinks", [False, True])
    @every_implementation
    def test_slot_sums_and_the_sink_add_up_to_the_group(self, name, learned_sinks):
        case = ring_case(learned_sinks=learned_sinks, n=2, groups=4)
        attended = attend(name, case)
        total = np.asarray(attended.slot_sums, np.float64).sum(axis=-1)
        if case.sinks is not None:
            by_head = np.exp(case.sinks - np.asarray(attended.lse))
            total += by_head.reshape(*total.shape, -1).sum(axis=-1)
        np.testing.assert_allclose(total, 4.0, rtol=1e-5)

    @every_implementation
    def test_halves_of_a_cache_merge_by_their_lse(self, name):
        case = ring_case(n=2, lengths=(70, 4))  # the second row has nothing in the other half
        half, prefix = case.k.shape[2] // 2, case.static["prefix"]
        parts = [
            case._replace(
                k=case.k[:, :, slots],
                v=case.v[:, :, slots],
                slot_pos=case.slot_pos[:, slots],
                static={**case.static, "prefix": in_part},
            )
            for slots, in_part in ((slice(half), prefix), (slice(half, None), 0))
        ]
        whole = attend(name, case)
        outs, lses = zip(*(attend(name, part)[:2] for part in parts), strict=True)
        lse = functools.reduce(np.logaddexp, lses)
        merged = sum(
            np.asarray(o) * np.exp(part - lse)[..., None]
            for o, part in zip(outs, lses, strict=True)
        )
        np.testing.assert_allclose(lse, whole.lse, atol=2e-6)
        np.testing.assert_allclose(merged, whole.out, atol=2e-6)

    @every_implementation
    def test_large_scores_do_not_overflow(self, name):
        case = ring_case(scale=300.0)
        attended = attend(name, case)
        out, _, slot_sums = oracle(case)
        np.testing.assert_allclose(attended.out, out, atol=2e-2)
        np.testing.assert_allclose(attended.slot_sums, slot_sums, atol=2e-2)


class TestKernels:
    @pytest.mark.parametrize("per_head", [False, True])
    @every_kernel
    def test_blocks_without_a_visible_slot_are_not_read(self, name, per_head):
        """Poison there changes nothing, and is seen where a block has a visible slot."""
        rows = {"mosaic_tpu": 512, "triton": 64}[name]
        case = ring_case(slots=4 * rows, window=rows, lengths=(rows + 9, 3), per_head=per_head)
        clean = attend(name, case)
        seen = np.asarray(
            MODULES["xla"].visible(case.slot_pos, case.positions, prefix=5, window=rows)
        ).any(axis=(1, 2))
        poisoned = False
        for b in range(2):
            for start in range(0, case.k.shape[2], rows):
                block = slice(start, start + rows)
                if not seen[b, block].any():
                    case.k[b, :, block] = case.v[b, :, block] = np.nan
                    poisoned = True
        assert poisoned
        for left, right in zip(clean, attend(name, case), strict=True):
            np.testing.assert_array_equal(left, right)
        case.v[1, :, 0] = np.nan
        assert np.isnan(attend(name, case).out[1]).all()

    @every_kernel
    def test_positions_of_inactive_rows_may_be_anything(self, name):
        case = ring_case(n=2)
        case.slot_pos[1] = -1
        case.positions[1] = [-1, np.iinfo(np.int32).max]
        attended = attend(name, case)
        assert_matches(attended, case)
        assert np.all(np.asarray(attended.out[1]) == 0)


class TestXla:
    @settings(deadline=None, max_examples=30)
    @given(
        batch=st.integers(1, 3),
        n=st.integers(1, 4),
        kv_heads=st.integers(1, 3),
        groups=st.integers(1, 4),
        sinks=st.integers(0, 3),
        kept=st.integers(0, 3),
        window=st.integers(1, 12),
        rotations=st.integers(1, 2),
        per_head=st.booleans(),
        learned_sinks=st.booleans(),
        soft_cap=st.sampled_from([None, 2.0]),
        cache_dtype=st.sampled_from(["float32", "int8", "float8_e4m3fn"]),
        data=st.data(),
    )
    def test_any_operands(self, batch, n, data, **shape):
        lengths = data.draw(st.lists(st.integers(n, 40), min_size=batch, max_size=batch).map(tuple))
        case = ring_case(batch=batch, n=n, dim=8, lengths=lengths, **shape)
        assert_matches(attend("xla", case), case)

    @pytest.mark.parametrize("capacity", [4096, 40000])
    def test_at_full_size(self, capacity):
        """XLA:CPU has silently miscompiled operations this wide (jax#39103)."""
        case = ring_case(batch=1, kv_heads=1, groups=2, dim=8, window=capacity, lengths=(capacity,))
        assert_matches(attend("xla", case), case)


class TestMosaicTpu:
    @pytest.fixture(autouse=True)
    def _reset_interpreter(self):
        compiled.cache_clear()  # what is compiled here depends on constants that are patched
        yield
        compiled.cache_clear()
        pltpu.reset_tpu_interpret_mode_state()

    @pytest.mark.parametrize(
        ("per_head", "cache_dtype"), [(False, "float32"), (True, "float32"), (True, "int8")]
    )
    def test_under_tpu_memory_semantics_without_races(self, per_head, cache_dtype, monkeypatch):
        monkeypatch.setattr(MODULES["mosaic_tpu"], "BLOCK_C", 128)
        case = ring_case(
            slots=256 - 5, window=40, lengths=(43, 7), n=2, per_head=per_head, dim=128, kv_heads=1,
            cache_dtype=cache_dtype,
        )  # fmt: skip
        strict = pltpu.InterpretParams(
            detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
        )
        assert_matches(attend("mosaic_tpu", case, interpret=strict), case)

    @pytest.mark.parametrize(
        ("slots", "cache_dtype"), [(20, "float32"), (600, "float32"), (600, "int8")]
    )
    def test_slots_in_lanes(self, slots, cache_dtype, monkeypatch):
        """The layout of large caches of narrow heads."""
        if cache_dtype == "int8" and jax.__version_info__ < (0, 8):
            pytest.skip("jax 0.7.2 is off by 4.2e-6 there, where 4e-6 is allowed")
        monkeypatch.setattr(MODULES["mosaic_tpu"], "SLOTS_IN_LANES_BYTES", 0)
        lengths = (slots + 50, slots // 2)
        case = ring_case(window=slots - 1, n=2, dim=24, lengths=lengths, cache_dtype=cache_dtype)
        assert_matches(attend("mosaic_tpu", case), case)

    def test_a_step_for_each_head_finds_its_scales(self, monkeypatch):
        monkeypatch.setattr(MODULES["mosaic_tpu"], "STEP_BYTES", 0)
        case = ring_case(kv_heads=3, cache_dtype="int8")
        assert_matches(attend("mosaic_tpu", case), case)

    @pytest.mark.parametrize(("prefix", "at"), [(0, 1400), (5, 1400), (5, 3), (5, -1)])
    def test_lists_the_blocks_to_read(self, prefix, at):
        """Slots 0 to 2047 hold the positions of their numbers, and a query sees the last 600."""
        module = MODULES["mosaic_tpu"]
        slot_pos = jnp.arange(2048, dtype=jnp.int32)[None]
        tiling = SimpleNamespace(block_c=512, num_blocks=4, heads=1)
        config = SimpleNamespace(
            tiling=tiling, prefix=prefix, window=600, capacity=2048, slot_pos_per_head=False
        )
        live, num_live = module._live_blocks(slot_pos, jnp.full((1, 1), at, jnp.int32), config)
        expected = {(0, 1400): [1, 2], (5, 1400): [0, 1, 2], (5, 3): [0], (5, -1): []}[prefix, at]
        assert num_live.tolist() == [len(expected)]
        padding = [expected[-1] if expected else 0] * (4 - len(expected))
        assert live.tolist() == expected + padding

    @pytest.mark.parametrize(
        ("q", "k", "slot_sums", "reason"),
        [
            ((1, 1, 4, 64, "float16"), (1, 4, 512, 64, "float16"), False, "float16 queries"),
            ((1, 1, 4, 64, "bfloat16"), (1, 4, 512, 64, "float16"), False, "float16 keys"),
            ((1, 1, 4, 64, "float32"), (1, 4, 512, 64, "uint8"), False, "uint8 keys"),
            ((1, 1, 4, 60, "float32"), (1, 4, 512, 60, "float32"), False, "60 dimensions"),
            ((1, 5, 8, 64, "float32"), (1, 1, 65536, 64, "float32"), True, "slot sums over 65536"),
            ((1, 16, 512, 256, "float32"), (1, 1, 512, 256, "float32"), False, "8192 queries"),
            ((8, 16, 64, 128, "bfloat16"), (8, 8, 4096, 128, "bfloat16"), True, None),
            ((8, 16, 64, 256, "float32"), (8, 8, 65536, 256, "float32"), False, None),
        ],
    )
    def test_says_what_it_does_not_take(self, q, k, slot_sums, reason):
        q, k = (jax.ShapeDtypeStruct(x[:-1], jnp.dtype(x[-1])) for x in (q, k))
        said = MODULES["mosaic_tpu"].unsupported(q, k, rotations=2, slot_sums=slot_sums)
        assert (said is None) == (reason is None)
        assert reason is None or reason in said


def unsupported(name: str, case: Case) -> str | None:
    return MODULES[name].unsupported(
        case.queries[0], case.k, rotations=len(case.queries), slot_sums=True
    )


class TestApi:
    @staticmethod
    def operands(**changes):
        case = ring_case()
        operands = {**case._asdict(), **case.static}
        del operands["static"]
        return {**operands, **changes}

    def test_default_on_a_cpu(self):
        case = ring_case(n=2, learned_sinks=True, soft_cap=3.0)
        attended = decode_attention(
            *case[:5], sinks=case.sinks, **case.static, return_lse=True, return_slot_sums=True
        )
        assert_matches(attended, case)

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            ("queries", ()),
            ("queries", (np.zeros((2, 1, 6, 16), np.float32),) * 3),
            ("queries", (np.zeros((2, 1, 6, 16), np.float32), np.zeros((2, 1, 6, 8), np.float32))),
            ("queries", (np.zeros((2, 1, 6, 16), np.int32),)),
            ("queries", (np.zeros((2, 6, 16), np.float32),)),
            ("queries", (np.zeros((2, 0, 6, 16), np.float32),)),
            ("k", np.zeros((2, 2, 25, 16), np.int16)),
            ("k", np.zeros((2, 25, 16), np.float32)),
            ("k", np.zeros((1, 2, 25, 16), np.float32)),
            ("k", np.zeros((2, 2, 25, 8), np.float32)),
            ("k", np.zeros((2, 2, 0, 16), np.float32)),
            ("k", np.zeros((2, 4, 25, 16), np.float32)),
            ("v", np.zeros((2, 2, 25, 16), np.float16)),
            ("v", np.zeros((2, 2, 24, 16), np.float32)),
            ("slot_pos", np.zeros((2, 25), np.int64)),
            ("slot_pos", np.zeros((2, 24), np.int32)),
            ("slot_pos", np.zeros((2, 6, 25), np.int32)),
            ("positions", np.zeros((2, 1), np.int16)),
            ("positions", np.zeros((2, 2), np.int32)),
            ("prefix", -1),
            ("prefix", 26),
            ("window", 0),
            ("k_scale", np.ones((2, 2, 25), np.float32)),
            ("v_scale", np.ones((2, 2, 25), np.float32)),
            ("sinks", np.zeros(6, np.float16)),
            ("sinks", np.zeros(2, np.float32)),
            ("soft_cap", 0.0),
            ("soft_cap", math.inf),
            ("scale", math.nan),
            ("implementation", "cuda"),
        ],
    )
    def test_a_wrong_argument_is_named(self, argument, wrong):
        with pytest.raises(ValueError, match=f"^{argument}: "):
            decode_attention(**self.operands(**{argument: wrong}))

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            ("k_scale", None),
            ("v_scale", None),
            ("k_scale", np.ones((2, 25, 2), np.float32)),
            ("v_scale", np.ones((2, 2, 25), np.float16)),
        ],
    )
    def test_a_wrong_scale_of_an_int8_cache_is_named(self, argument, wrong):
        case = ring_case(cache_dtype="int8")
        scales = {"k_scale": case.k_scale, "v_scale": case.v_scale, argument: wrong}
        with pytest.raises(ValueError, match=f"^{argument}: "):
            decode_attention(*case[:5], **case.static, **scales)

    def test_an_implementation_that_lacks_the_dtype_is_named(self):
        case = ring_case(dtype="float16")
        with pytest.raises(
            ValueError, match=r"^implementation: 'mosaic_tpu' does not take float16"
        ):
            decode_attention(*case[:5], **case.static, implementation="mosaic_tpu")

    @pytest.mark.parametrize(
        ("capability", "chosen"), [("8.6", "xla"), ("8.9", "triton"), ("10.0", "triton")]
    )
    def test_default_for_float8_by_gpu(self, monkeypatch, capability, chosen):
        """Where Triton cannot convert it, compiling would end the process."""
        device = SimpleNamespace(platform="gpu", device_kind="", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])
        case = ring_case(cache_dtype="float8_e4m3fn")
        module = choose(
            "decode_attention",
            None,
            lambda module: module.unsupported(
                case.queries[0], case.k, rotations=2, slot_sums=False
            ),
        )
        assert module.__name__ == f"pallas_kernels.decode_attention.{chosen}"

    @pytest.mark.parametrize(
        ("device", "dtype", "chosen"),
        [
            ({"platform": "cpu", "device_kind": "cpu"}, "float32", "xla"),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "bfloat16", "mosaic_tpu"),
            ({"platform": "tpu", "device_kind": "TPU v5 lite"}, "float16", "xla"),
            ({"platform": "tpu", "device_kind": "TPU v2"}, "float32", "xla"),
            ({"platform": "gpu", "device_kind": "H100", "compute_capability": "9.0"}, "float16", "triton"),
            ({"platform": "gpu", "device_kind": "T4", "compute_capability": "7.5"}, "float32", "xla"),
            ({"platform": "gpu", "device_kind": "MI300", "compute_capability": "gfx942"}, "float32", "xla"),
        ],
    )  # fmt: skip
    def test_default_by_device_and_dtype(self, monkeypatch, device, dtype, chosen):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
        q = jax.ShapeDtypeStruct((8, 5, 9, 64), jnp.dtype(dtype))
        k = jax.ShapeDtypeStruct((8, 3, 1024, 64), jnp.dtype(dtype))
        module = choose(
            "decode_attention",
            None,
            lambda module: module.unsupported(q, k, rotations=2, slot_sums=True),
        )
        assert module.__name__ == f"pallas_kernels.decode_attention.{chosen}"
