#!/bin/sh
# Train the quickstart's model in two CPU processes with two devices each:
#
#     scripts/two_processes.sh runs/two --config.train.num_steps=100
#
# Kill one of them to see what the other does; the same command resumes.
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
    while kill -0 "$process" 2>/dev/null; do wait "$process" || status=$?; done # a SIGTERM interrupts `wait`
done
exit $status
