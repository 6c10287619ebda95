#!/usr/bin/env python3
"""What 3xTF32 costs and how exact it is on this GPU (docs/experiments, E140), by PyTorch's products:
times in ms and errors of an M x N x K product of normal numbers, as parts of its standard deviation.

usage: tf32.py [M N K]     default 4096 4096 4096
"""
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parts(x):
    def nearest(v):
        return ((v.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    high = nearest(x)
    return nearest(x - high), high


def milliseconds(work, runs=10):
    work()
    if DEVICE == "cpu":
        return float("nan")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / runs


def three(y, x, w, step):
    """Products of parts, the small ones first, begun anew after `step` terms."""
    (xl, xh), (wl, wh) = x, w
    for at in range(0, xh.shape[1], step):
        for a, b in (xl, wh), (xh, wl), (xh, wh):
            a, b = a[:, at:at + step], b[:, at:at + step].t()
            if at == 0 and a.data_ptr() == xl.data_ptr():
                torch.mm(a, b, out=y)
            else:
                y.addmm_(a, b)


def main():
    m, n, k = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (4096,) * 3
    x, w = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE)
    xp, wp, y = parts(x), parts(w), torch.empty(m, n, device=DEVICE)
    deep = torch.cat([xp[1], xp[1], xp[0]], 1), torch.cat([wp[0], wp[1], wp[1]], 1)
    rows = slice(0, 256)
    truth = x[rows].double() @ w.double().t()
    for name, tf32, work in (
            ("FP32", False, lambda: torch.mm(x, w.t(), out=y)),
            ("three products of parts", True, lambda: three(y, xp, wp, k)),
            ("one, large terms before small ones", True, lambda: torch.mm(deep[0], deep[1].t(), out=y)),
            ("three, begun anew after 2048", True, lambda: three(y, xp, wp, 2048)),
            ("TF32", True, lambda: torch.mm(x, w.t(), out=y))):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        time = milliseconds(work)
        error = ((y[rows].double() - truth).std() / truth.std()).item()
        print(f"{name:36} {time:8.3f} ms  {error:.1e}")


if __name__ == "__main__":
    main()
