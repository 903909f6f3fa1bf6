#!/bin/sh
# Run a command on every host of a TPU slice, in the directory and virtual environment of the checkout:
#
#     scripts/tpu_slice.sh my-slice us-east5-b 'python train.py \
#         --config=configs/paper.py:6.7b,bias=kerple,processor=dape,kernel=3 \
#         --config.data.path=gs://BUCKET/arxiv --workdir=gs://BUCKET/runs/dape1x3-kerple'
#     scripts/tpu_slice.sh my-slice us-east5-b 'pkill -TERM -f "[t]rain.py"'       # save and stop
#
# CHECKOUT is the directory of the checkout on the hosts, by default ~/dape_jax.
set -eu
usage="usage: $0 SLICE ZONE COMMAND"
slice=${1:?"$usage"}
zone=${2:?"$usage"}
command=${3:?"$usage"}

exec gcloud compute tpus tpu-vm ssh "$slice" --zone="$zone" --worker=all \
    --command="cd ${CHECKOUT:-~/dape_jax} && . .venv/bin/activate && $command"
