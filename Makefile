# One command each: `make demo` trains for real on two ranks, `make test` passes the tests,
# `make check` is all that CI runs. Everything lives in .venv, made on first use.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --editable
TREE := headway tests examples benchmarks docs
RUNTIME_TESTS := tests/runtime tests/data tests/precision tests/strategies \
	tests/distributed/test_*_with_ranks.py tests/distributed/test_smoke.py
FOLDERS := headway launcher commands config_wizard tests examples benchmarks docs

# or each of the processes that the tests start compiles all of Headway anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test other-pythons bare quick test-long lowest check format lint types docs pictures release clean

demo: $(VENV)/.demo
	$(BIN)/headway launch --cpu --num-processes 2 examples/digits.py

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder $(COVERAGE)

other-pythons: $(VENV)/.test
	$(BIN)/python tests/other_pythons.py

# the wheel without extras in an empty environment, and with each extra alone
bare: $(VENV)/.test
	$(BIN)/python tests/bare_install.py

# no processes: for the loop of daily work
quick: $(VENV)/.test
	$(BIN)/python -m pytest --quick --quiet --numprocesses 2

# the runtime's tests with the lowest torch that pyproject.toml declares; a download of some GB
lowest: $(VENV)-lowest/.test
	$(VENV)-lowest/bin/python -m pytest $(RUNTIME_TESTS)

test-long: $(VENV)/.test
	$(BIN)/python -m pytest --long
	$(BIN)/python tests/other_pythons.py --whole

# coverage does not see into ranks, which are processes of their own
check: COVERAGE := --cov
check: $(VENV)/.check format lint types test other-pythons bare

format: $(VENV)/.check
	$(BIN)/ruff format --check $(FOLDERS)

lint: $(VENV)/.check
	$(BIN)/ruff check $(FOLDERS)

types: $(VENV)/.check
	$(BIN)/mypy $(TREE)

# in namespaces of its own: no other run, folder or name of this machine is in them
pictures: $(VENV)/.test
	$(BIN)/python -m docs.conversation
	unshare -rmun sh -c 'hostname laptop && ip link set lo up && mount -t tmpfs none /tmp && \
		exec $(BIN)/python -m docs.watched'

# builds, tries the wheel in a fresh environment (torch is downloaded), uploads nothing
release: $(VENV)/.test
	.ci/release $(BIN)/python

# what is read needs no network; the search needs a server: python -m http.server --directory site
docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[demo]' --constraint constraints.txt
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[docs]' --constraint constraints.txt
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[test]' --constraint constraints.txt
	touch $@ $(VENV)/.demo $(VENV)/.docs

$(VENV)/.check: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[test,lint]' --constraint constraints.txt
	touch $@ $(VENV)/.test $(VENV)/.demo $(VENV)/.docs

$(VENV)-lowest/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --editable '.[test]' \
		"torch==$$(sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml).*"
	touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Headway needs Python 3.10 or newer, and none was found" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .venv-3.* build dist site headway.egg-info .mypy_cache .pytest_cache .ruff_cache
