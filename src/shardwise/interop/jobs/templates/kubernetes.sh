mkdir -p -- {{logs}}
{{place}}
{{setup}}
set -m
group=
trap 'passed=yes; kill -TERM -- "-$group"' TERM INT
(exec -- {{launcher}}) &
group=$!
# A signal ends `wait`, too.
while passed=; wait "$group"; code=$?; [[ $passed ]]; do :; done
exit "$code"
