mkdir -p -- {{logs}}
{{place}}
{{setup}}
set -m
group=
trap 'kill -TERM -- "-$group"' TERM INT
(exec -- {{launcher}}) &
group=$!
while wait "$group"; code=$?; kill -0 "$group" 2>/dev/null; do :; done
exit "$code"
