#!/bin/sh
# curl: an answer, a stream, an error, a body that curl announces before it sends it.
#
# sh curl.sh BASE_URL MODEL
set -eu
base_url=$1 model=$2
json='Content-Type: application/json'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

body='{"model": "'$model'", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}'
curl --silent --show-error --fail "$base_url/chat/completions" -H "$json" -d "$body" |
  grep --quiet '"object":"chat.completion"'
echo "answer"

stream='{"model": "'$model'", "prompt": "once", "max_tokens": 5, "stream": true}'
curl --silent --show-error --fail --no-buffer "$base_url/completions" -H "$json" -d "$stream" \
  > "$folder/events"
grep --quiet '^data: {' "$folder/events"
test "$(grep '^data: ' "$folder/events" | tail -n 1 | tr -d '\r')" = 'data: [DONE]'
echo "stream"

# 22 is how curl says that the status was an error; the body says which.
status=0
curl --silent --fail-with-body "$base_url/chat/completions" -H "$json" \
  -d '{"model": "other", "messages": [{"role": "user", "content": "hi"}]}' \
  > "$folder/error" || status=$?
test $status = 22
grep --quiet '"code":"model_not_found"' "$folder/error"
status=0
curl --silent --fail-with-body "$base_url/embeddings" -H "$json" -d '{"input": "hi"}' \
  > "$folder/error" || status=$?
test $status = 22
grep --quiet '"message":' "$folder/error"
echo "errors"

# A large body: curl asks first, and gets "100 Continue".
{
  printf '{"model": "%s", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], "user": "' "$model"
  head -c 60000 /dev/zero | tr '\0' x
  printf '"}'
} > "$folder/body"
curl --silent --show-error --fail --dump-header "$folder/headers" --compressed \
  -H "$json" -H 'Expect: 100-continue' --data-binary "@$folder/body" "$base_url/chat/completions" |
  grep --quiet '"object":"chat.completion"'
grep --quiet '^HTTP/1.1 100' "$folder/headers"
grep --quiet '^HTTP/1.1 200' "$folder/headers"
echo "100-continue"
