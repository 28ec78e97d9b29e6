# Sourced by the other scripts. `use_venv EXTRAS` creates or reuses .venv and installs the package with those extras.
# PYTHON selects the interpreter (default python3).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Runs pip -v and shows what a reader waits for: each package as it comes, and each compiled unit of the kernels.
_install() {
    local log
    log=$(mktemp)
    if ! .venv/bin/python -m pip install -v --disable-pip-version-check -c constraints.txt "$@" 2>&1 | tee "$log" |
        sed -un 's/^ *\(pennyweight: .*\)/  \1/p; s/^ *Collecting \([^ ]*\).*/  \1/p; s/^ *Downloading .*\/\([^/]*whl.*\)/  \1/p; s/^ *Installing collected packages.*/  unpacking/p' >&2
    then
        tail -40 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

use_venv() {
    local extras=$1
    [[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
    # Markers hold the checksum of all files that affect the installation; if unchanged, there is nothing to do. The first
    # set of extras builds the package, others add their dependencies to it.
    local built=.venv/installed extra missing="" sum
    sum=$(cat pyproject.toml adapters/torchao/pyproject.toml constraints.txt setup.py pennyweight/kernels/cpu/src/* | cksum)
    for extra in ${extras//,/ }; do
        [[ -f .venv/installed-$extra && $(<".venv/installed-$extra") == "$sum" ]] || missing+="${missing:+,}$extra"
    done
    if [[ -n $missing ]]; then
        if [[ ! -f $built || $(<"$built") != "$sum" ]]; then
            echo "$(date +%T)  1/2  torch, into .venv, and 18 units of C++ at the same time (minutes on 2 processors)" >&2
            _install "setuptools>=77"
            # The compiler needs no other package. pip's build of the package waits for it, and takes its objects.
            .venv/bin/python setup.py -q build_ext --build-lib build/lib >&2 &
            local compiler=$!
            trap "kill $compiler 2>/dev/null" EXIT  # after an error or Ctrl-C, which a background process does not get
            _install torch  # first and pinned, so that no later package installs another build of it
            echo "$(date +%T)  2/2  pennyweight[$missing] and its dependencies" >&2
            _install -e ".[$missing]" -e adapters/torchao
            wait "$compiler" || true  # its errors are those of pip's build
            trap - EXIT
            echo "$sum" >"$built"
        else
            echo "$(date +%T)  dependencies of pennyweight[$missing]" >&2
            _install "pennyweight[$missing]"
        fi
        echo "$(date +%T)  installed" >&2
        for extra in ${missing//,/ }; do echo "$sum" >".venv/installed-$extra"; done
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

# Installs packages of constraints.txt whose own requirements are not needed.
add_without_dependencies() {
    local name
    for name in "$@"; do
        [[ -d $(echo .venv/lib/python*/site-packages)/${name//-/_} ]] || _install --no-deps "$name"
    done
}
