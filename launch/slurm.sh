#!/usr/bin/env bash
#SBATCH --job-name=jaxlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# An example for Slurm: pretraining on several machines with GPUs, one process on each, taken up again when requeued.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/slurm.sh is a batch script: sbatch [Slurm's options] launch/slurm.sh CONFIG --run RUN [--field value ...]

Submitted from the checkout, whose .venv (launch/setup.sh gpu) and RUN all machines see. Two minutes before the time
is over every process gets SIGTERM, saves and ends with 75, and the job is put into the queue again; it goes on there.
TEXT
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
  usage
  exit 0
fi
[ -n "${SLURM_JOB_ID:-}" ] || {
  usage >&2
  echo "error: no Slurm job: submit this script with sbatch" >&2
  exit 2
}
[ -x .venv/bin/python ] || {
  echo "error: no .venv in $PWD: submit from the checkout, after launch/setup.sh gpu" >&2
  exit 2
}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
code=0
# Where one process fails the others end by themselves; Slurm would kill those that end with 75 a moment later.
# shellcheck disable=SC2016  # each process has its own SLURM_PROCID
srun --kill-on-bad-exit=0 bash -c '
  exec .venv/bin/python -m jaxlm.pretrain "$@" --distributed.coordinator '"$first:$port"' \
    --distributed.num-processes "$SLURM_NTASKS" --distributed.process-id "$SLURM_PROCID"
' worker "$@" || code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
