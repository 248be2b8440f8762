#!/usr/bin/env bash
#SBATCH --job-name=jaxlm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# Example for Slurm: pretrain on several machines with GPUs, one process on each, and continue after a requeue.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: launch/slurm.sh is a batch script: sbatch [Slurm's options] launch/slurm.sh CONFIG --run RUN [--field value ...]

Submit it from the checkout; all machines must see its .venv (launch/setup.sh gpu) and RUN. Two minutes before the time
limit every process gets SIGTERM, saves and ends with 75; the job is requeued and continues.
TEXT
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
  usage
  exit 0
fi
[ -n "${SLURM_JOB_ID:-}" ] || {
  usage >&2
  echo "error: this is not a Slurm job: submit the script with sbatch" >&2
  exit 2
}
[ -x .venv/bin/python ] || {
  echo "error: $PWD has no .venv: submit from the checkout, after launch/setup.sh gpu" >&2
  exit 2
}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
code=0
# If one process fails the others end by themselves; Slurm would kill those that end with 75 a moment later.
# shellcheck disable=SC2016  # each process has its own SLURM_PROCID
srun --kill-on-bad-exit=0 bash -c '
  exec .venv/bin/python -m jaxlm.pretrain "$@" --distributed.coordinator '"$first:$port"' \
    --distributed.num-processes "$SLURM_NTASKS" --distributed.process-id "$SLURM_PROCID"
' worker "$@" || code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
