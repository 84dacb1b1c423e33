#!/usr/bin/env bash
# {{title}}
# {{shared}}; {{starter}}.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{tasks}}
#SBATCH --chdir={{chdir}}
#SBATCH --output={{job_log}}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{{signal}}
{{directives}}
{{exports}}
{{setup}}
set -u
MASTER_ADDR={{head}}
export MASTER_ADDR
# A run that this job has begun is resumed, also after SLURM has put the job back into the queue.
export TORCHELASTIC_RUN_ID=slurm-$SLURM_JOB_ID TORCHELASTIC_MAX_RESTARTS={{restarts}}
# SLURM 22.05 to 23.02: srun does not read sbatch's --cpus-per-task.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
stopping=

# Every rank saves and ends after the same step.
trap 'stopping=yes; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' USR1

for ((attempt = 0; attempt <= {{restarts}}; attempt++)); do
    export TORCHELASTIC_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + attempt))
    export MASTER_PORT={{port}}
    srun --kill-on-bad-exit=1 --output={{task_log}} --open-mode=append bash -c '
        {{place}}
        exec -- {{run}}' {{task}} {{command}} &
    step=$!
    while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
    if [[ $stopping ]]; then
        {{requeue}}
        exit 0
    fi
    # 2 is a mistake of the user, which no other attempt mends.
    [[ $code -eq 0 || $code -eq 2 ]] && exit "$code"
    # While a node does not answer, no attempt is lost: SLURM puts the job back into the queue once the node is down.
    until timeout 60 srun --quiet --ntasks-per-node=1 true; do sleep 10; done
done
exit "$code"
