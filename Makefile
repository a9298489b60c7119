# Two commands do everything on a machine with Python >= 3.10: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-slow test-all setup lint types format notebooks bench clean

demo: setup  ## set up, then teach the bundled backbone three tasks and write demo/index.html
	$(BIN)/vit-memory demo

test: lint types  ## set up, then lint, types, tests
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: $(VENV)/.notebooks $(VENV)/.browser $(VENV)/.ray  ## the slow evidence alone: compilers, notebooks, the page in a browser, Ray
	$(BIN)/pytest -n 2 -m slow

test-all: test test-slow  ## everything

setup: $(VENV)/.ready

# timm, torchvision and peft come without their dependencies: resolving those would replace torch with another build.
$(VENV)/.ready: pyproject.toml constraints.txt scripts/dev/torchvision_beside_cpu_torch.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[transformers,datasets,fast,distributed,tensorboard,serve,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps timm torchvision peft
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  && cp scripts/dev/torchvision_beside_cpu_torch.py "$$site/" \
	  && echo 'import torchvision_beside_cpu_torch' > "$$site/torchvision_beside_cpu_torch.pth"
	touch $@

# Jupyter's parts are forty packages, so they are installed where they are needed: here and for the slow tests.
$(VENV)/.notebooks: $(VENV)/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[notebooks]'
	touch $@

# The page of the server is tested in Chromium, where one is installed.
$(VENV)/.browser: $(VENV)/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[browser]'
	touch $@

# Ray brings thirty packages; with the constraints it replaces none of those above, torch least of all.
$(VENV)/.ray: $(VENV)/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[ray]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup  ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.notebooks  ## execute the notebooks of examples/notebooks and write their outputs into them
	$(BIN)/python scripts/run_notebooks.py

bench: setup  ## the inference benchmark
	$(BIN)/python -m benchmarks.inference --json out.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
