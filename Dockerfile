# Image in which train.py, eval.py and dape_jax's modules run, with the versions in constraints.txt:
#
#     docker build --build-arg EXTRAS=tpu,gcs --tag dape_jax .      # EXTRAS: comma-separated extras of pyproject.toml
#     docker run --rm --init dape_jax python train.py --config=configs/quickstart.py --workdir=/tmp/run
#
# --init is needed because Python as process 1 would ignore a second SIGTERM.
ARG BASE=python:3.12-slim
FROM ${BASE}

# The user is root: libtpu opens device files that other users may not be allowed to open, and xpk starts containers as
# privileged. Outputs go to a bucket or a mounted directory.

ARG EXTRAS=
WORKDIR /app

# Without buffering, the last lines before a kill reach the logs.
ENV PYTHONUNBUFFERED=1

# Dependencies come from pyproject.toml alone. The package is installed as an editable stub that has only its version, so
# that a change of the source invalidates only the last layer. jax[tpu] pins libtpu itself: the version in
# constraints.txt is for planning.
COPY pyproject.toml constraints.txt LICENSE ./
COPY dape_jax/version.py dape_jax/
RUN sed --in-place '/^libtpu==/d' constraints.txt \
    && touch README.md dape_jax/__init__.py \
    && pip install --no-cache-dir --constraint constraints.txt --editable ".${EXTRAS:+[$EXTRAS]}"

COPY . .
