# Two commands set everything up: `make demo` and `make test`. Both work on a fresh clone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m-instruct

# Two workers, each with whole files: fixtures and compiled functions are shared within a file.
PARALLEL := -n 2 --dist loadfile

# Tests of trained models run longer than they compile: XLA optimises for them, unlike for others (tests/conftest.py).
TRAINED := XLA_FLAGS=--xla_backend_optimization_level=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-colab model aot-cuda oldest-jax clients lint format bench bench-peers eval-cache chromium clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The TPU compiler, for tests that compile without a TPU. In a folder of its own: beside JAX it would
# make every program look for a TPU first, and say so.
$(VENV)/libtpu: $(VENV)/installed
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ 'libtpu==0.0.42.*'; fi
	@mkdir -p $@ && touch $@

# The CUDA compiler, for tests that compile without a GPU: XLA's plugin, ptxas and libdevice, and none
# of the libraries that programs run with. In a folder of its own, too: only the subprocess of
# tests/aot/cuda.py sees it. The plugin must be of the very version of JAX.
$(VENV)/cuda/installed: $(VENV)/installed
	rm -rf $(@D) && mkdir -p $(@D)
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  jax=$$(sed -n 's/^jax==//p' constraints.txt) && \
	  $(BIN)/python -m pip install --quiet --no-deps --target $(@D) \
	    "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" \
	    'nvidia-cuda-nvcc==13.5.37' 'nvidia-nvvm==13.5.37'; fi
	@touch $@

# The oldest JAX that pyproject.toml allows, in a folder of its own before the other packages of this
# environment: a guided generation runs with it (tests/test_oldest_jax.py).
$(VENV)/oldest-jax/installed: constraints-colab.txt | $(VENV)/installed
	rm -rf $(@D) && mkdir -p $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) $$(grep -E '^jax(lib)?==' constraints-colab.txt)
	@touch $@

oldest-jax: $(VENV)/oldest-jax/installed  ## the oldest JAX that we run with (340 MB)

aot-cuda: $(VENV)/cuda/installed  ## what compiles for NVIDIA GPUs that are not there (720 MB)

# The browser for the tests of the server's page. Where it cannot be installed, they are skipped.
chromium:  ## the browser of the page's tests, from Debian's packages, if there is none
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then \
	  echo "no Chromium, and no apt-get or no right to use it: the page's tests will be skipped"; \
	else { apt-get -qq update && apt-get -qq install --yes --no-install-recommends chromium; } >/dev/null || \
	  echo "apt-get could not install Chromium: the page's tests will be skipped"; fi

# Clients of the server that tests run as their users do. LiteLLM and Instructor want an older openai than
# ours: an environment of their own, without our constraints.
$(VENV)/clients/installed: | $(VENV)/installed
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet \
	  'litellm==1.110.2' 'instructor==1.17.0' 'langchain-openai==1.7.4'
	@touch $@

clients: $(VENV)/clients/installed  ## LiteLLM, Instructor and LangChain, for tests of the server (440 MB)

# schemathesis wants an older jsonschema-rs than ours: an environment of its own, without our constraints.
$(VENV)/schemathesis/installed: | $(VENV)/installed
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet 'schemathesis==4.32.5'
	@touch $@

model: $(VENV)/installed  ## fetch the small real model (98 MB, verified)
	$(BIN)/python -m gkv_jax.weights.fetch $(MODEL)

demo: model  ## the main job: a real model writes a document that obeys a JSON Schema
	$(BIN)/python -m gkv_jax.generate --model $(MODEL) --schema examples/person.json \
	  --sinks 4 --window 252 --prompt "Invent a person who lives in Lisbon and describe them as JSON."

test: model lint $(VENV)/libtpu aot-cuda oldest-jax chromium clients $(VENV)/schemathesis/installed  ## ruff, mypy and the tests (what CI runs)
	$(BIN)/python -m pytest -m "not full and not model" $(PARALLEL)
	$(TRAINED) $(BIN)/python -m pytest -m "not full and model" $(PARALLEL)

