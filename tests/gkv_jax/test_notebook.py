"""Notebooks are told where JAX computes, and stopped where it should not."""

import importlib.metadata

import jax
import pytest

from gkv_jax import UserError, notebook


@pytest.mark.parametrize(
    ("environ", "paths", "expected"),
    [
        ({}, (), None),
        ({"COLAB_GPU": "0", "TPU_SKIP_MDS_QUERY": "1", "TPU_NAME": ""}, ("dev/vfio/vfio",), None),
        ({}, ("dev/nvidia0",), ("gpu", "/dev/nvidia0")),
        ({"COLAB_GPU": "1"}, (), ("gpu", "COLAB_GPU=1")),
        ({}, ("dev/accel0",), ("tpu", "/dev/accel0")),
        ({"TPU_WORKER_ID": "0"}, (), ("tpu", "TPU_WORKER_ID=0")),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, (), ("tpu", "TPU_ACCELERATOR_TYPE=v5litepod-1")),
    ],
)
def test_signs_of_an_accelerator(environ, paths, expected) -> None:
    assert notebook.unused_accelerator(environ, lambda pattern: pattern in paths) == expected


@pytest.mark.parametrize("installed", [False, True])
def test_a_device_handed_through_is_a_tpu_where_jax_could_use_one(monkeypatch, installed) -> None:
    def version(distribution: str) -> str:
        if distribution == "libtpu" and installed:
            return "0.0.21.1"
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = notebook.unused_accelerator({}, lambda pattern: pattern == "dev/vfio/[0-9]*")
    assert found == (("tpu", "/dev/vfio") if installed else None)


def test_says_where_jax_computes(capsys) -> None:
    notebook.check_backend()  # the tests ask for the CPU, whatever else there is
    assert capsys.readouterr().out.startswith(f"jax {jax.__version__} on cpu: ")


@pytest.mark.parametrize(
    ("sign", "installed", "named"),
    [
        (
            ("gpu", "/dev/nvidia0"),
            {},
            ("jax[cuda12]==", "GPU (/dev/nvidia0)", "no jax-cuda12-plugin"),
        ),
        (
            ("gpu", "COLAB_GPU=1"),
            {"jax-cuda13-plugin": "0.7.2"},
            ("jax[cuda13]==", "jax-cuda13-plugin 0.7.2"),
        ),
        (("tpu", "/dev/accel0"), {"libtpu": "0.0.21.1"}, ("jax[tpu]==", "libtpu 0.0.21.1")),
    ],
)
def test_stops_with_the_way_out(monkeypatch, sign, installed, named) -> None:
    def version(distribution: str) -> str:
        if distribution not in installed:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(notebook, "_asked_for_cpu", lambda: False)
    monkeypatch.setattr(notebook, "unused_accelerator", lambda environ, exists: sign)
    with pytest.raises(UserError) as caught:
        notebook.check_backend()
    message = str(caught.value)
    assert "\n" not in message
    for part in (*named, jax.__version__, "Runtime > Restart session", "JAX_PLATFORMS=cpu"):
        assert part in message


def test_an_accelerator_in_use_is_no_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(notebook, "unused_accelerator", lambda environ, exists: ("gpu", "x"))
    notebook.check_backend()
    assert "on gpu" in capsys.readouterr().out


def test_colab_without_an_accelerator_is_told_where_they_are(monkeypatch, capsys) -> None:
    monkeypatch.setattr(notebook, "_asked_for_cpu", lambda: False)
    monkeypatch.setattr(notebook, "unused_accelerator", lambda environ, exists: None)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    notebook.check_backend()
    assert "Change runtime type" in capsys.readouterr().out
