#!/bin/sh
# Two processes of two devices each, here on the CPU, train the quickstart's model together:
#
#     scripts/two_processes.sh runs/two --config.train.num_steps=100
#
# Kill one of them, with any signal, and see what the other does; the same command goes on.
set -eu
workdir=${1:?"usage: $0 WORKDIR [flags of train.py]"}
shift

export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2
together="--coordinator=localhost:${PORT:-12321} --num_processes=2"
python train.py $together --process_id=0 --config=configs/quickstart.py --workdir="$workdir" "$@" &
first=$!
python train.py $together --process_id=1 --config=configs/quickstart.py --workdir="$workdir" "$@" &
second=$!
trap 'kill $first $second 2>/dev/null' TERM
status=0
for process in $first $second; do
    while kill -0 "$process" 2>/dev/null; do wait "$process" || status=$?; done # again if a SIGTERM has cut it short
done
exit $status
