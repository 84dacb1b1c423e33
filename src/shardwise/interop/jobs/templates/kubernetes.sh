set -u
mkdir -p {{logs}}
{{setup}}
exec {{launcher}}
