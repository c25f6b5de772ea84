# shellcheck shell=bash disable=SC2034  # other scripts read these variables
# Sourced by scripts with options, as `source options.sh "$@"`. It needs usage(), and reads these arrays:
#   option    option → default. only an option with the default "" may be empty
#   least     option → smallest value, for integers (decimal: 08 is 8)
#   choices   option → allowed values
#   switches  switch → 0; set to 1 if given
# It sets $fresh (--fresh) and $output, the absolute path of ${option[output]}; and fail(), whole_number(). Every mistake
# is one message and exit status 2; no files are created.

fail() { echo "$(basename "$0" .sh): $1" >&2; exit 2; }

# whole_number NAME VALUE LEAST: the decimal number as $REPLY.
whole_number() {
    [[ $2 =~ ^[0-9]{1,9}$ ]] || fail "$1 $2: must be a whole number (of at most 9 digits)"
    REPLY=$((10#$2))
    ((REPLY >= $3)) || fail "$1 $2: must be at least $3"
}

unset CDPATH # it changes the target of cd
fresh=0
declare -p least >/dev/null 2>&1 || declare -A least=()
declare -p choices >/dev/null 2>&1 || declare -A choices=()
declare -p switches >/dev/null 2>&1 || declare -A switches=()

while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
    esac
    if [[ $1 == --fresh ]]; then
        fresh=1
        shift
        continue
    fi
    [[ $1 =~ ^--([a-z_]+)$ ]] || fail "unknown option '$1' (--help lists them)"
    name=${BASH_REMATCH[1]}
    if [[ -n ${switches[$name]+known} ]]; then
        switches[$name]=1
        shift
        continue
    fi
    [[ -n ${option[$name]+known} ]] || fail "unknown option '$1' (--help lists them)"
    (($# > 1)) || fail "$1 needs a value"
    [[ -n $2 || $name == *_flags ]] || fail "$1 needs a value that is not empty"
    [[ $2 != -* || $name == *_flags ]] || fail "$1 $2: needs a value (write ./$2 for a path that begins with a dash)"
    [[ $2 != *$'\n'* ]] || fail "$1: its value has a line break; remove it"
    option["$name"]=$2
    shift 2
done

for name in "${!least[@]}"; do
    [[ -n ${option[$name]} ]] || continue
    whole_number "--$name" "${option[$name]}" "${least[$name]}"
    option["$name"]=$REPLY
done
for name in "${!choices[@]}"; do
    [[ " ${choices[$name]} " == *" ${option[$name]} "* ]] || fail "--$name ${option[$name]}: choose from ${choices[$name]}"
done

output=${option[output]}
[[ $output == /* ]] || output=$PWD/$output
parent=$output
while [[ ! -e $parent && ! -L $parent ]]; do
    parent=$(dirname -- "$parent")
done
[[ -d $parent && -w $parent ]] || fail "--output ${option[output]}: $parent is not a writable folder; name another"
