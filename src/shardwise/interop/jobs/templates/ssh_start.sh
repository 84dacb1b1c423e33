{
cd {{folder}} && mkdir -p -- {{logs}} || exit 1
{{exports}}
{{place}}
{{setup}}
set -m
(exec -- {{launcher}}) &
echo "$!" >{{logs}}/"$job-$node.pid"
wait "$!"
exit
} </dev/null
