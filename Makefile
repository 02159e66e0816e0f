# Two commands for everybody: `make demo` and `make test`. Both work from a bare clone; all that
# they need beyond Python 3.11, git and make is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m

.PHONY: demo test lint validate bench chaos clean install-systemd

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hrxmp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]'
	@test "$$(uname -m)" = x86_64 || deploy/pocl.sh
	touch $@

demo: $(VENV)/ready
	$(BIN)/hrxmp-run devices
	$(BIN)/hrxmp-run --trace --cache .demo-store bench -m $(MODEL) -p 0 -n 0 -pg 64,16 -b 64 -ub 64 -r 2 --no-warmup --progress
	rm -rf .demo-store
	$(BIN)/hrxmp-run generate -m $(MODEL) -p 'The capital of France is' -n 32 --temp 0

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n auto --dist loadfile

validate: $(VENV)/ready
	$(BIN)/python -m tests.validate

chaos: $(VENV)/ready
	$(BIN)/python -m tests.chaos

bench: $(VENV)/ready
	$(BIN)/python benchmarks/compare.py --write

install-systemd:
	BINDIR="$(BINDIR)" deploy/install.sh "$(DESTDIR)"

clean:
	rm -rf $(VENV) .demo-store build *.egg-info
