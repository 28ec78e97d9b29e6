# Sourced by the other scripts. `use_venv EXTRAS` creates or reuses .venv and installs the package with those extras.
# PYTHON selects the interpreter (default python3).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

use_venv() {
    local extras=$1 pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt)
    [[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
    # The marker holds the checksum of all files that affect the installation; if unchanged, there is nothing to do.
    local mark=.venv/installed-${extras//,/-} sum
    sum=$(cat pyproject.toml constraints.txt setup.py pennyweight/kernels/cpu/src/* | cksum)
    if [[ ! -f $mark || $(<"$mark") != "$sum" ]]; then
        echo "installing pennyweight[$extras] into .venv" >&2
        "${pip[@]}" torch  # first and pinned, so that no later package installs another build of it
        "${pip[@]}" -e ".[$extras]"
        echo "$sum" >"$mark"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
