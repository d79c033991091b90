# Every target stands alone on a fresh clone: it makes .venv and installs into it what it needs.

.PHONY: demo test test-slow test-newest test-kernels lint format bench docs clean

BIN := .venv/bin
WORKERS ?= 2

# One worker per core: unlimited, each would start a thread per core. Nearly all of a test's time is
# XLA's compiler, so `test` has it optimise nothing; `test-slow` compiles as users do.
ONE_CORE := --xla_cpu_multi_thread_eigen=false
QUICK = --xla_backend_optimization_level=0 $(if $(filter 0.10.%,$(JAXLIB)),$(OLD_EMITTERS))
# Compiles in two thirds of the time, but later XLA does not know the flag.
OLD_EMITTERS := --xla_cpu_use_fusion_emitters=false
JAXLIB = $(shell $(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)')
PYTEST = OMP_NUM_THREADS=1 XLA_FLAGS="$(ONE_CORE) $(1) $(XLA_FLAGS)" \
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# $(call find_python,AT_LEAST,CANDIDATES) prints the first that runs, is new enough and can make a
# virtual environment: a name on PATH may be a shim for a Python that is not there.
find_python = for python in $(2); do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < $(1))' 2>/dev/null \
	&& echo "$$python" && break; done
PYENV = $(wildcard $(HOME)/.pyenv/versions/3.$(1).*/bin/python3)

demo: .venv/installed
	$(BIN)/python examples/char_lm.py --mixer hla2 $(ARGS)

test: .venv/installed
	$(call PYTEST,$(QUICK))

test-slow: .venv/installed
	$(call PYTEST) -m "slow or compiled"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python examples/benchmarks/speed.py $(ARGS)

docs: .venv/installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# The suite on the newest Python that is here and the newest versions of everything else.
test-newest: BIN := .venv-newest/bin
test-newest:
	@python=$$($(call find_python,(3, 12),python3.13 $(call PYENV,13) python3.12 $(call PYENV,12) python3)); \
	if [ -z "$$python" ]; then echo "test-newest: no Python 3.12 or newer here, nothing to run"; exit 0; fi; \
	echo "test-newest: $$($$python --version)"; \
	"$$python" -m venv --clear .venv-newest && \
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable ".[test]" && \
	$(BIN)/python -m pip list 2>/dev/null | grep -E '^(jax|flax|numpy|optax) ' && \
	$(call PYTEST,$(QUICK))

# Compiles the kernels for TPUs and GPUs, of which none need be here.
test-kernels: BIN := .venv-kernels/bin
test-kernels:
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then echo "test-kernels: the compilers run on Linux x86_64 only, nothing to run"; exit 0; fi; \
	$(MAKE) --no-print-directory .venv-kernels/installed && $(call PYTEST) -m kernels tests/kernels

# Versions that go together; jax for Python 3.11 is too old for what the GPU kernels are held to.
# NVIDIA's ptxas is that of CUDA, or else from pip.
LIBTPU := libtpu==0.0.52
CUDA := jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
.venv-kernels/installed: BIN := .venv-kernels/bin
.venv-kernels/installed: pyproject.toml Makefile
	@python=$$($(call find_python,(3, 11),python3.13 $(call PYENV,13) python3.12 $(call PYENV,12) python3 python3.11 $(call PYENV,11))); \
	echo "making .venv-kernels with $$("$$python" --version)"; "$$python" -m venv --clear .venv-kernels
	@install="$(BIN)/python -m pip install --quiet"; \
	if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	$$install --editable ".[test]" jax==0.12.0.1 $(LIBTPU) && $$install --no-deps $(CUDA) && \
	{ [ -x /usr/local/cuda/bin/ptxas ] || $$install nvidia-cuda-nvcc==13.0.88; }; \
	else $$install --editable ".[test]" jax==0.10.2 $(LIBTPU); fi
	@touch $@

.venv/installed: pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
	python=$$($(call find_python,(3, 11),python3 python3.13 python3.12 python3.11 $(call PYENV,13) $(call PYENV,12) $(call PYENV,11))); \
	if [ -z "$$python" ]; then echo "hla_jax needs Python 3.11 or newer with its venv module, and found none" >&2; exit 1; fi; \
	echo "making .venv with $$($$python --version)"; "$$python" -m venv .venv; fi
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-kernels build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
