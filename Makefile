# make train · make test · make bench: each sets up .venv on first use. make help lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINT := .cache/lint/bin
# Tests run in four processes: most of them wait for processes of their own, those of Slurm and Ray the longest.
BY_FILE := --dist loadfile --no-loadscope-reorder
SHARED := -n 4 $(BY_FILE)
APART := --ignore=tests/walks
# Ranks share the cores. Without this torchrun warns at every start.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes, and each would compile the product's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-quick test-full test-torch walks bench gpu lint setup clean help
help:
	@echo "make setup         .venv from requirements.txt"
	@echo "make train         the default job on every GPU, or on two CPU processes; prints accuracy and next commands"
	@echo "make test          the tests that this machine can run"
	@echo "make test-quick    without Slurm, Ray and slow tests"
	@echo "make test-full     what make test leaves out; PART=2/6 for the second sixth of its long tests"
	@echo "make walks         a person's first hour with the commands of README and docs alone: a fine-tuner, a researcher, Slurm, Ray"
	@echo "make test-torch    TORCH=2.15.0: the quick tests on another torch; TESTS=\"tests/distributed tests/optim\" for some of them"
	@echo "make lint          format, lint and types"
	@echo "make bench         short benchmarks beside other tools; bench/results has the full ones"
	@echo "make gpu           the product's claims on one CUDA device, in ten minutes; ONLY=resume,saves for some of them, DEVICE=cpu without a GPU"
	@echo "make clean         removes .venv and caches"

setup: $(READY)

# Compiling every file took pip 31 of 66 s, in one process. Python compiles those that it imports.
$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python %d.%d is too old. HINT: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) from requirements.txt (once, a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || { \
	  echo "torch is of another build than torchvision: $(VENV) has torchvision without its own operators (nms, roi_align, read_image)"; \
	  site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'); \
	  cp fsdp/__init__.py $$site/torchvision_operators.py && echo import torchvision_operators >$$site/torchvision_operators.pth; }
	@touch $(READY)

train: $(READY)
	@$(BIN)/torchrun --nproc_per_node=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)') train.py

test: $(READY)
	@$(BIN)/python -m pytest tests $(APART) $(SHARED)

test-quick: $(READY)
	@$(BIN)/python -m pytest tests -m "not slow and not slurm and not ray" $(SHARED)

# What make test leaves out: the remaining similar cases, long tests, and tests that need a package of
# .ci/requirements.txt or an S3 server. Tests that start a cluster run in two processes: three at once overload two cores.
PART ?=
test-full: $(READY)
	@SHARDRUN_FULL=1 SHARDRUN_PART=$(PART) $(BIN)/python -m pytest tests $(APART) -m "(long or needs) and not slurm and not ray" $(SHARED)
	@SHARDRUN_FULL=1 SHARDRUN_PART=$(PART) $(BIN)/python -m pytest tests $(APART) -m "long and (slurm or ray)" -n 2 $(BY_FILE)
	@SHARDRUN_FULL=1 SHARDRUN_PART=$(PART) $(BIN)/python -m pytest tests/walks -m long || [ $$? = 5 ] # 5: none in this part

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
walks: $(READY)
	@$(BIN)/python -m pytest tests/walks $(SHARED)

test-torch: $(OTHER)/.ready
	@SHARDRUN_FULL=1 $(OTHER)/bin/python -m pytest tests/base/test_torch_private.py
	@$(OTHER)/bin/python -m pytest $(TESTS) -m "not slow and not slurm and not ray" $(SHARED)

bench: $(READY)
	@$(BIN)/python -m bench --short

# Installs nothing, for machines without a network: .venv if it is set up, else PYTHON with its torch.
DEVICE ?= cuda
gpu:
	@$$(test -f $(READY) && echo $(BIN)/python || echo $(PYTHON)) -m bench.gpu --run.device $(DEVICE) --only "$(ONLY)"

# Format, lint and types in an environment of their own, so that tests never import their packages by accident.
lint: $(READY)
	@test -x $(LINT)/python || $(PYTHON) -m venv .cache/lint
	@$(LINT)/python -m pip install --quiet --disable-pip-version-check -r .ci/lint-requirements.txt
	@$(LINT)/ruff format --check . && $(LINT)/ruff check . && $(LINT)/mypy --python-executable $(BIN)/python

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache
