# `make help` lists the targets. The first run makes .venv; PYTHON=python3.12 chooses
# the interpreter for it (after `make clean` where .venv is there already).
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Each process begins with its part of the files: a cluster that tests share starts once.
# One more than two cores have work for: some tests wait, for processes that they started.
PROCESSES := --numprocesses 3 --dist worksteal
# `make test-next` installs over the bounds of pyproject.toml, in a place of its own.
NEXT_VENV := .next
NEXT_PY := $(NEXT_VENV)/bin/python
NEXT_TESTS := tests/_private tests/cpu tests/engine tests/keras tests/strategies
# The CUDA compiler is 5 GB: so does `make test-cuda`.
CUDA_VENV := .cuda
# KerasHub and keras-tcn need TensorFlow: so does `make test-packages`.
PACKAGES_VENV := .packages
PACKAGES := keras-hub keras-rs keras-tuner bayesflow HGQ2 scikeras keras-tcn tensorflow-cpu
# Keras' nightly lies in a folder of its own, before Keras on the path: 10 MB, and nothing
# else is installed twice.
NIGHTLY := .nightly
NIGHTLY_PY := PYTHONPATH="$(CURDIR)/$(NIGHTLY)" KERAS_BACKEND=jax $(PY)
NIGHTLY_TESTS := $(NEXT_TESTS)
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --editable
# replicax and the distributions that stand on it, from this checkout.
SATELLITES := --editable packages/estimator --editable packages/migrate

