#!/bin/sh
# The peers' environment for compare.py: setup.sh UV FOLDER. What Debian has is installed only by root; without it, compare.py
# says what it could not run.
set -eu
uv=$1 folder=$2 here=$(dirname "$0")
for package in fio libibverbs1; do
    dpkg -s "$package" >/dev/null 2>&1 || apt-get install -y --no-install-recommends "$package" \
        || echo "$package is not installed: what needs it is left out" >&2
done
test -x "$folder/bin/python" || "$uv" venv --quiet --python 3.11 "$folder"
"$uv" pip install --quiet --python "$folder/bin/python" -r "$here/requirements.txt"
# Its metadata asks for torch and CUDA of another version, which it does not import.
"$uv" pip install --quiet --python "$folder/bin/python" --no-deps nixl-cu12==1.5.1
