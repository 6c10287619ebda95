#!/bin/sh
# Containers that ranks in two network namespaces make over TCP: fails unless they have the bytes of
# one process, for 2, 3 and 4 ranks and 1 and 2 threads each.
#
#   usage: tests/large/ranks_tcp.sh QTOOL CKPT DATA [SCHEME...]    as root, with mpirun and iproute2
#
# SIZE=16x256: the windows of calibration data; RANKS="2 3 4" and THREADS="1 2": what is tried.

qtool=$(realpath "$1") ckpt=$(realpath "$2") data=$(realpath "$3")
shift 3
: "${SIZE=16x256}" "${RANKS=2 3 4}" "${THREADS=1 2}"
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

# ranks N COMMAND...: half of the ranks in each namespace, which share no memory
ranks() {
    n=$1
    shift
    ip netns exec $a unshare --uts sh -c 'hostname qtool-a; exec "$@"' - \
        mpirun --allow-run-as-root --oversubscribe --bind-to none --map-by node -n "$n" \
        -H 10.77.0.1:4,10.77.0.2:4 --mca plm_rsh_agent "$tmp/agent" --mca btl tcp,self \
        --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 "$@"
}

passed=0 failed=0
for scheme in "${@:-nf4}"; do
    set -- quantize "$ckpt" --scheme "$scheme" --data "$data" --samples "${SIZE%x*}" \
        --seqlen "${SIZE#*x}" --quiet
    "$qtool" "$@" --threads 2 -o "$tmp/one" >/dev/null || exit 1
    for n in $RANKS; do
        for threads in $THREADS; do
            if ranks "$n" "$qtool" "$@" --threads "$threads" -o "$tmp/several" >/dev/null &&
                cmp "$tmp/one/SHA256SUMS" "$tmp/several/SHA256SUMS"; then
                passed=$((passed + 1))
            else
                failed=$((failed + 1))
                echo "FAIL $scheme: $n ranks, $threads threads"
            fi
            rm -rf "$tmp/several" "$tmp/several.partial"
        done
    done
    echo "$scheme: $(sha256sum <"$tmp/one/SHA256SUMS" | cut -c 1-16)"
    rm -rf "$tmp/one"
done
bytes=$(ip netns exec $a cat /sys/class/net/qtv-a/statistics/tx_bytes)
echo "$passed passed, $failed failed, $((bytes / 1000000)) MB sent from one namespace to the other"
[ $failed -eq 0 ] && [ "$bytes" -gt 1000000 ]
