# Makes a virtual environment with everything a purpose needs. Sourced by ./tpu and ./test, which
# set $here to their folder.
# Quick when nothing changed since the last time.

root=$(cd "$here" && pwd)
venv="${TPUFLEET_VENV:-$root/.venv}"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "tpufleet needs Python 3.11 or newer, and none was found."
    say "On Debian or Ubuntu: apt-get install python3 python3-venv. Or set PYTHON to one."
    exit 1
}

make_venv() {
    "$python" -m venv "$venv" >"$log" 2>&1 && return
    # Debian ships Python without the part that makes virtual environments.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "   installing python$version-venv"
        { apt-get update && apt-get install -y "python$version-venv"; } >>"$log" 2>&1
        rm -rf "$venv"
        "$python" -m venv "$venv" >>"$log" 2>&1 && return
    fi
    rm -rf "$venv"
    say "No virtual environment could be made. On Debian or Ubuntu run"
    say "   sudo apt-get install python3-venv"
    say "and try again. What Python said:"
    tail -n 5 "$log" >&2
    exit 1
}

# Runs a long command, and shows the last line of what it says.
watch() {
    "$@" >>"$log" 2>&1 &
    child=$!
    trap 'kill $child 2>/dev/null; rm -f "$log"; exit 130' INT TERM
    while kill -0 $child 2>/dev/null; do
        line=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-70)
        if [ -t 2 ]; then
            printf '\r   %-72s' "$line" >&2
        elif [ "$line" != "${shown:-}" ]; then
            shown=$line
            say "   $line"
        fi
        sleep 1
    done
    [ -t 2 ] && printf '\r%-76s\r' '' >&2
    trap - INT TERM
    if ! wait $child; then
        say "That failed. The end of what it said:"
        tail -n 20 "$log" >&2
        rm -f "$log"
        exit 1
    fi
}

# install ARGUMENT...: with uv, which is several times as fast as pip; with pip where it cannot be had.
install() {
    if [ -z "${uv:-}" ]; then
        uv=$(command -v uv || echo "$venv/bin/uv")
        [ -x "$uv" ] || watch "$venv/bin/python" -m pip install --progress-bar off \
            --disable-pip-version-check --no-input --no-deps --require-hashes -r "$root/requirements/uv.txt"
    fi
    watch "$uv" pip install --python "$venv/bin/python" --no-config --no-deps "$@"
}

# environment PURPOSE: all of requirements/PURPOSE.txt, and the distributions of this workspace.
environment() {
    requirements="$root/requirements/$1.txt"
    stamp="$venv/.ready-$1"
    wanted=$(cat "$root"/packages/*/pyproject.toml "$requirements" | cksum)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    python=$(find_python) || exit 1
    log=$(mktemp)
    say "Setting up tpufleet in $venv (once)"
    [ -x "$venv/bin/python" ] || make_venv
    install --require-hashes -r "$requirements"
    set --
    for package in "$root"/packages/*; do
        set -- "$@" -e "$package"
    done
    install "$@"
    rm -f "$log"
    printf '%s' "$wanted" >"$stamp"
    say "Ready."
}
