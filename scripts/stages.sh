# shellcheck shell=bash disable=SC2154  # the next lines list the variables that the caller sets
# Sourced by scripts that run in stages; needs $output, the folder of the whole run, $fresh, and fail() of options.sh.
# It sets $devices, the accelerators of this machine (0 on a CPU); the script sets $processes.
# A stage's folder is $output/NAME, its log $output/logs/NAME.log, its stamp $output/stages/NAME:
# the seconds it took, and a digest of its command, which may hold keys.
# A folder that the script created has the file .made-by with the script's name: no other folder is ever removed.

devices=$(python -c '
from deepspeed.accelerator import get_accelerator
name = get_accelerator().device_name()
print(name, 0 if name == "cpu" else get_accelerator().device_count())' 2>/dev/null | tail -n 1) \
    || fail 'DeepSpeed does not work here; see why: python -c "import deepspeed"'
read -r DS_ACCELERATOR devices <<<"$devices"
export DS_ACCELERATOR # detected once, instead of in every process with a warning

earlier_ran=0
mark=$(basename "$0")

is_ours() { [[ -f $1/.made-by && $(<"$1/.made-by") == "$mark" ]]; }
is_free() { [[ ! -e $1 && ! -L $1 ]] || [[ -d $1 && -z $(ls -A -- "$1") ]]; }
make_ours() { mkdir -p -- "$1" && echo "$mark" >"$1/.made-by"; }

# check_ours PATH: exit if PATH exists and was not created by this script.
check_ours() {
    is_free "$1" || is_ours "$1" || fail "$1 was not made by this script, which would replace it: move it away, or name \
another --output (output of earlier versions has no .made-by file: remove it by hand)"
}

# begin_stages NAME...: check the folders of these stages; with --fresh, remove those that this script created.
begin_stages() {
    local name
    mkdir -p -- "$output" || fail "--output $output: cannot be created; name another folder"
    output=$(cd -- "$output" && pwd) # normalised: the digests in the stamps depend on the path
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

# stage NAME COMMAND...: skipped if it finished before with the same command and no earlier stage was run again.
stage() {
    local name=$1 stamp=$output/stages/$1 started=$SECONDS command
    shift
    command=$(printf '%s\0' "$@" | sha256sum)
    if ((!earlier_ran)) && [[ -f $stamp && $(tail -n +2 "$stamp") == "$command" ]]; then
        echo "== $name: already done, in $(head -n 1 "$stamp") s"
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
    printf '%s\n' "$((SECONDS - started))" "$command" >"$stamp"
}

# step NAME FLAG...: training/NAME/main.py under deepspeed on $processes processes, at a free port, so
# that two pipelines can run on one machine.
step() {
    local port
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    deepspeed --quiet --num_accelerators "$processes" --master_port "$port" "training/$1/main.py" "${@:2}"
}
