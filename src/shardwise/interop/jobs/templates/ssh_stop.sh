cd {{folder}} || exit 1
# Its ranks may not have begun.
for ((second = 0; second < 60; second++)); do
    [[ -s {{logs}}/"$job-$node.pid" ]] && break
    sleep 1
done
read -r group <{{logs}}/"$job-$node.pid" && kill -TERM -- "-$group"
