# shellcheck shell=bash disable=SC2154  # what others set stands in the next lines
# Sourced by scripts that run in stages; needs $output, the folder of the whole run, $fresh, and fail() of options.sh.
# It sets $devices, the accelerators of this machine (0 on a CPU); the script sets $processes.
# A stage's folder is $output/NAME, its log $output/logs/NAME.log, its stamp (seconds, then command) $output/stages/NAME.
# A folder that is ours holds the file .made-by with the script's name: nothing else is ever removed.

devices=$(python -c '
from deepspeed.accelerator import get_accelerator
name = get_accelerator().device_name()
print(name, 0 if name == "cpu" else get_accelerator().device_count())' 2>/dev/null | tail -n 1) \
    || fail 'DeepSpeed does not work here; see why: python -c "import deepspeed"'
read -r DS_ACCELERATOR devices <<<"$devices"
export DS_ACCELERATOR # found once, not by every process with a warning

earlier_ran=0
mark=$(basename "$0")

is_ours() { [[ -f $1/.made-by && $(<"$1/.made-by") == "$mark" ]]; }
is_free() { [[ ! -e $1 && ! -L $1 ]] || [[ -d $1 && -z $(ls -A -- "$1") ]]; }
make_ours() { mkdir -p -- "$1" && echo "$mark" >"$1/.made-by"; }

# check_ours PATH: leave if something is there that this script has not made.
check_ours() {
    is_free "$1" || is_ours "$1" || fail "$1 was not made by this script, which would replace it: move it away, or name \
another --output (earlier versions left no mark: what they made has to be removed by hand)"
}

# begin_stages NAME...: the stages to come. Nothing of others may be in their places; with --fresh, ours is removed.
begin_stages() {
    local name
    mkdir -p -- "$output" || fail "--output $output: cannot be made; name another folder"
    output=$(cd -- "$output" && pwd) # one spelling: stamps hold it
    for name in stages logs "$@"; do
        check_ours "$output/$name"
    done
    for name in summary.json report.html; do
        [[ ! -e $output/$name ]] || is_ours "$output/stages" || fail "$output/$name was not made by this script, which \
would replace it: move it away, or name another --output"
    done
    if ((fresh)); then
        for name in stages logs "$@"; do
            rm -rf -- "${output:?}/$name"
        done
        rm -f -- "$output"/{summary.json,report.html}
    fi
    make_ours "$output/stages"
    make_ours "$output/logs"
}

# stage NAME COMMAND...: skipped if it finished before with the same command and no stage before it ran anew.
stage() {
    local name=$1 stamp=$output/stages/$1 started=$SECONDS
    shift
    if ((!earlier_ran)) && [[ -f $stamp && $(tail -n +2 "$stamp") == "$*" ]]; then
        echo "== $name: done before, in $(head -n 1 "$stamp") s"
        return
    fi
    earlier_ran=1
    echo "== $name"
    check_ours "$output/$name"
    rm -rf -- "$stamp" "${output:?}/$name"
    make_ours "$output/$name"
    if ! "$@" 2>&1 | tee "$output/logs/$name.log"; then
        echo "$name failed; its log is $output/logs/$name.log" >&2
        exit 1
    fi
    printf '%s\n' "$((SECONDS - started))" "$*" >"$stamp"
}

# step NAME FLAG...: training/NAME/main.py under deepspeed on $processes processes, at a port that is free now, so
# that two pipelines can run on one machine.
step() {
    local port
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    deepspeed --quiet --num_accelerators "$processes" --master_port "$port" "training/$1/main.py" "${@:2}"
}
