# Sourced by scripts with options, as `source options.sh "$@"`; needs usage(), the array `option` (its keys are the
# options, its values their defaults) and `numbers`, the options that are whole numbers. It sets $fresh (--fresh) and
# fail(), and makes $output, the folder ${option[output]} as a whole path.

fail() { echo "$(basename "$0" .sh): $1" >&2; exit 2; }

fresh=0
while (($#)); do
    name=${1#--}
    case $1 in
        --fresh) fresh=1 ;;
        -h | --help) usage; exit 0 ;;
        *)
            [[ $1 == --* && -n ${option[$name]+known} ]] || fail "unknown option '$1' (--help lists them)"
            (($# > 1)) || fail "$1 wants a value"
            option[$name]=$2
            shift
            ;;
    esac
    shift
done
for name in "${numbers[@]}"; do
    [[ ${option[$name]} =~ ^[0-9]+$ ]] || fail "--$name ${option[$name]}: wants a whole number"
done
mkdir -p "${option[output]}"
output=$(cd "${option[output]}" && pwd)
