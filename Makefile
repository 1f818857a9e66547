# `make demo`, `make test`, `make lint` and `make bench` need nothing but a Python with venv: the first call makes the
# environment, later ones reuse it until pyproject.toml changes.
#
#   make test PYTHON=python3.12 VENV=.venv312 TESTS=tests/test_models.py

PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check -qq

.PHONY: demo test lint bench bench-strategies clean

demo: $(VENV)/.dev
	@$(bin)/python examples/digits.py

test: $(VENV)/.dev
	@$(bin)/python -m pytest -q -n 2 --dist worksteal $(TESTS)

lint: $(VENV)/.dev
	@$(bin)/ruff check --quiet .
	@$(bin)/mypy --no-error-summary -p trainer
	@$(bin)/python -m pytest -q tests/project/test_architecture.py

bench: $(VENV)/.bench
	@$(bin)/python benchmarks/run.py

bench-strategies: $(VENV)/.bench
	@$(bin)/python benchmarks/strategies.py --rounds 5
	@$(bin)/python benchmarks/compile_time.py --rounds 3

clean:
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache *.egg-info

$(VENV)/.dev: pyproject.toml
	@$(PYTHON) -m venv $(VENV)
	@$(pip) install --editable '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(pip) install --editable '.[bench,tensorboard,plot]'
	@touch $@
