#!/usr/bin/env bash
# {{title}}
# {{shared}}; srun starts the ranks, one task each.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{ranks}}
#SBATCH --chdir={{folder}}
#SBATCH --output={{logs}}/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{{signal}}
{{directives}}
set -u
{{exports}}
{{setup}}
MASTER_ADDR={{head}}
export MASTER_ADDR WORLD_SIZE={{world}} LOCAL_WORLD_SIZE={{ranks}}
# A run that this job has begun is resumed, also after SLURM has put the job back into the queue.
export TORCHELASTIC_RUN_ID=slurm-$SLURM_JOB_ID TORCHELASTIC_MAX_RESTARTS={{restarts}}
run={{out}}
stopping=

# Every rank saves and ends after the same step.
trap 'stopping=yes; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' USR1

for ((attempt = 0; attempt <= {{restarts}}; attempt++)); do
    export TORCHELASTIC_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + attempt))
    export MASTER_PORT={{port}}
    srun --kill-on-bad-exit=1 --output={{logs}}/rank-%t.log --open-mode=append bash -c '
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
        exec "$@"' rank {{container}}{{command}} &
    step=$!
    while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
    if [[ $stopping ]]; then
        if [[ "{{requeue}}" ]] && ! grep -q '"status": "finished"' "$run/run.json"; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
        exit 0
    fi
    # 2 is a mistake of the user, which no other attempt mends.
    [[ $code -eq 0 || $code -eq 2 ]] && exit "$code"
    # While a node does not answer, no attempt is lost: SLURM puts the job back into the queue once the node is down.
    until timeout 60 srun --quiet --ntasks-per-node=1 true; do sleep 10; done
done
exit "$code"
