# The two commands that set everything up: `make demo` and `make test`.
#   make test ARGS="tests/test_values.py -k chunk"    more arguments for pytest
#   make test TORCH=2.14.1                            the same with another torch, in its own environment
PYTHON ?= python3
TORCH ?=
ARGS ?=

VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin

# One thread for each of the two test workers; Inductor compiles in the worker itself instead of in a pool of its own.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.PHONY: demo test

demo: $(VENV)/installed
	$(BIN)/python examples/01_quickstart.py $(ARGS)

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 $(ARGS)

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	cp constraints.txt $(VENV)/constraints.txt
else
	sed -e '/^triton==/d' -e 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
endif
	$(BIN)/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@
