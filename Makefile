PYTHON ?= python3.11
BIN := .venv/bin

# `make prove NAME` is short for `make prove NAME=name`.
ifeq ($(firstword $(MAKECMDGOALS)),prove)
NAME ?= $(word 2,$(MAKECMDGOALS))
ifneq ($(word 2,$(MAKECMDGOALS)),)
$(eval $(word 2,$(MAKECMDGOALS)):;@:)
endif
endif

.PHONY: demo test lint bench prove clean

demo: .venv/installed
	$(BIN)/planaria demo

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python -m benchmarks all

prove: .venv/installed
	PLANARIA_PROVE=1 $(BIN)/python -m pytest --timeout=3600 $(if $(NAME),-k '$(NAME)')

# The stamp is written last, so that an interrupted install is made again and a finished one costs nothing.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
