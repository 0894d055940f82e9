# make train · make test · make bench: each sets up what it needs, in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINT := .cache/lint/bin
# Tests in three processes: those of Slurm and Ray mostly wait.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder
# Ranks share the cores; torchrun would say so on every start.
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-quick test-full test-torch bench lint setup clean help
help:
	@echo "make train   the default job on every GPU, or on two processes of the CPU: set-up, training, held-out accuracy, what to type next"
	@echo "make test    the tests that this machine can run; make test-quick the short ones; make test-full what make test leaves out"
	@echo "make test-torch TORCH=2.15.0   the quick tests on another torch; TESTS=\"tests/dist tests/optim\" for some of them"
	@echo "make bench   side by side with what one would use instead; make lint format, lint and types"

setup: $(READY)

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python %d.%d is too old. HINT: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) from requirements.txt (once, a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $(READY)

train: $(READY)
	@$(BIN)/torchrun --nproc_per_node=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)') train.py

test: $(READY)
	@$(BIN)/python -m pytest tests $(SHARED)

test-quick: $(READY)
	@$(BIN)/python -m pytest tests -m "not slow and not slurm and not ray" $(SHARED)

# What make test leaves out: the other cases of the alike, what is long by itself, and what needs a package of .ci/requirements.txt
# or an S3 server. Tests that bring up a cluster run one by one: three at once on two cores starve each other.
test-full: $(READY)
	@SHARDRUN_FULL=1 $(BIN)/python -m pytest tests -m "(long or needs) and not slurm and not ray" $(SHARED)
	@SHARDRUN_FULL=1 $(BIN)/python -m pytest tests -m "long and (slurm or ray)"

# The same tests on another torch, in an environment of its own. From PyPI it is a CUDA build: 5 GiB, about two minutes.
TORCH ?= 2.15.0
TESTS ?= tests
OTHER := .cache/torch-$(TORCH)

$(OTHER)/.ready: requirements.txt
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@echo "setting up $(OTHER) from requirements.txt with torch $(TORCH) (once, some minutes)"
	@sed 's/^torch==.*/torch==$(TORCH)/; s/^torchvision==.*/torchvision/' requirements.txt > $(OTHER)/requirements.txt
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(OTHER)/requirements.txt
	@touch $@

# First each use of a private name of torch: a failure there explains those that follow.
test-torch: $(OTHER)/.ready
	@$(OTHER)/bin/python -m pytest tests/base/test_torch_private.py
	@$(OTHER)/bin/python -m pytest $(TESTS) -m "not slow and not slurm and not ray" $(SHARED)

bench: $(READY)
	@$(BIN)/python -m bench --short

# Format, lint and types from an environment of their own: what they install is never what a test finds by accident.
lint: $(READY)
	@test -x $(LINT)/python || $(PYTHON) -m venv .cache/lint
	@$(LINT)/python -m pip install --quiet --disable-pip-version-check -r .ci/lint-requirements.txt
	@$(LINT)/ruff format --check . && $(LINT)/ruff check . && $(LINT)/mypy --python-executable $(BIN)/python

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache
