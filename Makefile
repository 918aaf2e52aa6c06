# make demo, make test: everything else they need (a virtual environment, the packages) they set up themselves.
# Assumed: Python 3.10+ (another one: make PYTHON=python3.12 ...) and Java 17+.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
ROWS ?=
MATRIX_ARGS ?=
# before_after.py needs another checkout, gpu_steps.py a GPU; peer_*.py are parts of others
BENCHMARKS ?= $(filter-out benchmarks/before_after.py benchmarks/gpu_steps.py benchmarks/peer_%,$(wildcard benchmarks/[a-z]*.py))

BIN := $(VENV)/bin
# Named after what was installed, so they are up to date exactly as long as that has not changed.
SUM := $(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
STAMP := $(VENV)/.installed-$(SUM)
# The demo needs a part of it.
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo-$(SUM))

.PHONY: help
help:
	@echo "make demo    a real elastic training on this machine that loses a worker half-way"
	@echo "make test    the tests that a change has to pass (PYTEST_ARGS='tests/unit -k sampler' for some of them)"
	@echo "make test-all    these and the tests that are marked nightly"
	@echo "make lint    ruff and mypy"
	@echo "make bench   all benchmarks, minutes each; see benchmarks/README.md"
	@echo "make chaos   storms of faults over real trainings, five minutes; see docs/reliability.md"
	@echo "make gpu-check    on a machine with a GPU: its tests and figures, eight minutes; no Spark, no Java, PYTHON with torch"
	@echo "make notebooks    run examples/notebooks and write what they show into their .ipynb twins"
	@echo "make site    the documentation as a site, in build/site; it needs no internet"
	@echo "make diagrams    draw the diagrams of the pages anew, after a change of one (npm, chromium)"
	@echo "make dist    wheel and sdist"
	@echo "make release-check    build both, and train with the wheel in an empty environment"
	@echo "make test-matrix  with other versions of Spark, Python, pandas ... (ROWS='spark35 pandas3' for some rows)"
	@echo "make clean   remove what these made"

.PHONY: demo
demo: java $(DEMO_STAMP)
	@$(BIN)/python examples/demo.py

.PHONY: test
test: java $(STAMP)
	$(if $(PYTEST_ARGS),$(BIN)/python -m pytest $(PYTEST_ARGS),sh scripts/run_tests.sh $(BIN)/python)

.PHONY: test-all
test-all: java $(STAMP)
	$(if $(PYTEST_ARGS),$(BIN)/python -m pytest --nightly $(PYTEST_ARGS),sh scripts/run_tests.sh $(BIN)/python --nightly)

# Needs no virtual environment but those that it makes, in build/matrix.
.PHONY: test-matrix
test-matrix: java
	$(PYTHON) scripts/test_matrix.py $(ROWS) $(MATRIX_ARGS)

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: bench
bench: java $(STAMP)
	@for benchmark in $(BENCHMARKS); do echo; echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

.PHONY: chaos
chaos: java $(STAMP)
	$(BIN)/python -m tests.storms.chaos --short --results build/chaos

# With the Python that has a CUDA build of torch, and pytest; GPU_CHECK=cpu shows whether the programs run.
GPU_CHECK ?= cuda
.PHONY: gpu-check
gpu-check:
	SPARK_ELASTIC_GPU_CHECK=$(GPU_CHECK) $(PYTHON) -m pytest -p no:cacheprovider --noconftest -c /dev/null --rootdir . \
		-W ignore -q -s tests/gpu
	$(PYTHON) benchmarks/gpu_steps.py --device $(GPU_CHECK) --results build/gpu/steps.json

.PHONY: notebooks
notebooks: java $(STAMP)
	$(BIN)/python scripts/notebooks.py

.PHONY: site
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "With its search: $(BIN)/python -m http.server --directory build/site, then http://localhost:8000"

.PHONY: diagrams
diagrams: $(STAMP)
	$(BIN)/python scripts/website/diagrams.py

.PHONY: release-check
release-check: java $(STAMP)
	$(BIN)/python scripts/release_check.py

.PHONY: dist
dist: $(STAMP)
	$(BIN)/python -m build

.PHONY: venv
venv: $(STAMP)

$(STAMP):
	@sh scripts/make_venv.sh "$(PYTHON)" "$(VENV)" "$(STAMP)" '.[spark,dev]' tensorflow-cpu keras

$(VENV)/.installed-demo-$(SUM):
	@sh scripts/make_venv.sh "$(PYTHON)" "$(VENV)" "$(DEMO_STAMP)" '.[spark]' scikit-learn

.PHONY: java
java:
	@sh scripts/check_java.sh

.PHONY: clean
clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
