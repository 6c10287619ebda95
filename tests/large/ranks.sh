#!/bin/sh
# Containers that several ranks make, with shared memory and over TCP between two network namespaces,
# which share no memory: fails unless they have the bytes of one process.
#
#   usage: tests/large/ranks.sh QTOOL CKPT DATA [SCHEME...]    as root, with mpirun and iproute2
#
# SCHEME: default `all`, one container with every scheme; the checkpoint then has 8 decoder layers.
# WINDOWS=33x256: calibration data. RANKS="1 2 3 4", THREADS="1 2", MOVE="memory tcp": what is tried.

qtool=$(realpath "$1") ckpt=$(realpath "$2") data=$(realpath "$3")
shift 3
: "${WINDOWS=33x256}" "${RANKS=1 2 3 4}" "${THREADS=1 2}" "${MOVE=memory tcp}"
tmp=$(mktemp -d) || exit 1
a=qtool-a-$$ b=qtool-b-$$
trap 'ip netns del $a; ip netns del $b; rm -rf "$tmp"' EXIT
trap 'exit 1' INT TERM
if ! command -v mpirun >/dev/null || ! ip netns add $a 2>/dev/null || ! ip netns add $b; then
    echo "SKIP: needs mpirun, and network namespaces, which take root and iproute2"
    exit 77
fi
ip link add qtv-a netns $a type veth peer name qtv-b netns $b &&
    ip -n $a addr add 10.77.0.1/24 dev qtv-a && ip -n $b addr add 10.77.0.2/24 dev qtv-b || exit 1
for n in $a $b; do
    ip -n $n link set lo up
done
ip -n $a link set qtv-a up && ip -n $b link set qtv-b up || exit 1

# What mpirun starts the daemon of the other host with: HOST COMMAND...
cat >"$tmp/agent" <<EOF
#!/bin/sh
shift
exec ip netns exec $b unshare --uts sh -c "hostname qtool-b; \$*"
EOF
chmod +x "$tmp/agent"

# ranks memory|tcp N COMMAND...; tcp: half of the ranks in each namespace
ranks() {
    how=$1 n=$2
    shift 2
    set -- --allow-run-as-root --oversubscribe --bind-to none -n "$n" "$@"
    case $how in
    memory) mpirun "$@" ;;
    tcp)
        ip netns exec $a unshare --uts sh -c 'hostname qtool-a; exec "$@"' - \
            mpirun --map-by node -H 10.77.0.1:4,10.77.0.2:4 --mca plm_rsh_agent "$tmp/agent" \
            --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 \
            --mca oob_tcp_if_include 10.77.0.0/24 "$@"
        ;;
    esac
}

# The options for every scheme in one container, one for each linear input; w4ax takes a layer.
every_scheme() {
    printf '%s\n' --scheme nf4
    set -- nf3 nf2:g=32 int3 int2:zero=group iq4nl mxfp4 nvfp4 lut4 lut3 lut2 fp8 fp7 fp6 fp5 fp4 \
        int4 int4:zero=group int8:g=0 mix24 mix24:g=8,g2=8,four=0.5
    for layer in 0 1 2 3 4 5; do
        for names in '[qkv]_proj' o_proj '(gate|up)_proj' down_proj; do
            [ $# -gt 0 ] || break
            printf '%s\n' --tensor "layers\\.$layer\\..*$names=$1"
            shift
        done
    done
    printf '%s\n' --tensor 'layers\.7\.=w4ax'
}

passed=0 failed=0
for scheme in "${@:-all}"; do
    if [ "$scheme" = all ]; then
        every_scheme >"$tmp/options"
    else
        printf '%s\n' --scheme "$scheme" >"$tmp/options"
    fi
    set -- quantize "$ckpt"
    while read -r option; do
        set -- "$@" "$option"
    done <"$tmp/options"
    set -- "$@" --data "$data" --samples "${WINDOWS%x*}" --seqlen "${WINDOWS#*x}" --quiet
    "$qtool" "$@" --threads 2 -o "$tmp/one" >/dev/null || exit 1
    for how in $MOVE; do
        for n in $RANKS; do
            for threads in $THREADS; do
                if ranks "$how" "$n" "$qtool" "$@" --threads "$threads" -o "$tmp/several" \
                    >/dev/null && cmp "$tmp/one/SHA256SUMS" "$tmp/several/SHA256SUMS"; then
                    passed=$((passed + 1))
                else
                    failed=$((failed + 1))
                    echo "FAIL $scheme, $how: $n ranks, $threads threads"
                fi
                rm -rf "$tmp/several" "$tmp/several.partial"
            done
        done
    done
    echo "$scheme: $(sha256sum <"$tmp/one/SHA256SUMS" | cut -c 1-16)"
    rm -rf "$tmp/one"
done
bytes=$(ip netns exec $a cat /sys/class/net/qtv-a/statistics/tx_bytes)
echo "$passed passed, $failed failed, $((bytes / 1000000)) MB sent from one namespace to the other"
[ $failed -eq 0 ]
