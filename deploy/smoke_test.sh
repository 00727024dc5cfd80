#!/usr/bin/env bash
# Asks a running chain everything a newcomer would, and Jaeger for the trace. Ends with an error at the first thing that is wrong.
#   docker compose up --build --wait && deploy/smoke_test.sh        (PORT and JAEGER_PORT as for compose)
set -euo pipefail
url=http://127.0.0.1:${PORT:-8000}
jaeger=http://127.0.0.1:${JAEGER_PORT:-16686}
trace=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
ask() { curl -sf "$@" -H 'content-type: application/json' -H "traceparent: 00-$trace-00f067aa0ba902b7-01"; }

curl -sf "$url/health" && echo
curl -sf "$url/v1/models" && echo
ask -N "$url/v1/chat/completions" -d '{"messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
  "stream": true, "max_tokens": 40}' | grep -q '^data: \[DONE\]' && echo "a stream, to its end"
ask "$url/v1/chat/completions" -d '{"messages": [{"role": "user", "content": "写一首关于秋天的五言绝句。"}]}' && echo
for _ in $(seq 20); do
  services=$(curl -sf "$jaeger/api/traces/$trace" | grep -o '"serviceName": *"[a-z]*"' | sort -u | tr -d ' \n' || true)
  if [[ $services == *executor*gateway*scheduler*tokenizer* ]]; then
    echo "one trace over all four processes"
    exit 0
  fi
  sleep 1
done
echo "the trace $trace does not show all four processes: ${services:-nothing}" >&2
exit 1
