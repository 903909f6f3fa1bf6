#!/bin/bash
# Train on several nodes with one process per GPU; SLURM restarts the job until training is complete:
#
#     sbatch --nodes=2 scripts/slurm.sh --config=configs/paper.py:2.7b,bias=kerple,processor=dape,kernel=3 \
#         --config.data.path=data/arxiv --workdir=runs/arxiv/dape1x3-kerple
#
# Data and workdir must be on a file system that all nodes share. Two minutes before the time limit, and when the job is
# preempted, SLURM sends SIGTERM, and the run saves a checkpoint.
#SBATCH --job-name=dape_jax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Every task must see all GPUs of its node: it uses the one with its local number. Hence no --gpus-per-task.
srun --label python train.py "$@"
status=$?

# 143, 138: stopped by SIGTERM, SIGUSR1. 134, 137: a process died, and the runtime ended the others.
case $status in
143 | 138 | 134 | 137) [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $status
