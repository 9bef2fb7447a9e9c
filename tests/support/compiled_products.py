"""Search in Triton's compiled code for Hopper for products that give wrong results."""

import re


def transposed_in_registers(ttgir):
    """Return the tensor-core products whose left operand is a computed tile that was transposed.

    Triton 3.4 to 3.7.0 compiles them wrongly for Hopper: such an operand is in registers, but does not
    have the layout of an operand before its conversion.
    """
    # Loops beside each other use the same names, so a name means its last definition.
    operations, found = {}, []
    for line in ttgir.splitlines():
        if defined := re.match(r"\s*(%\S+) = (\S+) (%[^ ,]+)?", line):
            name, operation, operand = defined.groups()
            if operation in ("ttng.warp_group_dot", "tt.dot") and _is_transposed(
                operations, operand
            ):
                found.append(operand)
            operations[name] = (operation, operand)
    return found


def _is_transposed(operations, name):
    """Say whether a value is a transposed tile, also if its layout was converted after that."""
    operation, operand = operations.get(name, ("", None))
    if operation == "ttg.convert_layout":
        operation, _ = operations.get(operand, ("", None))
    return operation == "tt.trans"


def overwritten_operands(ttgir):
    """Return the products that may still read a place of a buffer when a copy to this place begins.

    Triton 3.6 and 3.9 do not wait for a product if only the product of the next turn uses its result.
    They add a place to the buffer then, but not if the tile is also read into registers. The search runs
    a few turns of each loop and computes the places. An unknown place counts as every place.
    """
    running, found = [], set()
    _run(ttgir.splitlines(), {}, running, found)
    return sorted(found)


_TURNS = 3
_VALUE = re.compile(r"\s*(%[^ :]+)(?::\d+)? = \"?(\S+?)\"? (.*)")
_LOOP = re.compile(
    r"( *)(?:(%[^ :]+)(?::\d+)? = )?scf\.for %\S+ = \S+ to (?:.*iter_args\((.*?)\))?"
)
_WRITE = re.compile(
    r"(?:async_copy_global_to_local|local_store) %\S+, (%[^ ,]+)|async_tma_\w+ .*?\] (%[^ ,]+)"
)
_ARITHMETIC = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.remsi": lambda a, b: a % b,
    "arith.cmpi sge": lambda a, b: a >= b,
    "arith.cmpi slt": lambda a, b: a < b,
    "arith.cmpi eq": lambda a, b: a == b,
    "arith.select": lambda condition, a, b: a if condition else b,
}


def _run(lines, values, running, found):
    """Run lines of TTGIR; return the operands of their last ``scf.yield``.

    Args:
        values: by name the known numbers, and the tiles in shared memory as (buffer, place).
        running: (name, operands) of the products that may still run, oldest first.
        found: names of the products whose operand is overwritten.
    """
    passed, position = [], 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if loop := _LOOP.match(line):
            end = next(i for i in range(position, len(lines)) if lines[i].startswith(loop[1] + "}"))
            carried = re.findall(r"(%\S+) = ([^ ,]+)", loop[3] or "")
            results = [values.get(start) for _, start in carried]
            for _ in range(_TURNS):
                names = (name for name, _ in carried)
                values.update(zip(names, results, strict=True))
                results = _run(lines[position:end], values, running, found)[: len(carried)]
            values.update((f"{loop[2]}#{i}", result) for i, result in enumerate(results))
            values[loop[2]] = next(iter(results), None)
            position = end
        elif "scf.yield" in line:
            passed = [values.get(x) for x in re.findall(r"%[^ ,]+", line.split(" : ")[0])]
        elif wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            del running[: max(len(running) - int(wait[1]), 0)]
        elif written := _written(line, values):
            found.update(name for name, read in running if any(_same(x, written) for x in read))
        _assign(line, values, running)
    return passed


def _assign(line, values, running):
    """Compute the value that a line defines, and start its product."""
    if not (value := _VALUE.match(line)):
        return
    name, operation, rest = value.groups()
    operands = re.findall(r"%[^ ,\[\]]+", rest.split(" : ")[0])
    known = [values.get(x) for x in operands]
    if operation == "arith.cmpi":
        operation += " " + rest.split(",")[0]
    if operation == "arith.constant":
        number = re.match(r"-?\d+(?= : i)", rest)
        values[name] = int(number[0]) if number else None
    elif operation in _ARITHMETIC:
        usable = None not in known
        values[name] = _ARITHMETIC[operation](*known) if usable else None
    elif operation == "ttg.local_alloc":
        values[name] = (name, None)
    elif operation == "ttg.memdesc_index" and known[0]:
        values[name] = (known[0][0], known[1])
    elif operation.startswith("ttg.memdesc_"):
        values[name] = known[0]
    elif operation == "ttng.warp_group_dot_wait":
        values.update((f"{name}#{i}", x) for i, x in enumerate(known))
    elif operation == "ttng.warp_group_dot":
        if "isAsync = true" in rest:
            running.append((name, [x for x in known[:2] if x]))
        else:
            running.clear()


def _written(line, values):
    """Return the (buffer, place) that a line writes, or None."""
    if write := _WRITE.search(line):
        return values.get(write[1] or write[2])
    filled = re.match(r"\s*(%\S+) = ttg\.local_alloc %", line)
    return (filled[1], None) if filled else None


def _same(read, written):
    """Return True if two tiles in shared memory may be the same."""
    places = {read[1], written[1]}
    return read[0] == written[0] and (None in places or len(places) == 1)
