# make demo   install, train two small models, evaluate both, say where the picture lies
# make test   install if needed, run the tests
# make lint   formatting, lint, types
# make tpu-aot   the TPUs' compiler, for planning without one (docs/planning.md)

PYTHON ?= python3
PY := .venv/bin/python
# A demo that was started with other recipes, or with another Python (whose library is its text), is left as it is.
DEMO = runs/quickstart-$(shell $(PY) -c 'import platform; print(platform.python_version())')-$(shell cat configs/*.py | cksum | cut -d' ' -f1)

.PHONY: demo test test-all lint install tpu-aot
.DELETE_ON_ERROR:

install: .venv/installed

# Written last, so that an interrupted installation is taken up again; begun anew if its Python is gone.
ifneq ($(shell .venv/bin/python -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null),True)
.PHONY: .venv/installed
endif
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(PY) train.py --config=configs/quickstart.py:processor=none --workdir=$(DEMO)/kerple
	$(PY) train.py --config=configs/quickstart.py:processor=dape,kernel=3 --workdir=$(DEMO)/dape1x3-kerple
	$(PY) eval.py --workdir=$(DEMO)/kerple,$(DEMO)/dape1x3-kerple

# Apart from the environment: where JAX finds it, every command on a machine without a TPU looks for one and complains.
tpu-aot: .venv/tpu-aot/installed

.venv/tpu-aot/installed: constraints.txt | install
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --constraint constraints.txt \
		--target .venv/tpu-aot libtpu
	touch $@

test: install
	$(PY) -m pytest -n auto --dist worksteal -m 'not slow'

test-all: install
	$(PY) -m pytest -n auto --dist worksteal

lint: install
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
