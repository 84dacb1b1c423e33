#!/usr/bin/env bash
# {{title}}
# {{shared}}; {{starter}}.
set -u
hosts=({{hosts}})
logs={{logs}}
cd {{folder}} && mkdir -p -- "$logs" || exit 1

# Scripts of one host: before them come its number and the job's name.
start={{start}}
stop={{stop}}

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

for ((attempt = 0; attempt <= {{attempts}}; attempt++)); do
    ((attempt)) && sleep 1
    job={{name}}-$(date +%s)
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
