"""Models kept with Orbax: what is written comes back, and nothing half-written is taken for whole."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gkv_jax import CacheSpec, Engine, UserError
from gkv_jax.models import families
from gkv_jax.models.llama import Llama
from gkv_jax.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from gkv_jax.weights import convert, load_model, orbax, published
from gkv_jax.weights.parameters import tree_of
from gkv_jax.weights.registry import LoadedModel

from .conftest import TINY, random_state

NAME = "tiny-random"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(NAME, dtype="float32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, loaded: LoadedModel) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("orbax") / "model"
    write(folder, loaded)
    return folder


@pytest.fixture
def folder(tmp_path: Path, loaded: LoadedModel) -> Path:
    """One to be damaged."""
    write(tmp_path / "model", loaded)
    return tmp_path / "model"


@pytest.fixture(scope="module")
def int8(loaded: LoadedModel) -> Any:
    """Its parameters, rounded."""
    return jax.jit(loaded.model.quantize)(loaded.params)


def write(folder: Path, loaded: LoadedModel, **options: Any) -> None:
    params = options.pop("params", loaded.params)
    orbax.save(
        folder, loaded.model, params, loaded.tokenizer, published=loaded.published, **options
    )


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def test_comes_back(saved: Path, loaded: LoadedModel) -> None:
    back = load_model(saved, dtype="float32")
    assert back.model == loaded.model
    assert_equal(back.params, loaded.params)
    assert back.tokenizer.encode("é<user>") == loaded.tokenizer.encode("é<user>")
    assert back.published == loaded.published
    assert (saved / "config.json").read_text() == loaded.published["config.json"]
    assert {path.name for path in saved.parent.iterdir()} - {".model.lock"} == {"model"}


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_int8(tmp_path: Path, loaded: LoadedModel, int8: Any, dtype: str | None) -> None:
    write(tmp_path / "int8", loaded, params=int8)
    back = orbax.load(tmp_path / "int8", dtype)
    wanted = jnp.dtype(dtype or "float32")
    assert back.params["head"].dtype == wanted  # of the products
    assert back.params["embed"].dtype == wanted
    assert back.params["head"].scale.dtype == jnp.float32
    assert_equal(back.params["head"].values, int8["head"].values)
    if wanted == jnp.float32:
        assert_equal(back.params, int8)


def test_stored_in_bfloat16(tmp_path: Path, loaded: LoadedModel) -> None:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded.params)
    write(tmp_path / "half", loaded, params=half)
    assert_equal(orbax.load(tmp_path / "half").params, half)
    wide = orbax.load(tmp_path / "half", "float32").params
    assert_equal(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half))


def test_a_value_beyond_float16(tmp_path: Path, loaded: LoadedModel) -> None:
    params = {**loaded.params, "norm": loaded.params["norm"] * 1e6}
    write(tmp_path / "large", loaded, params=params)
    with pytest.raises(UserError, match="leaf norm does not fit float16"):
        orbax.load(tmp_path / "large", "float16")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"rope": RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)), "eos_token_ids": ()},
        {"rope": RopeConfig(1e4, LinearScaling(2.0), 0.5), "bos_token_id": None},
        {"rope": RopeConfig(1e4, YarnScaling(4.0, 32, 1.2, 16.0, 2.0, False))},
    ],
    ids=["plain", "biases", "llama3", "linear", "yarn"],
)
def test_a_config_is_written_for_a_model_made_in_code(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    model = Llama(replace(TINY, **changes))
    for name, text in published.of_model(model).items():
        (tmp_path / name).write_text(text)
    assert published.read(tmp_path) == model


def test_a_config_that_cannot_be_written(loaded: LoadedModel, tmp_path: Path) -> None:
    windows = Llama(replace(loaded.config, windows=(4, None)))
    with pytest.raises(UserError, match=r"no config.json can be written.*published"):
        orbax.save(tmp_path / "model", windows, loaded.params, loaded.tokenizer)
    with pytest.raises(UserError, match="published: it describes another model"):
        orbax.save(
            tmp_path / "model",
            windows,
            loaded.params,
            loaded.tokenizer,
            published=loaded.published,
        )
    assert {path.name for path in tmp_path.iterdir()} <= {".model.lock"}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 500.0},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 8, "attention_bias": True},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_comes_back(kind: str, tmp_path: Path, loaded: LoadedModel) -> None:
    """With what its publisher wrote; exact or rounded."""
    config = FAMILIES[kind] | {
        "model_type": kind,
        "vocab_size": loaded.config.vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = families.from_hf(config)
    params = tree_of(model, lambda leaf: jnp.full(leaf.tree_shape, 0.5))
    text = {"config.json": json.dumps(config)}
    for number, tree in enumerate((params, jax.eval_shape(model.quantize, params))):
        if number:
            tree = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), tree)
        folder = tmp_path / str(number)
        orbax.save(folder, model, tree, loaded.tokenizer, published=text)
        back = orbax.load(folder)
        assert back.model == model
        assert back.published == text
        assert_equal(back.params, tree)


def test_from_gguf(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    from gguf import RopeScalingType

    def settings(writer: Any) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    path = write_gguf(TINY, random_state(TINY), settings=settings)
    size = convert.convert_model(path, tmp_path / "out", dtype="float32")
    source, back = load_model(path, "float32"), load_model(tmp_path / "out", "float32")
    assert back.model == source.model
    assert back.config.rope.scaling == LinearScaling(2.0)
    assert_equal(back.params, source.params)
    assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(source.params))
    text = "he said 12"
    assert back.tokenizer.encode(text) == source.tokenizer.encode(text)


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert.convert(NAME, tmp_path / "out", dtype="float32", quantize="int8")
    assert "MB of int8 weights" in capsys.readouterr().out
    assert orbax.is_quantized(load_model(tmp_path / "out").params)
    with pytest.raises(Exception, match="2") as caught:
        convert.convert(NAME, tmp_path / "out")
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert "is there already" in capsys.readouterr().err
    with pytest.raises(UserError, match="quantize is 'int4'"):
        convert.convert_model(NAME, tmp_path / "other", quantize="int4")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="tiny-random is the name of a model of the registry"):
        convert.convert_model(NAME, Path(NAME))


def test_engines_take_such_a_folder(tmp_path: Path, loaded: LoadedModel, int8: Any) -> None:
    write(tmp_path / "int8", loaded, params=int8)
    for folder, quantize in ((tmp_path / "int8", None), (tmp_path / "int8", "int8")):
        with Engine.from_pretrained(
            str(folder), quantize=quantize, slots=1, cache=CacheSpec(sinks=4, window=28)
        ) as engine:
            assert engine.dtype == jnp.float32
            assert engine.model == loaded.model


def test_a_folder_that_is_taken(folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        write(folder, loaded)
    double = jax.tree.map(lambda leaf: leaf * 2, loaded.params)
    write(folder, loaded, params=double, overwrite=True)
    assert_equal(orbax.load(folder).params, double)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(UserError, match="is not overwritten"):
        write(tmp_path / "thesis", loaded, overwrite=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", loaded)
    orbax.load(tmp_path / "empty")


def test_a_failure_leaves_what_was_there(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "_checkpointer", lambda *_: 1 / 0)
    for name in ("model", "new"):
        with pytest.raises(ZeroDivisionError):
            write(folder.with_name(name), loaded, overwrite=True)
    monkeypatch.undo()
    assert_equal(orbax.load(folder).params, loaded.params)
    assert not folder.with_name("new").exists()


def test_a_link_is_followed(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    for overwrite in (False, True):
        write(tmp_path / "link", loaded, overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert_equal(orbax.load(tmp_path / "disk" / "model").params, loaded.params)


def test_one_of_two_at_once(tmp_path: Path, loaded: LoadedModel) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    paths = (tmp_path / "model", tmp_path / "link" / "model")
    with ThreadPoolExecutor() as pool:
        saves = [pool.submit(write, path, loaded) for path in paths]
    errors = [str(save.exception()) for save in saves if save.exception()]
    assert len(errors) == 1, errors
    assert "is there already" in errors[0]
    assert_equal(orbax.load(tmp_path / "model").params, loaded.params)


def test_what_others_put_there_meanwhile_stays(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*arguments: Any) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").touch()

    monkeypatch.setattr(orbax, "_write_manifest", meanwhile)
    with pytest.raises(UserError, match="is there already"):
        write(tmp_path / "model", loaded)
    assert (tmp_path / "model" / "theirs").exists()


def test_an_incomplete_copy(folder: Path) -> None:
    (folder / orbax.MANIFEST).unlink()
    for load in (orbax.load, load_model):
        with pytest.raises(UserError, match=r"is incomplete: it has params/, but no gkv_jax.json"):
            load(folder)


@pytest.mark.parametrize("damage", ["lost", "short", "changed"])
def test_a_damaged_folder(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file it is, what is wrong is said once, and nothing is printed by threads."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != orbax.MANIFEST]
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        if damage == "lost":
            path.unlink()
        else:
            path.write_bytes(bytes(len(content)) if damage == "changed" else content[:-1])
        name = re.escape(str(path.relative_to(folder)))
        with pytest.raises(
            UserError, match=f"incomplete or damaged: {name} missing, unreadable or changed"
        ):
            orbax.load(folder)
        path.write_bytes(content)
    orbax.load(folder)
    assert not unraisable


def test_a_file_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def fails(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(UserError, match=r"damaged: tokenizer.json missing, unreadable or changed"):
        orbax.load(folder)


def test_a_checkpoint_that_orbax_cannot_read(folder: Path) -> None:
    path = folder / orbax.MANIFEST
    manifest = json.loads(path.read_text())
    (folder / "params" / "_METADATA").write_text("{")
    del manifest["files"]["params/_METADATA"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"params is damaged \(.*convert it again"):
        orbax.load(folder)


def test_a_later_format(folder: Path) -> None:
    path = folder / orbax.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="format 99 is not served"):
        orbax.load(folder)


def test_a_damaged_manifest(folder: Path) -> None:
    path = folder / orbax.MANIFEST
    good = json.loads(path.read_text())
    wrong = {
        "dtype": ["float64", 3, [], None],
        "quantization": ["int4", [], False],
        "leaves": [None, [], {"norm": 3}, {"norm": [[1.5], "float32"]}, {"norm": [[1], "float"]}],
        "files": [None, ["config.json"], {"config.json": 1}, {"config.json": [1.5, None]}],
    }
    wrong["leaves"].append({"norm": [[1], "nothing"]})
    damaged = [
        {key: value for key, value in good.items() if key != missing} for missing in wrong
    ] + [good | {key: value} for key, values in wrong.items() for value in values]
    for content in damaged:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"gkv_jax\.json"):
            orbax.load(folder)


def test_a_checkpoint_of_another_model(folder: Path, loaded: LoadedModel) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 4, "num_hidden_layers": 1}))
    manifest = json.loads((folder / orbax.MANIFEST).read_text())
    manifest["files"]["config.json"] = orbax.Print.of(path)
    (folder / orbax.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError) as caught:
        orbax.load(folder)
    inner = loaded.config.intermediate_size
    assert f"layers.0.down [{inner}, {loaded.config.hidden_size}] instead of [4" in str(
        caught.value
    )
    assert "unexpected: layers.1." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_of_another_model(tmp_path: Path, loaded: LoadedModel) -> None:
    params = {name: leaf for name, leaf in loaded.params.items() if name != "norm"}
    with pytest.raises(UserError, match=r"params: .*missing: norm"):
        write(tmp_path / "model", loaded, params=params | {"new": jnp.zeros(3)})


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no gkv_jax.json; make such a folder"):
        orbax.load(tmp_path)


def test_without_orbax(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(UserError, match=r"pip install 'gkv_jax\[orbax\]'"):
        load_model(saved)


TWO_DEVICES = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 2)

from gkv_jax.weights import load_model, orbax
from gkv_jax.weights.placement import by_name

mesh = Mesh(np.array(jax.devices()), ("model",))
rule = by_name(mesh, {"layers.*.[qkv]": P(None, "model"), "layers.*.qkv.values": P("model"),
                      "embed": (None, "model")})
one = load_model("tiny-random", "float32")
int8 = one.model.quantize(one.params)
orbax.save(sys.argv[1] + "/exact", one.model, one.params, one.tokenizer)
orbax.save(sys.argv[1] + "/int8", one.model, int8, one.tokenizer)
restored = orbax.load(sys.argv[1] + "/exact", placement=rule).params
rounded = orbax.load(sys.argv[1] + "/int8", placement=rule).params
read = load_model("tiny-random", "float32", placement=rule).params
for params in (restored, read):
    q = params["layers"][1]["q"]
    assert q.sharding.spec == P(None, "model"), q.sharding
    assert q.addressable_shards[0].data.shape == (q.shape[0], q.shape[1] // 2)
    assert params["norm"].sharding.is_fully_replicated and len(params["norm"].devices()) == 2
    assert params["embed"].addressable_shards[0].data.shape == (261, 32)
    jax.tree.map(np.testing.assert_array_equal, params, one.params)
jax.tree.map(np.testing.assert_array_equal, rounded, int8)
assert rounded["layers"][0]["qkv"].values.sharding.spec == P("model")
second = orbax.load(sys.argv[1] + "/exact", placement=jax.devices()[1]).params
assert second["norm"].devices() == {jax.devices()[1]}
def project(params):
    return one.model.logits(params, params["embed"][:3])
np.testing.assert_allclose(jax.jit(project)(restored), project(one.params), atol=1e-4)
print("fine")
"""


def test_two_devices(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "fine", run.stderr
