# shellcheck shell=bash
# Make .venv once and put it on the PATH. The two commands of the README source this file.
# .venv gets what training needs, and with environment_extra=dev also what the tests need.
# A torch that is already on the machine (2.11 or newer) is used. Otherwise torch is installed.
set -euo pipefail
wanted=${environment_extra:-}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "megatron_packed needs Python 3.10 or newer; $python is $("$python" -V 2>&1). Set PYTHON=/path/to/a/newer/python." >&2
  exit 2
}

has_torch='import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'
stamp=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open("setup.cfg", "rb").read() + sys.version.encode()).hexdigest()[:16])')

case "$(cat .venv/.stamp 2>/dev/null)" in
  "$stamp dev") missing= ;;
  "$stamp") missing=$wanted ;;
  *) missing=all; rm -rf .venv ;;
esac
if [ -n "$missing" ]; then
  torch=()
  if [ "$missing" = dev ]; then
    echo "Installing the tools of the tests into .venv ..."
  elif "$python" -c "$has_torch" 2>/dev/null; then
    echo "Installing into .venv, with the torch of $python ..."
    "$python" -m venv --system-site-packages .venv
    # If $python belongs to a virtual environment, .venv sees only packages of the base Python: add those of that environment.
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
      > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
  else
    echo "Installing torch and what training needs into .venv (about a minute; needs 1.2 GB of disk) ..."
    "$python" -m venv .venv || {
      echo "Python's venv module is not complete; install it (Debian, Ubuntu: apt-get install python3-venv)." >&2
      exit 2
    }
    torch=(torch==2.13.0)
  fi
  # Tests import few of the installed modules, and Python compiles a module at its first import.
  "$python" .ci/install.py .venv/bin/python "${torch[@]}" ${wanted:+--no-compile} --editable ".${wanted:+[$wanted]}"
  if [ ! -e .venv/bin/torchrun ]; then  # torch from an outer environment installs no torchrun in .venv
    # shellcheck disable=SC2016 # the written script expands $0
    printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n' > .venv/bin/torchrun
    chmod +x .venv/bin/torchrun
  fi
  echo "$stamp${wanted:+ $wanted}" > .venv/.stamp
fi
export PATH="$root/.venv/bin:$PATH"
export TOKENIZERS_PARALLELISM=false
