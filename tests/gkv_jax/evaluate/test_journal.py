"""What is finished is not measured again, and only then."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from gkv_jax.evaluate import journal
from gkv_jax.evaluate.journal import Journal, circumstances
from gkv_jax.models.llama import Llama
from tests.gkv_jax.tiny import byte_tokenizer, random_params, text_config

CONFIG = text_config()
PARAMS = random_params(CONFIG)


def test_a_journal_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.jsonl"
    first = Journal(path, "a")
    first.record("cell/1", {"score": 0.5, "answers": ["é"]})
    first.record("cell/2", {"score": 1.0})
    again = Journal(path, "a")
    assert again.find("cell/1") == {"score": 0.5, "answers": ["é"]}
    assert again.find("cell/3") is None
    assert Journal(path, "b").find("cell/1") is None


def test_an_unfinished_line_is_lost_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, "a").record("cell/1", {"score": 0.5})
    path.write_text(path.read_text() + '{"key": "cell/2 a", "val')
    second = Journal(path, "a")
    assert second.find("cell/2") is None
    second.record("cell/3", {"score": 0.0})
    third = Journal(path, "a")
    assert third.find("cell/1") == {"score": 0.5}
    assert third.find("cell/3") == {"score": 0.0}


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    memory = Journal(None, "a")
    memory.record("cell/1", {"score": 1.0})
    assert memory.find("cell/1") == {"score": 1.0}
    assert list(tmp_path.iterdir()) == []


def test_circumstances_are_model_tokenizer_code_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = Llama(CONFIG), byte_tokenizer()
    same = circumstances(model, PARAMS, tokenizer, 1)
    assert circumstances(Llama(text_config()), random_params(CONFIG), byte_tokenizer(), 1) == same
    other_template = byte_tokenizer()
    other_template.chat_template = "{{ messages }}"
    changed = {**PARAMS, "norm": PARAMS["norm"] + jnp.float32(0.01)}
    others = [
        circumstances(Llama(text_config(rms_norm_eps=1e-6)), PARAMS, tokenizer, 1),
        circumstances(model, changed, tokenizer, 1),
        circumstances(model, PARAMS, other_template, 1),
        circumstances(model, PARAMS, tokenizer, 2),
    ]
    source = tmp_path / "code.py"
    source.write_text("pass")
    monkeypatch.setattr(journal, "_sources", lambda: [source])
    others.append(circumstances(model, PARAMS, tokenizer, 1))
    assert len({same, *others}) == len(others) + 1


def test_presentation_is_not_code_that_computes() -> None:
    names = {"/".join(path.parts[-2:]) for path in journal._sources()}
    computes = {"evaluate/tasks.py", "evaluate/runner.py", "cache/spec.py", "gkv_jax/decode.py"}
    assert computes <= names
    assert not {"evaluate/report.py", "evaluate/cache.py", "gkv_jax/engine.py"} & names
