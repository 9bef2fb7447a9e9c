# shellcheck shell=bash
# Make .venv once and put it on the PATH. The two commands of the README source this file.
# A torch that is already on the machine (2.11 or newer) is used. Otherwise torch is installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "megatron_packed needs Python 3.10 or newer; $python is $("$python" -V 2>&1). Set PYTHON=/path/to/a/newer/python." >&2
  exit 2
}

has_torch='import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'
stamp=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open("setup.cfg", "rb").read() + sys.version.encode()).hexdigest()[:16])')

if [ "$(cat .venv/.stamp 2>/dev/null)" != "$stamp" ]; then
  rm -rf .venv
  if "$python" -c "$has_torch" 2>/dev/null; then
    "$python" -m venv --system-site-packages .venv
    # If $python belongs to a virtual environment, .venv sees only packages of the base Python: add those of that environment.
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
      > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    torch=()
  else
    "$python" -m venv .venv || {
      echo "Python's venv module is not complete; install it (Debian, Ubuntu: apt-get install python3-venv)." >&2
      exit 2
    }
    torch=(torch==2.13.0)
  fi
  echo "Installing into .venv (about a minute) ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "${torch[@]}" --editable '.[dev]'
  if [ ! -e .venv/bin/torchrun ]; then  # torch from an outer environment installs no torchrun in .venv
    # shellcheck disable=SC2016 # the written script expands $0
    printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n' > .venv/bin/torchrun
    chmod +x .venv/bin/torchrun
  fi
  echo "$stamp" > .venv/.stamp
fi
export PATH="$root/.venv/bin:$PATH"
export TOKENIZERS_PARALLELISM=false
