#!/usr/bin/env python3
"""Checks that wgmma instructions keep their A registers until they have completed.

The assembler (13.0) treats the A registers of a wgmma in flight as free, whatever the source says, and
may write the next operand into them, which gives wrong results now and then. This program reads the
machine code, with loop bodies twice: between a wgmma and a wait that leaves fewer groups in flight than
were started after it, no instruction may write its A or accumulator registers.

usage: wgmma_registers.py FILE...      objects or libraries; CUOBJDUMP=path
prints "N passed, M failed, K skipped"; each kernel is a test
"""
import os
import re
import shutil
import subprocess
import sys

PRODUCT = re.compile(r"[HIQ]GMMA\.64x(\d+)x\d+\S* R(\d+), (R(\d+)|gdesc)")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\d+\s+)?(.*?);")
# Instructions that write no register, although a register may be their first operand.
NO_RESULT = ("ST", "STS", "STG", "STL", "RED", "BRA", "BSSY", "BSYNC", "SYNCS", "NOP", "WARPSYNC",
             "LDGSTS", "BAR", "UBLKCP", "EXIT")


def kernels(text):
    name, code = None, []
    for line in text.splitlines():
        start = re.search(r"Function : (\S+)", line)
        if start:
            if name:
                yield name, code
            name, code = start.group(1), []
        found = INSTRUCTION.match(line)
        if found:
            code.append((int(found.group(1), 16), found.group(2)))
    if name:
        yield name, code


def written(instruction):
    op = instruction.split()[0]
    first = re.match(r"\S+\s+(?:U?P\d+,\s*)*R(\d+)", instruction)
    if not first or op.split(".")[0] in NO_RESULT:
        return set()
    wide = 4 if ".128" in op else 2 if ".64" in op or ".WIDE" in op or op.startswith("CS2R") else 1
    return set(range(int(first.group(1)), int(first.group(1)) + wide))


def twice(code):
    """Yields all instructions in order, and the body of a loop with wgmma again at its end."""
    at = {address: i for i, (address, _) in enumerate(code)}
    for i, (address, instruction) in enumerate(code):
        yield instruction
        back = re.match(r"BRA\S*\s.*?0x([0-9a-f]+)\s*$", instruction)
        start = at.get(int(back.group(1), 16), i) if back else i
        if start < i and any("GMMA" in again for _, again in code[start:i]):
            yield from (again for _, again in code[start:i])


def check(code):
    """Returns the number of wgmma with A in registers, and the instructions that overwrite their registers."""
    groups, products, bad = [set()], 0, []
    for instruction in twice(code):
        product = PRODUCT.match(instruction)
        if product:
            sums = int(product.group(2))
            groups[-1] |= set(range(sums, sums + int(product.group(1)) // 2))
            if product.group(4):
                products += 1
                groups[-1] |= set(range(int(product.group(4)), int(product.group(4)) + 4))
            if "gsb0" in instruction:
                groups.append(set())
        elif instruction.startswith("WARPGROUP.DEPBAR"):
            groups = groups[-1 - int(instruction.split()[-1], 16):]
        elif written(instruction) & set().union(*groups):
            bad.append(instruction)
    return products, bad


def main():
    tool = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if not tool:
        print("SKIP: no cuobjdump, machine code not checked\n0 passed, 0 failed, 1 skipped")
        return 0
    passed = failed = 0
    for path in sys.argv[1:]:
        dump = subprocess.run([tool, "-sass", "-arch", "sm_90a", path], capture_output=True, text=True, check=True)
        for name, code in kernels(dump.stdout):
            products, bad = check(code)
            passed += products > 0 and not bad
            failed += bool(bad)
            for instruction in bad[:3]:
                print(f"FAILED {name}: {instruction}")
    if passed + failed == 0:
        print("FAILED: no products of warpgroups found")
        failed = 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return failed != 0


sys.exit(main())
