"""Search in Triton's compiled code for Hopper for products that give wrong results."""

import re


def transposed_in_registers(ttgir):
    """Return the tensor-core products whose left operand is a computed tile that was transposed.

    Triton 3.4 to 3.7.0 compiles them wrongly for Hopper: such an operand is in registers, but does not
    have the layout of an operand before its conversion.
    """
    transposed = set(re.findall(r"(%\S+) = tt\.trans ", ttgir))
    operands = re.findall(r"= (?:ttng\.warp_group_dot|tt\.dot) (%[^, ]+),", ttgir)
    sources = dict(re.findall(r"(%\S+) = ttg\.convert_layout (%\S+) ", ttgir))
    return [x for x in operands if x in transposed or sources.get(x) in transposed]


def overwritten_operands(ttgir):
    """Return the products of a loop that may still read a buffer when a copy to this buffer begins.

    Triton 3.6 does not wait for a product if only the product of the next turn uses its result. It adds
    a place to the buffer then, but not if the tile is also read into registers. The search does not
    compare places, so it can also find products whose buffer has enough of them.
    """
    buffer_of = {name: name for name in re.findall(r"(%\S+) = ttg\.local_alloc", ttgir)}
    for name, source in re.findall(r"(%\S+) = ttg\.memdesc_\w+ (%[^\[ ,]+)", ttgir):
        buffer_of[name] = buffer_of.get(source, source)
    found = []
    for _, body in re.findall(r"^( *)%?\S* ?=? ?scf\.for .*?\n(.*?)^\1\}", ttgir, re.M | re.S):
        running = []
        # The second turn finds copies that begin while products of the turn before still run.
        for line in body.splitlines() * 2:
            if wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
                running = running[max(len(running) - int(wait[1]), 0) :]
            elif dot := re.search(r"(%\S+) = ttng\.warp_group_dot (\S+), (\S+), .*isAsync", line):
                running.append((dot[1], {buffer_of.get(x) for x in dot.groups()[1:]}))
            elif copy := re.search(r"async_copy_global_to_local %[^ ,]+, (%[^ ,]+)", line):
                written = buffer_of[copy[1]]
                found += [name for name, read in running if written in read]
    return found
