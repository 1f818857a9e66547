#!/bin/bash
# Two machines with four GPUs each, under SLURM: sbatch slurm.sh
# The cluster is found in what srun tells each task. TF_CONFIG must not be set: it would count instead.
#SBATCH --job-name=train
#SBATCH --nodes=2
# One task for each GPU: JAX gives a task the device of its number on the machine (SLURM_LOCALID), and no other.
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=04:00:00
# SIGTERM to all tasks, not to this script, 60 s before the end: time for BackupAndRestore to save.
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append

max_restarts=10

# Process 0 listens here. From the job's number, so that two jobs on one machine do not meet.
export JAX_COORDINATOR_PORT=$((20000 + SLURM_JOB_ID % 10000))

code=0
srun --kill-on-bad-exit=1 python train.py || code=$? # the highest code of all tasks

case $code in
  75 | 143) # lost a peer; preempted and saved
    # srun may give 143 for tasks that it ended since another one failed: hence the limit.
    if ((${SLURM_RESTART_COUNT:-0} < max_restarts)); then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code" # any other code, such as 2 for a refused configuration, ends the job
