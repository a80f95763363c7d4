# Everything sets itself up in .venv; nothing but Python 3.11+, make and the package registries is needed.
# Another interpreter: make test PYTHON=python3.12
# The CPU build of torch, gigabytes smaller: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
OLDEST_ASE := 3.26.0

# One thread per process: with several processes on a few cores more threads only get in each other's way.
export OMP_NUM_THREADS := 1

.PHONY: help relax test test-slow ase-suite hosts package chromium espresso lint types contracts docs format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make relax      set up (minutes, once: torch is downloaded), then relax examples/alloy.cif beside BFGS (seconds)"
	@echo "make test       set up, then run all tests (newest and oldest supported ASE)"
	@echo "make ase-suite  run ASE's own tests with Relaxer in place of seven optimizers (about a minute)"
	@echo "make hosts      run the examples of six host packages in environments of their own (docs/hosts.md)"
	@echo "make package    wheel and sdist into build/dist, checked, and tried in an empty environment"
	@echo "make chromium   install Debian's Chromium for the tests of the pages; without it they are skipped"
	@echo "make espresso   install Debian's Quantum ESPRESSO for benchmarks/dft and a test; without it that is skipped"
	@echo "make lint types contracts    ruff, pyright, import-linter"
	@echo "make docs       the documentation site into build/site, every link checked"
	@echo "make bench      the speed and force-call tables of benchmarks/"
	@echo "make format     let ruff rewrite the code"
	@echo "make clean      remove .venv and caches"

relax: $(VENV)/.core
	@echo "2 s of processor time on one core of an AMD EPYC:"
	$(BIN)/relaxion relax examples/alloy.cif --policy auto --compare BFGS,FIRE --out relaxed --force

# both halves always run; a failure in either is the exit code
test: $(VENV)/.dev $(VENV)/ase-$(OLDEST_ASE)
	@newest=0; oldest=0; \
	$(BIN)/python -m pytest -n 2 || newest=$$?; \
	PYTHONPATH=$(VENV)/ase-$(OLDEST_ASE) RELAXION_EXPECTED_ASE=3.26 $(BIN)/python -m pytest -n 2 \
		tests/contracts/test_relaxer.py tests/contracts/test_ase_targets.py tests/contracts/test_potentials.py || oldest=$$?; \
	echo "exit codes: newest ASE $$newest, ASE $(OLDEST_ASE) $$oldest"; \
	[ $$newest -ne 0 ] && exit $$newest; exit $$oldest

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

ase-suite: $(VENV)/.dev
	$(BIN)/python tools/ase_suite.py

# two environments in build/hosts, more than 1 GB each; every step is bounded in time
hosts:
	$(PYTHON) tools/hosts.py

# a minute or two: the environment is really empty
package: $(VENV)/.dev
	$(BIN)/python tools/check_package.py

# only for benchmarks/dft and one test; pw.x and its pseudopotentials
espresso:
	@command -v pw.x >/dev/null || { \
		run() { if [ "$$(id -u)" = 0 ]; then "$$@"; else sudo "$$@"; fi; }; \
		run apt-get -qq update && run env DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install -y --no-install-recommends quantum-espresso quantum-espresso-data; }

# only for tests/browser; Relaxion itself needs no browser
chromium:
	@command -v chromium >/dev/null || { \
		run() { if [ "$$(id -u)" = 0 ]; then "$$@"; else sudo "$$@"; fi; }; \
		run apt-get -qq update && \
		run env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; }

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/pyright

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tools/check_links.py build/site

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/speed/potentials.py
	$(BIN)/python benchmarks/relaxation/classical.py --check

# torch first and pinned: asked for by another package, pip would take the newest build with gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Relaxion needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) --editable '.[train,dev]'
	@touch $@ $(VENV)/.core

# only ASE itself: the rest of the environment stays as it is
$(VENV)/ase-$(OLDEST_ASE): $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --upgrade --target $@ ase==$(OLDEST_ASE)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
