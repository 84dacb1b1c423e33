#!/usr/bin/env bash
# {{title}}
# {{shared}}; torchrun starts the ranks of each host.
set -u
hosts=({{hosts}})
logs={{logs}}
cd {{folder}} && mkdir -p "$logs"
job={{name}}-$(date +%s)

node() {
    cat <<'END'
cd {{folder}} || exit 1
{{exports}}
# Seconds that ranks get to save after a signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={{signal}}
{{setup}}
echo $$ >"{{logs}}/$job-$node.pid"
exec {{launcher}} </dev/null
END
}

# Ranks save and end, then their torchrun.
stop() {
    for index in "${!hosts[@]}"; do
        ssh -o BatchMode=yes "${hosts[index]}" "kill -TERM \$(cat {{folder}}/$logs/$job-$index.pid)" 2>/dev/null &
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
