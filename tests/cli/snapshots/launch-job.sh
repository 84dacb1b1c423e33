#!/usr/bin/env bash
# llama-3-8b, layout dp=16,zero=3 on 2 x 8 H100-80GB-SXM
# /data/runs/first is on storage that all nodes share; torchrun starts the ranks of each host.
set -u
hosts=(user@a user@b)
logs=logs
cd /home/user && mkdir -p -- "$logs" || exit 1

# Scripts of one host: before them come its number and the job's name.
start='{
cd /home/user && mkdir -p -- logs || exit 1
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
export GLOO_SOCKET_IFNAME=eth0
export NCCL_SOCKET_IFNAME=eth0
export NCCL_DEBUG=WARN
module load cuda
set -m
(exec -- python3 -m torch.distributed.run \
    --nnodes 2 --nproc-per-node 8 \
    --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$job" --rdzv-endpoint a:29500 \
    --log-dir logs/"$job-$node" --redirects 3 \
    -m shardwise train --device cuda llama-3-8b --layout dp=16,zero=3 --data text.txt --seq 4096 --batch 16 --out /data/runs/first) &
echo "$!" >logs/"$job-$node.pid"
wait "$!"
exit
} </dev/null
'
stop='cd /home/user || exit 1
# Its ranks may not have begun.
for ((second = 0; second < 60; second++)); do
    [[ -s logs/"$job-$node.pid" ]] && break
    sleep 1
done
read -r group <logs/"$job-$node.pid" && kill -TERM -- "-$group"
'

# Run a script on a host.
on() {
    { printf 'node=%s job=%s\n' "$1" "$job"; printf '%s\n' "$2"; } | ssh -o BatchMode=yes "${hosts[$1]}" bash -s
}

# Ranks save and end, then what has started them.
stop_all() {
    local index
    for index in "${!hosts[@]}"; do
        on "$index" "$stop" >/dev/null 2>&1 &
    done
}
stopped=
trap 'stopped=yes; stop_all' INT TERM HUP
# The first host that fails ends all.
trap '[[ $stopped ]] || stop_all' USR1

for ((attempt = 0; attempt <= 0; attempt++)); do
    ((attempt)) && sleep 1
    job=job-$(date +%s)
    pids=()
    for index in "${!hosts[@]}"; do
        {
            on "$index" "$start" >>"$logs/host-$index.log" 2>&1
            ended=$?
            ((ended)) && (set -C; echo "$ended" >"$logs/$job.code") 2>/dev/null && kill -USR1 $$
        } &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    done
    code=0
    [[ -s $logs/$job.code ]] && read -r code <"$logs/$job.code"
    rm -f -- "$logs/$job"-*.pid "$logs/$job.code"
    # 2 is a mistake of the user, which no other attempt mends.
    [[ $stopped || $code -eq 0 || $code -eq 2 ]] && break
done
exit "$code"
