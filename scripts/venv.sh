# Sourced by the other scripts, which stand in the repository's root.

# Prints a Python that is new enough and has a way to make environments.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "localllm needs Python 3.11 or newer; found none on the PATH" >&2
    return 1
}

# ensure_venv NAME REQUIREMENT...: brings .venv to where the requirements of that name are
# installed. Does nothing when they are and neither pyproject.toml nor the place has changed.
# A run that was interrupted leaves .venv/.incomplete behind: the next one starts afresh.
ensure_venv() {
    local stamp=.venv/.installed-$1 wanted
    shift
    wanted="$PWD $* $(cksum < pyproject.toml)"
    if [ ! -e .venv/.incomplete ] && .venv/bin/python -c '' 2>/dev/null; then
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
            return
        fi
    elif [ -e .venv ]; then
        echo "Removing a .venv that is only half made" >&2
        rm -rf .venv
    fi
    mkdir -p .venv
    touch .venv/.incomplete
    if [ ! -x .venv/bin/python ]; then
        make_venv
    fi
    echo "Installing $* into .venv" >&2
    .venv/bin/python -m pip install --disable-pip-version-check "$@" >&2
    echo "$wanted" > "$stamp"
    rm .venv/.incomplete
}

make_venv() {
    local python
    python=$(find_python)
    echo "Making .venv with $python" >&2
    # Some systems ship venv without the pip that it would put in; then pip itself has to.
    "$python" -m venv .venv >/dev/null 2>&1 || {
        "$python" -m venv --without-pip .venv
        "$python" -m pip --python .venv/bin/python install pip >&2
    }
}
