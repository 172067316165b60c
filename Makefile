# The two commands: `make demo` and `make test`. Both make .venv first; Python 3.11+, git and make are all they need.
#
#   PYTHON=/path/to/python3.12   which Python makes .venv (default: python3, or the newest that is new enough)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu   where pip finds a torch without CUDA (default: pip's own index)

SHELL := /bin/sh
PY := .venv/bin/python
STAMP := .venv/.installed
PACKAGES := tandem router engine prefill_worker decode_worker worker kvtransfer pools deploy bench
QUICK := not slow and not ray

# Tests stay on this machine's loopback, and do not fight for its cores.
TEST_ENV := RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_USAGE_STATS_ENABLED=0 GLOO_SOCKET_IFNAME=lo UCX_NET_DEVICES=lo \
	OMP_NUM_THREADS=1

export PYTHON TORCH_INDEX

.DEFAULT_GOAL := help
.PHONY: help install demo test test-marked lint proto clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## make .venv with the pinned dependencies
$(STAMP): pyproject.toml constraints.txt deploy/install.sh
	@sh deploy/install.sh
	@touch $@

demo: $(STAMP)  ## fetch a small chat model, start a cluster, ask it something, stop it
	@$(PY) -m deploy.demo

test: $(STAMP)  ## the quick suite, a process per core
	@$(TEST_ENV) $(PY) -m pytest -q -n auto -m "$(QUICK)"

test-marked: $(STAMP)  ## the slow suite, and the one that starts Ray
	@$(TEST_ENV) $(PY) -m pytest -q -m "not ($(QUICK))" || { code=$$?; \
		test $$code -eq 5 && echo "no test is marked slow or ray" || exit $$code; }

lint: $(STAMP)  ## format, style, types, layers, protobuf
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy $(PACKAGES)
	.venv/bin/lint-imports
	cd proto && ../.venv/bin/buf lint

proto: $(STAMP)  ## regenerate tandem/v1 from proto/
	$(PY) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/tandem/v1/*.proto

clean:  ## remove .venv and everything that was generated
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