TF_PY := ../.bench/tensorflow/bin/python
# Not benchmarks/results, whose tables are there already: nothing would be measured.
BENCH := ../.bench/results
# A table that is there is not measured again, as with --resume.
bench_table = cd benchmarks && { [ -s $(BENCH)/$(1).md ] || { ../$(PY) $(2) \
  >$(BENCH)/$(1).part && mv $(BENCH)/$(1).part $(BENCH)/$(1).md; }; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: bench demo docs release soak test test-all test-cuda test-gpu test-next test-nightly \
  test-packages \
  lint lint-types lint-rest format clean help

demo: $(VENV)/.demo ## train on the digits data with two replicas; draws digits_mirrored.png
	$(PY) examples/digits_mirrored.py --replicas 2

test: lint ## all checks, and the tests that are not slow
	$(PY) -m pytest $(PROCESSES) -m "not slow"

test-all: test ## all checks and all tests; the slow ones are compiled as for users
	XLA_FLAGS="$$XLA_FLAGS" $(PY) -m pytest $(PROCESSES) -m slow

test-next: ## Keras and strategies on other versions: NEXT="jax==0.11.2 jaxlib==0.11.2"
	@test -n '$(NEXT)' || { echo 'Say what to test: make test-next NEXT="keras==3.15.0"' \
	  '(versions, wheels or folders of sources)' >&2; exit 1; }
	@$(MAKE) --no-print-directory VENV=$(NEXT_VENV) $(NEXT_VENV)/.test
	$(NEXT_PY) -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall $(NEXT)
	@$(NEXT_PY) -c 'from importlib.metadata import version as v; \
	  print(*(f"{n} {v(n)}" for n in ("keras", "jax", "jaxlib", "numpy")), sep=", ")'
	$(NEXT_PY) -m pytest $(PROCESSES) -m "not slow" $(NEXT_TESTS)

test-nightly: $(VENV)/.test ## the same on the newest Keras nightly, before it is a release
	rm -rf $(NIGHTLY)
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps --pre --target $(NIGHTLY) keras-nightly
	@$(NIGHTLY_PY) -c 'import keras; print("keras-nightly", keras.__version__)'
	$(NIGHTLY_PY) -m pytest $(PROCESSES) -m "not slow" $(NIGHTLY_TESTS)

test-cuda: ## every strategy's steps, compiled for GPUs that need not be here; takes 5 GB
	@$(MAKE) --no-print-directory VENV=$(CUDA_VENV) $(CUDA_VENV)/.cuda
	JAX_PLATFORMS=cpu $(CUDA_VENV)/bin/python -m pytest $(PROCESSES) tests/cuda

test-packages: ## KerasHub, BayesFlow and other packages under strategies; takes 3 GB
	@$(MAKE) --no-print-directory VENV=$(PACKAGES_VENV) $(PACKAGES_VENV)/.packages
	$(PACKAGES_VENV)/bin/python -m pytest $(PROCESSES) tests/packages

test-gpu: $(VENV)/.test ## trains on the GPUs of this machine under each strategy; takes 5 GB
	$(PIP_INSTALL) '.[test,cuda]' $(SATELLITES)
	JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false \
	  $(PY) -m pytest -n 6 --dist worksteal tests/gpu

bench: $(VENV)/.test ## beside other libraries, into .bench/results; takes four hours
	cd benchmarks && ../$(PY) -m bench --output $(BENCH) --peers ../.bench --resume
	$(call bench_table,first_steps,first_steps.py)
	$(call bench_table,growth,growth.py --largest 1000 --picture $(BENCH)/growth.png)
	$(call bench_table,parameter_servers,parameter_servers.py --peer-python $(TF_PY))
	$(call bench_table,parameter_servers_cnn,parameter_servers.py --model cnn --steps 100 --peer-python $(TF_PY))

soak: $(VENV)/.test ## long trainings whose processes are killed; takes half an hour
	$(PY) benchmarks/soak.py

docs: $(VENV)/.docs ## the site, into site/; fails on broken links
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

release: $(VENV)/.test ## wheels that are built and tried on all Pythons; uploads nothing
	$(PIP_INSTALL) '.[release]'
	$(PY) scripts/release.py

# Types take as long as all the rest: beside it. Either one's failure is lint's.
lint: $(VENV)/.test ## style, types, layers, spelling and file sizes; changes nothing
	@$(MAKE) --no-print-directory lint-types & types=$$!; \
	  $(MAKE) --no-print-directory lint-rest; rest=$$?; wait $$types && exit $$rest

lint-types: $(VENV)/.test
	$(PY) -m pyright

lint-rest: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	git ls-files -z | xargs -0 $(PY) -m codespell_lib
	$(PY) scripts/check_sizes.py

format: $(VENV)/.test ## format the code, and mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv, caches, builds and the demo's pictures
	rm -rf $(VENV) $(NEXT_VENV) $(NIGHTLY) $(CUDA_VENV) $(PACKAGES_VENV) build dist site .hypothesis .pytest_cache .ruff_cache digits_*.png
	find src packages tests examples scripts -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 12

# Stamps: a second run installs nothing, a change of pyproject.toml installs again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "replicax needs Python 3.11 or newer; '$(PYTHON)' is:" \
	    "$$($(PYTHON) --version 2>&1 | head -n 1)" \
	    "- name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml packages/estimator/pyproject.toml packages/migrate/pyproject.toml
	@echo 'Installing replicax into $(VENV); the first time takes a minute or two.'
	$(PIP_INSTALL) '.[examples]' $(SATELLITES)
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml packages/estimator/pyproject.toml packages/migrate/pyproject.toml
	@echo 'Installing replicax into $(VENV); the first time takes a minute or two.'
	$(PIP_INSTALL) '.[docs]' $(SATELLITES)
	@touch $@

$(VENV)/.cuda: $(VENV)/.made pyproject.toml packages/estimator/pyproject.toml packages/migrate/pyproject.toml
	@echo 'Installing replicax and the CUDA compiler into $(VENV): 5 GB.'
	$(PIP_INSTALL) '.[test,plan-cuda]' $(SATELLITES)
	@touch $@

$(VENV)/.packages: $(VENV)/.test
	@echo 'Installing KerasHub, BayesFlow and other packages into $(VENV): 3 GB.'
	$(PY) -m pip install -qq --disable-pip-version-check $(PACKAGES)
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml packages/estimator/pyproject.toml packages/migrate/pyproject.toml
	@echo 'Installing replicax into $(VENV); the first time takes a minute or two.'
	$(PIP_INSTALL) '.[test]' $(SATELLITES)
	@touch $@
