# `make demo`, `make docs`, `make test`, `make lint` and `make bench` need nothing but a Python with venv: the first call
# makes the environment, later ones reuse it until pyproject.toml changes.
#
#   make test PYTHON=python3.12 VENV=.venv312 TESTS=tests/models
#   make test-all TESTS=tests/saving        # slow cases and those that start processes, too
#   make test REQUIREMENTS='jax==0.10.*'    # other versions, when the environment is made

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
REQUIREMENTS ?=
PART ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check -qq
pytest := $(bin)/python -m pytest -q -n 2 --dist worksteal
# What `make test` leaves to `make test-rest`: slow cases and those that start processes, but for a few of each. Cases
# like many others, such as each further architecture, are in `make test-all` alone.
rest := (slow or processes) and not smoke and not exhaustive

.PHONY: demo docs test test-rest test-all lint pre-commit dist bench bench-strategies bench-gpu clean

demo: $(VENV)/.dev
	@$(bin)/python examples/digits.py

# DOCS_ONLINE=1 links the names of JAX and others to their documentation.
docs: $(VENV)/.docs
	@$(bin)/python -m sphinx -q -j auto -W --keep-going docs docs/_build/html

test: $(VENV)/.dev
	@$(pytest) -m "not exhaustive and not ($(rest))" $(TESTS)

# PART=0/6 to PART=5/6: a sixth of the tests, with all of their cases.
test-rest: $(VENV)/.dev
	@$(pytest) -m "$(rest)" $(if $(PART),--part $(PART)) $(TESTS)

test-all: $(VENV)/.docs
	@$(pytest) $(TESTS)

lint: $(VENV)/.dev
	@$(bin)/ruff check --quiet .
	@$(bin)/mypy --no-error-summary -p trainer
	@$(bin)/python -m pytest -q tests/project/test_architecture.py tests/project/test_measures.py

pre-commit: $(VENV)/.dev
	@$(pip) install pre-commit
	@$(bin)/pre-commit install

# What a release publishes, checked.
dist: $(VENV)/.dev
	@rm -rf dist
	@$(bin)/python -m build -q --outdir dist
	@$(bin)/python -m twine check --strict dist/*
	@$(bin)/check-wheel-contents dist/*.whl

bench: $(VENV)/.bench
	@$(bin)/python benchmarks/run.py
	@$(bin)/python benchmarks/sessions.py

bench-strategies: $(VENV)/.bench
	@$(bin)/python benchmarks/strategies.py --rounds 5
	@$(bin)/python benchmarks/compile_time.py --rounds 3

# GPU_ARGUMENTS: stages, or --tiny for a dry run. JAX for CUDA is installed where there is a GPU that JAX does not see.
GPU_ARGUMENTS ?=
CUDA ?= cuda12
jax_version = $$($(bin)/python -c 'from importlib import metadata; print(metadata.version("jax"))')
sees_gpu = $(bin)/python -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")'

bench-gpu: $(VENV)/.bench
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU' && ! $(sees_gpu) 2>/dev/null; then \
		$(pip) install "jax[$(CUDA)]==$(jax_version)"; fi
	@$(bin)/python benchmarks/bench_gpu.py $(GPU_ARGUMENTS)

clean:
	@rm -rf $(VENV) build dist docs/_build docs/generated .mypy_cache .pytest_cache .ruff_cache *.egg-info

$(VENV)/.dev: pyproject.toml
	@$(PYTHON) -m venv $(VENV)
	@$(pip) install --editable '.[dev]' $(if $(REQUIREMENTS),'$(REQUIREMENTS)')
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@$(pip) install --editable '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(pip) install --editable '.[bench,tensorboard,plot]'
	@$(pip) install --retries 0 --index-url https://download.pytorch.org/whl/cpu torch && $(pip) install lightning || \
		echo "PyTorch, PyTorch, compiled, Lightning: skipped, as there is no CPU-only wheel of torch here"
	@touch $@
