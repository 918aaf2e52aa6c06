# make demo, make test: everything else they need (a virtual environment, the packages) they set up themselves.
# Assumed: Python 3.10+ (another one: make PYTHON=python3.12 ...) and Java 17+.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCHMARKS ?= $(wildcard benchmarks/[a-z]*.py)

BIN := $(VENV)/bin
# Named after what was installed, so it is up to date exactly as long as that has not changed.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)

.PHONY: help
help:
	@echo "make demo    a real elastic training on this machine that loses a worker half-way"
	@echo "make test    all tests (PYTEST_ARGS='tests/unit -k sampler' for some of them)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   all benchmarks, minutes each; see benchmarks/README.md"
	@echo "make notebooks    run examples/notebooks and write what they show into their .ipynb twins"
	@echo "make dist    wheel and sdist"
	@echo "make clean   remove what these made"

.PHONY: demo
demo: java $(STAMP)
	@$(BIN)/python examples/demo.py

.PHONY: test
test: java $(STAMP)
	$(BIN)/python $(if $(PYTEST_ARGS),-m pytest $(PYTEST_ARGS),scripts/run_tests.py)

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: bench
bench: java $(STAMP)
	@for benchmark in $(BENCHMARKS); do echo; echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

.PHONY: notebooks
notebooks: java $(STAMP)
	$(BIN)/python scripts/notebooks.py

.PHONY: dist
dist: $(STAMP)
	$(BIN)/python -m build

.PHONY: venv
venv: $(STAMP)

$(STAMP):
	@sh scripts/make_venv.sh "$(PYTHON)" "$(VENV)" "$(STAMP)"

.PHONY: java
java:
	@sh scripts/check_java.sh

.PHONY: clean
clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
