# Sourced by ./quickstart and ./test: makes .venv from nothing but Python and a package index.
#
# The environment is reused while its stamp (a hash of what it was installed from) matches. An install
# that was interrupted leaves a marker, and the next call builds the environment anew.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"
INSTALL_SECONDS=0
TORCH_VERSION=2.13.0

die() { echo "$PROGRAM: error: $*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${MAPD_PYTHON:-python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  die "Python 3.11 not found (3.12 will do; name another interpreter with MAPD_PYTHON)"
}

# What the environment depends on. The folder counts too: a virtual environment can't be moved.
stamp() {
  { cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "${BASH_SOURCE[0]}"
    echo "$ROOT"; "$VENV/bin/python" -V; } 2>&1 | cksum
}

pip_install() {
  "$PYTHON" -m pip install --disable-pip-version-check --no-input --no-compile -c "$ROOT/constraints.txt" "$@" \
    >>"$VENV/install.log" 2>&1 && return 0
  echo "$PROGRAM: pip install $* failed; the end of $VENV/install.log:" >&2
  tail -n 5 "$VENV/install.log" >&2
  exit 2
}

install_environment() {
  local begin=$SECONDS base
  if [ -e "$VENV/.mapd-installing" ] || { [ -e "$VENV" ] && ! "$PYTHON" -c '' 2>/dev/null; }; then
    echo "$PROGRAM: $VENV is broken or its install was interrupted; building it anew"
    rm -rf "$VENV"
  fi
  if [ "$(cat "$VENV/.mapd-stamp" 2>/dev/null)" = "$(stamp)" ]; then
    return 0
  fi
  if [ ! -e "$VENV" ]; then
    base="$(find_python)" || exit 2
    "$base" -m venv "$VENV" >/dev/null 2>&1 || die "$base can't make a virtual environment (Debian: install python3-venv), or the disk is full"
  fi
  echo "$PROGRAM: installing into $VENV (log: $VENV/install.log)"
  touch "$VENV/.mapd-installing"
  : >"$VENV/install.log"
  # torch first and alone: asked for by name with its version, so that no later resolution can pull another build.
  pip_install "torch==$TORCH_VERSION"
  pip_install -e "$ROOT[cpu,retrieval,synthesis,dev]"
  # pip compiles on one core; this uses all. Some packages ship templates that are no valid Python: not our fault.
  "$PYTHON" -m compileall -q -j 0 "$VENV/lib" >/dev/null 2>&1 || true
  "$PYTHON" -m pip check >>"$VENV/install.log" 2>&1 || die "the installed packages contradict each other; see $VENV/install.log"
  stamp >"$VENV/.mapd-stamp"
  rm -f "$VENV/.mapd-installing"
  INSTALL_SECONDS=$((SECONDS - begin))
  echo "$PROGRAM: installed in $INSTALL_SECONDS s"
}

# Two commands started at once in one folder must not install over each other.
ensure_environment() {
  if command -v flock >/dev/null; then
    exec 9>"$ROOT/.venv.lock" || die "can't write to $ROOT"
    flock 9
    install_environment
    exec 9>&-
  else
    install_environment
  fi
}
