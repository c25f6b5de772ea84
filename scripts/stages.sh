# Sourced by scripts that run in stages; needs $output, the folder of the whole run, and $processes.
# It sets $devices, the accelerators of this machine (0 on a CPU).
# A stage's folder is $output/NAME, its log $output/logs/NAME.log, its stamp (seconds, then command) $output/stages/NAME.

read -r DS_ACCELERATOR devices < <(python -c '
from deepspeed.accelerator import get_accelerator
name = get_accelerator().device_name()
print(name, 0 if name == "cpu" else get_accelerator().device_count())' 2>/dev/null | tail -n 1)
export DS_ACCELERATOR # found once, not by every process with a warning

earlier_ran=0

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
    mkdir -p "$output/stages" "$output/logs"
    rm -rf "$stamp" "${output:?}/$name"
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
