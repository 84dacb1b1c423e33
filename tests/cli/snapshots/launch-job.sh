#!/usr/bin/env bash
# llama-3-8b, layout dp=16,zero=3 on 2 x 8 H100-80GB-SXM
# /data/runs/first is on storage that all nodes share; torchrun starts the ranks of each host.
set -u
hosts=(user@a user@b)
logs=logs
cd /home/user && mkdir -p "$logs"
job=job-$(date +%s)

node() {
    cat <<'END'
cd /home/user || exit 1
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=1
export GLOO_SOCKET_IFNAME=eth0
export NCCL_SOCKET_IFNAME=eth0
export NCCL_DEBUG=WARN
# Seconds that ranks get to save after a signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
module load cuda
echo $$ >"logs/$job-$node.pid"
exec python3 -m torch.distributed.run \
    --nnodes 2 --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$job" --rdzv-endpoint a:29500 \
    --log-dir "logs/$job-$node" --redirects 3 \
    -m shardwise train llama-3-8b --layout dp=16,zero=3 --data text.txt --seq 4096 --batch 16 --out /data/runs/first </dev/null
END
}

# Ranks save and end, then their torchrun.
stop() {
    for index in "${!hosts[@]}"; do
        ssh -o BatchMode=yes "${hosts[index]}" "kill -TERM \$(cat /home/user/$logs/$job-$index.pid)" 2>/dev/null &
    done
}
trap 'stopped=yes; stop' INT TERM HUP

stopped=
pids=()
for index in "${!hosts[@]}"; do
    { printf 'node=%s job=%s\n' "$index" "$job"; node; } |
        ssh -o BatchMode=yes "${hosts[index]}" bash -s >>"$logs/host-$index.log" 2>&1 &
    pids+=($!)
done

code=0
for pid in "${pids[@]}"; do
    while wait "$pid"; ended=$?; kill -0 "$pid" 2>/dev/null; do :; done
    if ((ended && !code)); then
        code=$ended
        [[ $stopped ]] || stop
    fi
done
rm -f "$logs/$job"-*.pid
exit "$code"
