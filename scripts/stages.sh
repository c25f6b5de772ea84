# Sourced by scripts that run in stages; needs $output, the folder of the whole run, and $processes.
# A stage's folder is $output/NAME, its log $output/logs/NAME.log, its stamp (seconds, then command) $output/stages/NAME.

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
    deepspeed --num_accelerators "$processes" --master_port "$port" "training/$1/main.py" "${@:2}"
}
