"""Nsight Compute's profile of the kernels that miss a figure -> OUT/profile.tsv, which is
docs/design/kernels_profile.tsv.

usage: profile_kernels.py QTOOL OUT [TITLE...]     needs ncu; without titles all tables; OUT: a directory

Percent are of the peak over the whole launch, weights cold in the L2. `active` is the time that an average
multiprocessor has a block; waits are in warps a scheduler that wait, for each instruction issued.
"""
import csv
import io
import os
import subprocess
import sys

# a table: title, then lines of a scheme and what is measured of it, SHAPE:M; kv4 has SHAPE:SEQUENCES:TOKENS
TABLES = [
    ("One token", [
        "nf4 4096x4096:1 8192x8192:1",
        "int4 4096x4096:1 8192x8192:1 57344x8192:1",
        "nf3 4096x4096:1 8192x8192:1 57344x8192:1",
        "fp6 4096x4096:1 8192x8192:1 57344x8192:1",
        "fp5 4096x4096:1 8192x8192:1 57344x8192:1"]),
    ("One token, dependent launch", [
        "int4 4096x4096:1"]),
    ("16 tokens", [
        "nf4 1024x4096:16 6144x4096:16 14336x4096:16 28672x4096:16 10240x8192:16 57344x8192:16",
        "int4 6144x4096:16 14336x4096:16 28672x4096:16 4096x14336:16 10240x8192:16 57344x8192:16",
        "nf3 28672x4096:16 8192x8192:16 8192x28672:16 57344x8192:16",
        "nf2 28672x4096:16 4096x14336:16 8192x8192:16 10240x8192:16 8192x28672:16 57344x8192:16",
        "fp6 14336x4096:16 28672x4096:16",
        "fp5 28672x4096:16 57344x8192:16",
        "fp7 28672x4096:16",
        "int4:zero=group 4096x4096:16 28672x4096:16 8192x8192:16",
        "nf4:g=32 28672x4096:16",
        "nf3:g=32 28672x4096:16 8192x8192:16",
        "int4:g=32 4096x4096:16 28672x4096:16 8192x8192:16",
        "int4:g=32,zero=group 4096x4096:16 28672x4096:16 8192x8192:16"]),
    ("64 to 256 tokens", [
        "nf4 8192x8192:64 28672x4096:128 8192x8192:128 8192x28672:128 4096x14336:192 6144x4096:256",
        "nf4 8192x8192:256 10240x8192:256 57344x8192:256",
        "nf3 6144x4096:256 10240x8192:256 57344x8192:256",
        "nf2 57344x8192:256",
        "int4 57344x8192:256",
        "fp6 6144x4096:256 57344x8192:256",
        "fp5 57344x8192:256",
        "fp7 4096x4096:256",
        "int8:g=32 4096x4096:128 4096x4096:256",
        "int4:g=32,zero=group 4096x4096:128 4096x4096:256"]),
    ("1024 rows", [
        "nf4 1024x4096:256 1024x4096:1024",
        "nf3 1024x4096:128 1024x4096:256 1024x4096:1024",
        "nf2 1024x4096:256 1024x4096:1024",
        "fp6 1024x4096:256",
        "fp5 1024x4096:256"]),
    ("1024 tokens and more", [
        "nf4 6144x4096:1024 14336x4096:1024 28672x4096:1024 28672x4096:2048 28672x4096:4096",
        "nf3 6144x4096:1024 14336x4096:1024",
        "nf2 6144x4096:1024 14336x4096:1024",
        "int4 14336x4096:1024",
        "fp6 14336x4096:1024",
        "int4:zero=group 28672x4096:1024 8192x8192:1024"]),
    ("mix24", [
        "mix24 4096x4096:1 8192x8192:1 57344x8192:1",
        "mix24 4096x4096:8 8192x8192:8 57344x8192:8",
        "mix24 4096x4096:16 6144x4096:16 14336x4096:16 8192x8192:16 8192x28672:16 57344x8192:16",
        "mix24 4096x4096:64",
        "mix24 4096x4096:128 6144x4096:128",
        "mix24 4096x4096:256 6144x4096:256 8192x8192:256 57344x8192:256",
        "mix24 4096x4096:512 6144x4096:512 8192x28672:512 57344x8192:512",
        "mix24 4096x4096:1024 6144x4096:1024 14336x4096:1024 8192x8192:1024 8192x28672:1024 57344x8192:1024",
        "mix24:outliers=0 4096x4096:16 6144x4096:16 14336x4096:16 8192x8192:16 8192x28672:16 57344x8192:16",
        "mix24:outliers=0 4096x4096:256 6144x4096:256 57344x8192:256",
        "mix24:outliers=0 4096x4096:512",
        "mix24:outliers=0 4096x4096:1024 6144x4096:1024"]),
    ("w4ax", [
        "w4ax 8192x8192:1 57344x8192:1 4096x4096:8 8192x8192:8 57344x8192:8 4096x4096:16 8192x8192:16",
        "w4ax 57344x8192:16 8192x8192:32 57344x8192:32 8192x8192:64 8192x8192:128 57344x8192:128",
        "w4ax 8192x8192:256 6144x4096:256 6144x4096:512 8192x8192:512 57344x8192:512 8192x8192:4096 57344x8192:4096",
        "w4ax:scales=int 8192x8192:64 8192x8192:4096"]),
    ("Attention over the cache", [
        "kv4 32x8x128:1:2048 32x8x128:1:32768 32x8x128:16:1024"]),
]
PERCENT = [  # column, metric
    ("active", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"),
    ("DRAM", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    ("L2", "lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    ("shared", "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"),
    ("issue", "smsp__issue_active.avg.pct_of_peak_sustained_elapsed"),
    ("ALU", "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed"),
    ("FMA", "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    ("tensor", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")]
WAITS = ["long_scoreboard", "short_scoreboard", "barrier", "wait", "mio_throttle", "lg_throttle", "math_pipe_throttle",
         "not_selected", "dispatch_stall", "no_instruction", "gmma", "membar", "sleeping", "branch_resolving"]
WAIT = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TIME, CLOCKS, BLOCKS = "gpu__time_duration.sum", "sm__cycles_elapsed.max", "launch__grid_size"
METRICS = [TIME, CLOCKS, BLOCKS] + [m for _, m in PERCENT] + [WAIT.format(w) for w in WAITS]
KERNELS = "regex:void (qt_|kv_attention_kernel<kv_int4)"  # not floors, cuBLAS, and launches ahead of products


def profile(qtool, scheme, what, options):
    shape, m, *length = what.split(":")
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
               "--graph-profiling", "node",
               "--kernel-name-base", "demangled", "-k", KERNELS, "--launch-skip", "3", "--launch-count", "1",
               "--metrics", ",".join(METRICS),
               qtool, "bench", "--quiet", "--scheme", scheme, "--shape", shape, "--m", m]
    command += ["--length", length[0]] if length else []
    try:
        output = subprocess.run(command + options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                timeout=120).stdout
    except subprocess.TimeoutExpired:
        output = "out of time"
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if len(lines) != 3:  # names, units, the launch
        return [scheme, shape, "/".join([m] + length), "no profile: " + " ".join(output.split())[-200:]]
    names, _, values = csv.reader(io.StringIO("\n".join(lines)))
    row = dict(zip(names, values))

    def value(metric):
        text = row.get(metric, "").replace(",", "")
        try:
            return float(text)
        except ValueError:
            return float("nan")

    waits = sorted(((value(WAIT.format(w)), w.replace("_", " ")) for w in WAITS), reverse=True)
    kernel = row["Kernel Name"].removeprefix("void ").split("<")[0].removeprefix("qt_").removesuffix("_kernel")
    return [scheme, shape.replace("x", ", ", 1), "/".join([m] + length), kernel.replace("_", " "),
            f"{value(BLOCKS):.0f}", f"{value(TIME) / 1000:.1f}", f"{value(CLOCKS) / value(TIME):.2f}"] + \
        [f"{value(metric):.0f}" for _, metric in PERCENT] + \
        [", ".join(f"{name} {v:.1f}" for v, name in waits[:3])]


def main():
    qtool, out, titles = sys.argv[1], sys.argv[2], sys.argv[3:]
    head = ["section", "scheme", "n_k", "m", "kernel", "blocks", "us", "ghz"] + \
        [name.lower() + "_pct" for name, _ in PERCENT] + ["waits"]
    with open(os.path.join(out, "profile.tsv"), "w") as f:
        f.write("\t".join(head) + "\n")
        for title, lines in TABLES:
            if titles and title not in titles:
                continue
            for line in lines:
                scheme, *whats = line.split()
                for what in whats:
                    row = profile(qtool, scheme, what, ["--dependent"] if "dependent" in title else [])
                    f.write("\t".join([title] + row) + "\n")
                    f.flush()


main()