test-full: model lint $(VENV)/libtpu aot-cuda oldest-jax chromium clients $(VENV)/schemathesis/installed  ## the long sizes of the long checks, too
	$(BIN)/python -m pytest -m "not model" $(PARALLEL)
	$(TRAINED) $(BIN)/python -m pytest -m model $(PARALLEL)

# What Colab has (constraints-colab.txt), beside which gkv_jax is installed as there.
$(VENV)/colab/installed: constraints-colab.txt pyproject.toml | $(VENV)/installed
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --constraint constraints-colab.txt --editable . \
	  flax orbax-checkpoint optax matplotlib ipython pytest pytest-xdist hypothesis jsonschema tiktoken \
	  nbclient nbformat ipykernel
	@touch $@

# What a notebook uses: kernels through Pallas' interpreter, caches, the loops, models and weights, Flax and
# the notebooks themselves. Compilers for other devices, the server and its clients stay with `make test`.
COLAB := $(addprefix tests/,test_imports.py test_notebooks.py examples \
  $(addprefix pallas_kernels/,test_dispatch.py test_int8_matmul.py test_bitmask.py test_decode_attention.py) \
  $(addprefix gkv_jax/,cache/test_streaming.py cache/test_storage.py cache/test_offload.py \
    test_engine.py test_engine_requests.py test_head.py test_rope.py test_sampling.py test_text.py \
    test_bias.py test_generate.py test_notebook.py models weights flax))

test-colab: model $(VENV)/colab/installed  ## the core's tests and the notebooks on what Colab has (3 GB)
	GKV_TINY=1 $(VENV)/colab/bin/python -m pytest -m "not full and not model" $(PARALLEL) $(COLAB)
	GKV_TINY=1 $(TRAINED) $(VENV)/colab/bin/python -m pytest -m "not full and model" $(PARALLEL) $(COLAB)

lint: $(VENV)/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: model  ## the benchmarks whose figures stand in docs/benchmarks.md
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.head
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.fill
	$(BIN)/python -m benchmarks.long_context
	$(BIN)/python -m benchmarks.quantize
	$(BIN)/python -m benchmarks.drafts.nothing
	$(BIN)/python -m benchmarks.serve_load --quantize int8 --json benchmarks/results/serve_load.json
	$(BIN)/python -m benchmarks.serve_load --quantize int8 --isolation \
	  --json benchmarks/results/serve_isolation.json

# kvpress wants an older transformers than ours: an environment of its own, without our constraints.
$(VENV)/kvpress/installed: | $(VENV)/installed
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet 'kvpress==0.5.5' 'torch==2.13.0'
	@touch $@

# llama.cpp is compiled for this very machine. Of the 64 bytes that ldtilecfg reads, GCC 12 is told of 8, and
# removes the stores of the others as dead: AMX would crash.
$(VENV)/llama_cpp/installed: | $(VENV)/installed
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	CMAKE_ARGS='-DGGML_NATIVE=ON' CXXFLAGS='-fno-tree-dse -fno-dse' \
	  $(@D)/bin/python -m pip install --quiet 'llama-cpp-python==0.3.36'
	@touch $@

# Documents need MaskBench: GKV_MASKBENCH names it.
bench-peers: model $(VENV)/kvpress/installed $(VENV)/llama_cpp/installed  ## beside kvpress and llama.cpp (fetches torch, compiles)
	$(BIN)/python -m benchmarks.kvpress --python $(VENV)/kvpress/bin/python
	$(BIN)/python -m benchmarks.drafts --llama-python $(VENV)/llama_cpp/bin/python

eval-cache: model  ## how well bounded caches answer, as tables and plots in cache-quality/
	$(BIN)/python -m gkv_jax.evaluate.cache

clean:  ## remove the environment and caches (not the fetched model)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
