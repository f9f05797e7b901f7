"""The compiled half of `prep.jpeg`: numba kernels over uint8 arrays, nothing here prints or raises.

Every kernel takes a read-only contiguous `(N,)` uint8 file and treats it as hostile: each read is
checked against its length first. Findings come back as one of the codes below.

They stand in one file on purpose: numba's cache on disk looks at the file of the outermost kernel
only, so that kernels in several files could be served stale after an update.

Terms and table layouts follow ITU-T T.81 (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
"""

# numba infers the types of the kernels, and their integers are not Python's:
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

OK, NOT_JPEG, HEADER_ENDS, BAD_SEGMENT, BAD_TABLE, NO_TABLE, BAD_SIZE, BAD_FACTOR = range(8)
STRAY_BYTES, BAD_SCAN, PROGRESSIVE, ARITHMETIC, OTHER_PROCESS, PRECISION, COMPONENTS = range(8, 15)
MULTI_SCAN, ODD_FACTORS, ODD_ORDER, TOO_LARGE, DC_RANGE = range(15, 20)
SCAN_ENDS, BAD_CODE, BAD_INDEX, BAD_RESTART, SURPLUS = range(20, 25)

# Where `read_header` and `check_scan` leave what they found. Positions are byte offsets, 0: absent.
HEIGHT, WIDTH, NUM_COMPONENTS, INTERVAL, SOF_AT, SCAN_AT, JFIF_AT, ADOBE_AT = range(8)
MCU_HEIGHT, MCU_WIDTH, MCU_ROWS, MCU_COLS, MAX_V, MAX_H, NUM_BLOCKS = range(8, 15)
MCU, FILE_END, NO_EOI, EVERY, MENDED = range(15, 20)
COMPONENT = 20  # then id, h, v, quantisation, DC and AC table of each of at most three components
QUANT_AT, HUFFMAN_AT = 40, 44  # four quantisation tables; four DC, then four AC tables
NUM_INFO = 52

MARKER_MENDED, ZEROS_CUT = 1, 2  # bits of MENDED
MIN_INTERVAL_PX = 64
HEADER_ROOM = 2048  # bytes; more than any header that `write_header` makes
LUT_BITS = 10
U = np.uint64
HIGH_BITS, LOW_BITS = U(0x8080808080808080), U(0x0101010101010101)


class Decoder(NamedTuple):
    """A file, scratch for its entropy-coded bytes, and its Huffman tables: slots 0-3 DC, 4-7 AC."""

    data: Bytes
    clean: Bytes
    plan: Ints
    lut: npt.NDArray[np.uint32]
    limit: Ints
    first: Ints
    values_at: Ints


class Symbols(NamedTuple):
    """A scan as `symbol << 16 | extra bits`, where each block ends, how often each symbol came."""

    coded: npt.NDArray[np.uint32]
    block_end: Ints
    counts: Ints


def compiled(**options: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile on first call, to run without the interpreter lock; kept on disk where possible."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        jit = functools.partial(numba.njit, nogil=True, error_model="numpy", **options)
        try:
            return jit(cache=True)(function)
        except RuntimeError:  # numba found no folder that it may write to
            return jit()(function)

    return decorate


# Without numba's runtime (NRT) no array is counted in and out, which takes two thirds of the time
# in the inner loops; such a kernel can make no arrays.
allocating_kernel = compiled()
kernel = compiled(_nrt=False)
inlined_kernel = compiled(_nrt=False, forceinline=True)


@inlined_kernel
def load64(data, at):
    """Read eight bytes, the first one highest: written bytewise, compiled to one load."""
    at = U(at)
    high = U(data[at]) << U(56) | U(data[at + U(1)]) << U(48) | U(data[at + U(2)]) << U(40)
    middle = U(data[at + U(3)]) << U(32) | U(data[at + U(4)]) << U(24) | U(data[at + U(5)]) << U(16)
    return high | middle | U(data[at + U(6)]) << U(8) | U(data[at + U(7)])


@inlined_kernel
def store64(data, at, word):
    """Write eight bytes, the highest one first."""
    at = U(at)
    for i in range(8):
        data[at + U(i)] = np.uint8(word >> U(56 - 8 * i) & U(255))


@inlined_kernel
def holds_ff(word):
    """Tell whether one of the eight bytes is 0xFF."""
    return (~word - LOW_BITS) & word & HIGH_BITS != U(0)


@kernel
def copy(source, start, stop, out, at):
    """Copy `source[start:stop]` to `out[at:]`, give where it ends."""
    for i in range(stop - start):
        out[U(at + i)] = source[U(start + i)]
    return at + stop - start


@kernel
def fill(array, start, stop, value):
    """Set `array[start:stop]`: a slice assignment costs numba a third of a second to compile."""
    for i in range(start, stop):
        array[i] = value


@kernel
def u16(data, at):
    """Read a big-endian 16-bit number."""
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])


# ------------------------------------------------------------------------------------ the header


@kernel
def next_segment(data, at):
    """Give (code, marker, payload start, stop) of the segment at `at`, past fill bytes."""
    if at < data.size and data[at] != 0xFF:
        return STRAY_BYTES, 0, 0, 0
    while at < data.size and data[at] == 0xFF:
        at += 1
    if at >= data.size:
        return HEADER_ENDS, 0, 0, 0
    marker = np.int64(data[at])
    if marker == 0xD9 or marker == 1 or 0xD0 <= marker <= 0xD7:
        return OK, marker, at + 1, at + 1
    if marker < 0xC0 or marker == 0xD8 or 0xF0 <= marker <= 0xFD:
        return BAD_SEGMENT, marker, 0, 0
    if at + 3 > data.size:
        return HEADER_ENDS, marker, 0, 0
    stop = at + 1 + u16(data, at + 1)
    if stop < at + 3:
        return BAD_SEGMENT, marker, 0, 0
    return (HEADER_ENDS if stop > data.size else OK), marker, at + 3, stop


@kernel
def read_frame(data, start, stop, info):
    """Read a baseline frame header: size, components, geometry of the MCUs."""
    count = np.int64(data[start + 5]) if stop - start >= 6 else 0
    if count == 0 or stop - start != 6 + 3 * count or info[SOF_AT]:
        return BAD_SEGMENT
    info[SOF_AT] = start
    info[HEIGHT], info[WIDTH] = u16(data, start + 1), u16(data, start + 3)
    info[NUM_COMPONENTS] = count
    if info[HEIGHT] == 0 or info[WIDTH] == 0:
        return BAD_SIZE
    if data[start] != 8:
        return PRECISION
    if count != 1 and count != 3:
        return COMPONENTS
    if max(info[HEIGHT], info[WIDTH]) > 65500:  # what libjpeg takes
        return TOO_LARGE
    return read_components(data, start + 6, info)


@kernel
def read_components(data, at, info):
    """Read sampling factors; a lone component is coded block by block whatever its factors say."""
    count = info[NUM_COMPONENTS]
    for c in range(count):
        to = COMPONENT + 6 * c
        info[to], info[to + 3] = data[at + 3 * c], data[at + 3 * c + 2]
        h, v = np.int64(data[at + 3 * c + 1]) >> 4, np.int64(data[at + 3 * c + 1]) & 15
        if not (1 <= h <= 4 and 1 <= v <= 4):
            return BAD_FACTOR
        info[to + 1], info[to + 2] = (1, 1) if count == 1 else (h, v)
        info[MAX_H] = max(info[MAX_H], info[to + 1])
        info[MAX_V] = max(info[MAX_V], info[to + 2])
        info[NUM_BLOCKS] += info[to + 1] * info[to + 2]
    if count == 3 and not usual_factors(info[COMPONENT + 1 : COMPONENT + 15]):
        return ODD_FACTORS
    info[MCU_WIDTH], info[MCU_HEIGHT] = 8 * info[MAX_H], 8 * info[MAX_V]
    info[MCU_COLS] = (info[WIDTH] - 1) // info[MCU_WIDTH] + 1
    info[MCU_ROWS] = (info[HEIGHT] - 1) // info[MCU_HEIGHT] + 1
    return OK


@kernel
def usual_factors(info):
    """Tell whether TurboJPEG knows the sampling: 4:4:4, 4:2:2, 4:4:0, 4:2:0 or 4:1:1.

    Args:
        info: From the first component's factors on.
    """
    h, v, chroma_h, chroma_v = info[0], info[1], info[6], info[7]
    if (info[12], info[13]) != (chroma_h, chroma_v):
        return False
    if chroma_h * chroma_v == 1:
        return h * v <= 2 or (v <= 2 and h == 2) or (h == 4 and v == 1)
    return (h * v <= 3 and (h, v) == (chroma_h, chroma_v)) or (
        h == 2 and v == 2 and chroma_h * chroma_v == 2
    )


@kernel
def read_tables(data, start, stop, marker, info):
    """Note where each table of a DHT or DQT segment begins; a later one replaces an earlier one."""
    at = start
    while at < stop:
        kind, slot = np.int64(data[at]) >> 4, np.int64(data[at]) & 15
        if kind > 1 or slot > 3:
            return BAD_TABLE
        if marker == 0xDB:
            info[QUANT_AT + slot] = at
            at += 65 + 64 * kind
            continue
        if at + 17 > stop:
            return BAD_TABLE
        info[HUFFMAN_AT + 4 * kind + slot] = at + 1
        num_codes = 0
        for i in range(16):
            num_codes += np.int64(data[at + 1 + i])
        if num_codes > 256:
            return BAD_TABLE
        at += 17 + num_codes
    return OK if at == stop else BAD_TABLE


@kernel
def read_scan(data, start, stop, info):
    """Read a scan header: all components, in the frame's order, their tables at hand."""
    if info[SOF_AT] == 0 or stop - start < 1:
        return BAD_SCAN
    count = np.int64(data[start])
    if stop - start != 4 + 2 * count or not 1 <= count <= 4:
        return BAD_SCAN
    if count != info[NUM_COMPONENTS]:
        return MULTI_SCAN if count < info[NUM_COMPONENTS] else BAD_SCAN
    for c in range(count):
        to = COMPONENT + 6 * c
        table = np.int64(data[start + 2 + 2 * c])
        if data[start + 1 + 2 * c] != info[to] or (c and info[to] == info[to - 6]):
            return ODD_ORDER
        info[to + 4], info[to + 5] = table >> 4, 4 + (table & 15)
        if max(info[to + 3], table >> 4, table & 15) > 3 or info[QUANT_AT + info[to + 3]] == 0:
            return NO_TABLE
        if info[HUFFMAN_AT + (table >> 4)] == 0 or info[HUFFMAN_AT + 4 + (table & 15)] == 0:
            return NO_TABLE
    if data[stop - 3] != 0 or data[stop - 2] != 63 or data[stop - 1] != 0:
        return BAD_SCAN
    info[SCAN_AT] = stop
    return OK


@kernel
def frame_kind(marker):
    """Give OK for a Huffman-coded sequential frame, else why the process is not covered."""
    if marker == 0xC0 or marker == 0xC1:
        return OK
    if marker == 0xC2:
        return PROGRESSIVE
    return ARITHMETIC if 0xC9 <= marker <= 0xCB else OTHER_PROCESS


@kernel
def read_segment(data, marker, start, stop, info):
    """Note what one segment before the scan says."""
    if marker == 0xDB or marker == 0xC4:
        return read_tables(data, start, stop, marker, info)
    if marker == 0xDD:
        if stop - start != 2:
            return BAD_SEGMENT
        info[INTERVAL] = u16(data, start)
    elif 0xC0 <= marker <= 0xCF and marker != 0xC8 and marker != 0xCC:
        code = read_frame(data, start, stop, info)
        kind = frame_kind(marker)
        return code if kind == OK or code in (BAD_SEGMENT, BAD_SIZE) else kind
    elif marker == 0xE0 and is_jfif(data, start, stop):
        info[JFIF_AT], info[MENDED] = start, info[MENDED] | np.int64(data[start + 5] != 1)
    elif marker == 0xEE and is_adobe(data, start, stop):
        info[ADOBE_AT], info[MENDED] = start, info[MENDED] | np.int64(data[start + 11] > 1)
    elif marker == 0xCC:
        return ARITHMETIC
    elif marker == 0xD9 or marker == 0xC8 or marker == 0xDE or marker == 0xDF:
        return BAD_SEGMENT
    return OK


@kernel
def is_jfif(data, at, stop):
    """Tell whether an APP0 payload is JFIF's: it settles the colour space."""
    if stop - at < 14:
        return False
    return u16(data, at) == 0x4A46 and u16(data, at + 2) == 0x4946 and data[at + 4] == 0


@kernel
def is_adobe(data, at, stop):
    """Tell whether an APP14 payload is Adobe's: it settles the colour space."""
    if stop - at < 12:
        return False
    return u16(data, at) == 0x4164 and u16(data, at + 2) == 0x6F62 and data[at + 4] == 0x65


@kernel
def read_header(data, info):
    """Fill `info` from all segments up to the first scan, give the first thing wrong with them."""
    if data.size < 4 or data[0] != 0xFF or data[1] != 0xD8:
        return NOT_JPEG
    at = 2
    while True:
        code, marker, start, at = next_segment(data, at)
        if code == OK:
            if marker == 0xDA:
                return read_scan(data, start, at, info)
            code = read_segment(data, marker, start, at, info)
        if code != OK:
            return code


# ------------------------------------------------------------------------------- Huffman decoding


@kernel
def entry(symbol, length, is_dc):
    """Pack one code: all its bits 0-5, extra bits 6-9, symbol 10-17, coefficients it covers 18-25.

    0 stands for a code that baseline does not allow. An end of block covers 128: past any index.
    """
    size, run = symbol & 15, symbol >> 4
    if run if is_dc else size == 0 and run != 0 and run != 15:
        return np.uint32(0)
    covers = 128 if symbol == 0 else run + 1
    return np.uint32(length + size | size << 6 | symbol << 10 | covers << 18)


@kernel
def build_table(decoder, at, slot):
    """Build the decoder of one table: by look-up up to LUT_BITS bits, by range beyond."""
    code, value_at, is_dc = 0, at + 16, slot < 4
    base = slot << LUT_BITS
    for length in range(1, 17):
        count = np.int64(decoder.data[at + length - 1])
        decoder.first[slot * 17 + length] = code
        decoder.values_at[slot * 17 + length] = value_at
        for i in range(count):
            if is_dc and decoder.data[value_at + i] > 15:
                return BAD_TABLE
            if length <= LUT_BITS and code + i < 1 << length:
                step = 1 << (LUT_BITS - length)
                start = base + (code + i) * step
                e = entry(np.int64(decoder.data[value_at + i]), length, is_dc)
                fill(decoder.lut, start, start + step, e)
        code += count
        value_at += count
        decoder.limit[slot * 17 + length] = code
        if code >= 1 << length:  # the code of all ones is reserved
            return BAD_TABLE
        code <<= 1
    return OK


@kernel
def long_code(decoder, slot, acc):
    """Decode a code longer than LUT_BITS bits, give its entry or 0."""
    for length in range(LUT_BITS + 1, 17):
        code = np.int64(acc >> U(64 - length))
        i = slot * 17 + length
        if decoder.first[i] <= code < decoder.limit[i]:
            value = np.int64(decoder.data[decoder.values_at[i] + code - decoder.first[i]])
            return entry(value, length, slot < 4)
    return np.uint32(0)


@kernel
def unstuff(data, at, clean):
    """Copy entropy-coded bytes up to the next marker without their stuffing, give (stop, count)."""
    count, size = 0, data.size
    while at < size:
        while at + 8 <= size:
            word = load64(data, at)
            if holds_ff(word):
                break
            store64(clean, count, word)
            at += 8
            count += 8
        stop = min(at + 8, size)
        while at < stop:
            byte = data[at]
            if byte == 0xFF:
                if at + 1 >= size or data[at + 1] != 0:
                    return at, count
                at += 1
            clean[count] = byte
            at += 1
            count += 1
    return at, count


@kernel
def dc_symbol(value):
    """Code a DC difference: its category and the extra bits that tell it apart."""
    size, rest = 0, abs(value)
    while rest:
        size, rest = size + 1, rest >> 1
    return np.uint32(size << 16 | (value if value >= 0 else value + (1 << size) - 1))


@inlined_kernel
def refill(clean, reader):
    """Top up the bit reader to 56 bits at least.

    It is (bits not yet used, highest first; how many are sure; next byte to load).
    """
    acc, sure, at = reader
    acc |= load64(clean, at) >> sure
    return acc, sure | U(56), at + ((U(63) - sure) >> U(3))


@inlined_kernel
def read_symbol(decoder, slot, base, reader):
    """Decode a symbol; give (its entry or 0, its extra bits, the reader).

    A code in the look-up table takes 25 bits at most and any other 31, after which the reader is
    topped up: one refill is enough for two symbols.
    """
    acc, sure, at = reader
    e = decoder.lut[base + (acc >> U(64 - LUT_BITS))]
    if e == 0:
        e = long_code(decoder, slot, acc)
        if e == 0:
            return e, e, reader
        total = U(e) & U(63)
        reader = refill(decoder.clean, (acc << total, sure - total, at))
    else:
        total = U(e) & U(63)
        reader = acc << total, sure - total, at
    size = e >> np.uint32(6) & np.uint32(15)
    extra = np.uint32(acc >> (U(64) - total)) & ((np.uint32(1) << size) - np.uint32(1))
    return e, extra, reader


@inlined_kernel
def keep_symbol(symbols, num, counts_at, e, extra):
    """Append an AC symbol and count it."""
    symbol = e >> np.uint32(10) & np.uint32(255)
    symbols.coded[U(num)] = symbol << np.uint32(16) | extra
    symbols.counts[counts_at + U(symbol)] += 1
    return np.int64(e >> np.uint32(18))


@inlined_kernel
def decode_block(decoder, plan, reader, symbols, num):
    """Decode one block, append its symbols; give (code, DC difference, symbols so far, reader)."""
    slot, base, counts_at = plan[2], U(plan[2] << LUT_BITS), U(plan[3] + 256)
    reader = refill(decoder.clean, reader)
    e, extra, reader = read_symbol(decoder, plan[1], U(plan[1] << LUT_BITS), reader)
    size, diff = np.int64(e >> np.uint32(6) & np.uint32(15)), np.int64(extra)
    if size and not diff >> (size - 1):
        diff -= (1 << size) - 1
    k, num = 0, num + 1
    while e != 0:
        e, extra, reader = read_symbol(decoder, slot, base, reader)
        k += keep_symbol(symbols, num, counts_at, e, extra)
        num += 1
        if k >= 63 or e == 0:
            break
        reader = refill(decoder.clean, reader)
        e, extra, reader = read_symbol(decoder, slot, base, reader)
        k += keep_symbol(symbols, num, counts_at, e, extra)
        num += 1
        if k >= 63:
            break
    code = BAD_CODE if e == 0 else BAD_INDEX
    return (OK if k == 63 or k >= 128 else code), diff, num, reader


@kernel
def decode_mcus(decoder, limit, info, symbols, dc, num, stop):
    """Decode MCUs `info[MCU]` to `stop` of one restart interval, coding DC differences anew.

    Args:
        dc: Two `(3,)` int64, updated: the DC values that the next differences start from, as read
            and as written.

    Returns:
        A code, the number of symbols so far, and how many bits of `limit` were used.
    """
    was, now = dc
    fill(was, 0, 3, 0)
    reader = U(0), U(0), U(0)
    block, used = info[MCU] * info[NUM_BLOCKS], 0
    for mcu in range(info[MCU], stop):
        info[MCU] = mcu
        if mcu % info[EVERY] == 0:
            fill(now, 0, 3, 0)
        for b in range(info[NUM_BLOCKS]):
            c, to = decoder.plan[b, 0], num
            code, diff, num, reader = decode_block(decoder, decoder.plan[b], reader, symbols, num)
            used = np.int64(reader[2]) * 8 - np.int64(reader[1])
            if used > limit or (code == BAD_CODE and used + 16 > limit):
                return SCAN_ENDS, num, used
            was[c] += diff
            if code == OK and abs(was[c]) >= 1 << 14:
                code = DC_RANGE
            if code != OK:
                return code, num, used
            symbols.coded[to] = dc_symbol(was[c] - now[c])
            symbols.counts[decoder.plan[b, 3] + (symbols.coded[to] >> np.uint32(16))] += 1
            now[c] = was[c]
            symbols.block_end[block] = num
            block += 1
    info[MCU] = stop
    return OK, num, used


@kernel
def marker_at(data, at):
    """Give (marker or 0 for the end, position after it) where a marker is due."""
    while at < data.size and data[at] == 0xFF:
        at += 1
    return (np.int64(data[at]) if at < data.size else 0), at + 1


@kernel
def all_zero(data, start, stop):
    """Tell whether some bytes are padding, as odd cameras put behind the last MCU."""
    surplus = 0
    for i in range(start, stop):
        surplus |= data[i]
    return surplus == 0


@allocating_kernel
def decode_scan(decoder, info, symbols):
    """Decode the whole scan, give a code; `info[MCU]` says how far it came."""
    data, clean = decoder.data, decoder.clean
    total = info[MCU_ROWS] * info[MCU_COLS]
    interval = info[INTERVAL] if info[INTERVAL] else total
    dc = np.zeros(3, np.int64), np.zeros(3, np.int64)
    at, num = info[SCAN_AT], 0
    while True:
        at, size = unstuff(data, at, clean)
        fill(clean, size, size + 16, 0)
        stop = min(info[MCU] + interval, total)
        code, num, used = decode_mcus(decoder, 8 * size, info, symbols, dc, num, stop)
        info[FILE_END] = at
        marker, at = marker_at(data, at)
        if code == SCAN_ENDS and marker != 0 and marker != 0xD9:
            code = BAD_RESTART
        if code == OK and 8 * size - used >= 8:
            if stop == total and all_zero(clean, used + 7 >> 3, size):
                info[MENDED] |= ZEROS_CUT
            else:
                code = SURPLUS
        if code != OK or stop == total:
            return code
        if marker != 0xD0 + (stop // interval - 1 & 7):
            return SCAN_ENDS if marker == 0 or marker == 0xD9 else BAD_RESTART


@kernel
def find_end(data, info):
    """Walk from the last MCU to the end marker; a missing one is noted, more scans are refused."""
    at = info[FILE_END]
    while True:
        code, marker, _, stop = next_segment(data, at)
        if code == HEADER_ENDS and marker == 0:
            info[FILE_END], info[NO_EOI] = at, 1
            return OK
        if code != OK:
            return SURPLUS
        info[FILE_END] = at = stop
        if marker == 0xD9:
            return OK
        if not (0xE1 <= marker != 0xEE or 0xD0 <= marker <= 0xD7 or marker == 1):
            return MULTI_SCAN if marker == 0xDA else SURPLUS


@kernel
def plan_blocks(decoder, info):
    """Build the tables in use; note each block's component, DC and AC slot, and place of counts."""
    block, built = 0, 0
    for c in range(info[NUM_COMPONENTS]):
        at = COMPONENT + 6 * c
        for i in range(2):
            slot = info[at + 4 + i]
            new = not built >> slot & 1
            if new and build_table(decoder, info[HUFFMAN_AT + slot], slot) != OK:
                return BAD_TABLE
            built |= 1 << slot
        for _ in range(info[at + 1] * info[at + 2]):
            plan = decoder.plan[block]
            plan[0], plan[1], plan[2], plan[3] = c, info[at + 4], info[at + 5], 512 * min(c, 1)
            block += 1
    return OK


@allocating_kernel
def read_symbols(data, info, every):
    """Decode header and scan, give (code, symbols): every MCU must be there, and nothing else."""
    code = read_header(data, info)
    blocks = info[NUM_BLOCKS] * info[MCU_ROWS] * info[MCU_COLS] if code == OK else 0
    if blocks > 4 * data.size:  # a block takes two bits at least
        blocks = 4 * data.size + 16
    coded = np.empty(min(64 * blocks, 8 * data.size) + 128, np.uint32)
    symbols = Symbols(coded, np.empty(blocks + 1, np.int64), np.zeros(1024, np.int64))
    if code != OK:
        return code, symbols
    info[EVERY] = every if every else restart_interval(info[MCU_COLS], info[MCU_WIDTH])
    decoder = Decoder(
        data,
        np.empty(data.size + 512, np.uint8),  # a block may read 256 bytes past the last one
        np.zeros((10, 4), np.int64),
        np.zeros(8 << LUT_BITS, np.uint32),
        np.zeros(8 * 17, np.int64),
        np.zeros(8 * 17, np.int64),
        np.zeros(8 * 17, np.int64),
    )
    code = plan_blocks(decoder, info)
    if code == OK:
        code = decode_scan(decoder, info, symbols)
    if code == OK:
        code = find_end(data, info)
    return code, symbols


@kernel
def restart_interval(cols, width):
    """Choose the MCUs between restart markers: a divisor of a row's, else the whole row."""
    best = cols
    for k in range(1, cols):
        if cols % k == 0 and k * width >= MIN_INTERVAL_PX:
            best = k
            break
    return best


# --------------------------------------------------------------------------------- Huffman coding


@allocating_kernel
def code_lengths(weight, lengths):
    """Fill `lengths` with those of an optimal prefix code, give the longest.

    Args:
        weight: `(n,)` int64 ascending, n at least 2.
        lengths: `(2 * n,)` int64 of which the first n are for the caller.
    """
    n = weight.size
    total, parent = np.zeros(2 * n, np.int64), np.zeros(2 * n, np.int64)
    leaf, node = 0, n
    for new in range(n, 2 * n - 1):
        for _ in range(2):  # leaves and inner nodes are two queues, each ascending
            if leaf < n and (node >= new or weight[leaf] <= total[node]):
                parent[leaf] = new
                total[new] += weight[leaf]
                leaf += 1
            else:
                parent[node] = new
                total[new] += total[node]
                node += 1
    lengths[2 * n - 2] = 0
    for i in range(2 * n - 3, -1, -1):
        lengths[i] = lengths[parent[i]] + 1
    return lengths[0]


@allocating_kernel
def sorted_symbols(counts, base):
    """Give `count << 8 | symbol` of the symbols that came, ascending."""
    keys, n = np.empty(256, np.int64), 0
    for symbol in range(256):
        if counts[base + symbol]:
            key, i = counts[base + symbol] << 8 | symbol, n
            while i and keys[i - 1] > key:
                keys[i] = keys[i - 1]
                i -= 1
            keys[i] = key
            n += 1
    return keys[:n]


@allocating_kernel
def optimal_table(counts, base, codes, out, at):
    """Write the shortest Huffman table with at most 16 bits a code, as in a DHT segment.

    Args:
        counts: `(1024,)` int64, of which 256 from `base` on say how often each symbol comes.
        codes: `(1024,)` uint64, filled likewise: the code with room for its extra bits, and
            above bit 32 the length of both.

    Returns:
        Where the table ends in `out`, and how many bits all symbols take.
    """
    keys = sorted_symbols(counts, base)
    n = keys.size
    weights = np.zeros(n + 1, np.int64)  # the first stands for the reserved code of all ones
    for i in range(n):
        weights[i + 1] = keys[i] >> 8
    lengths = np.empty(2 * n + 2, np.int64)
    while code_lengths(weights, lengths) > 16:  # raise the rarest until the longest code fits
        floor = 2 * weights[1]
        for i in range(1, n + 1):
            weights[i] = max(weights[i], floor)
    fill(out, at, at + 16, 0)
    code, last, num_bits = 0, 0, 0
    for i in range(n):
        symbol, length = keys[n - 1 - i] & 255, lengths[n - i]
        code, last = code << (length - last), length
        width = length + (symbol & 15)
        codes[base + symbol] = U(width) << U(32) | U(code) << U(symbol & 15)
        out[at + length - 1] += 1
        out[at + 16 + i] = symbol
        num_bits += width * counts[base + symbol]
        code += 1
    return at + 16 + n, num_bits


@inlined_kernel
def put(out, writer, word, length):
    """Append the low `length` bits of a word; the writer is (bits, how many are free, position)."""
    acc, free, at = writer
    if length < free:
        return acc << length | word, free - length, at
    rest = length - free
    acc = acc << free | word >> rest
    if holds_ff(acc):
        at = put_stuffed(out, at, acc, 8)
    else:
        store64(out, at, acc)
        at += 8
    return word, U(64) - rest, at


@kernel
def put_stuffed(out, at, word, count):
    """Write the `count` lowest bytes of a word, each 0xFF followed by its 0."""
    for i in range(count):
        byte = word >> U(8 * (count - 1 - i)) & U(255)
        out[at] = np.uint8(byte)
        at += 1
        if byte == U(255):
            out[at] = 0
            at += 1
    return at


@kernel
def flush(out, writer):
    """Fill the last byte with ones and write what is left, give the position."""
    acc, free, at = writer
    pad = free & U(7)
    acc = acc << pad | (U(1) << pad) - U(1)
    return put_stuffed(out, at, acc, np.int64(64 - np.int64(free - pad)) >> 3)


@inlined_kernel
def put_symbol(out, writer, coded, codes, base):
    """Append a symbol and its extra bits."""
    x = codes[U(base) + U(coded >> np.uint32(16))]
    return put(out, writer, x & U(0xFFFFFFFF) | U(coded & np.uint32(0xFFFF)), x >> U(32))


@kernel
def write_scan(symbols, codes, info, out, at):
    """Write all symbols with the new codes, and a restart marker between the intervals."""
    writer = U(0), U(64), at
    num, block = 0, 0
    num_first = info[COMPONENT + 1] * info[COMPONENT + 2]
    for mcu in range(info[MCU]):
        if mcu and mcu % info[EVERY] == 0:
            at = flush(out, writer)
            out[at], out[at + 1] = 0xFF, 0xD0 + (mcu // info[EVERY] - 1 & 7)
            writer = U(0), U(64), at + 2
        for b in range(info[NUM_BLOCKS]):
            base = 0 if b < num_first else 512
            writer = put_symbol(out, writer, symbols.coded[num], codes, base)
            stop = symbols.block_end[block]
            for i in range(num + 1, stop):
                writer = put_symbol(out, writer, symbols.coded[U(i)], codes, base + 256)
            num = stop
            block += 1
    at = flush(out, writer)
    out[at], out[at + 1] = 0xFF, 0xD9
    return at + 2


# ------------------------------------------------------------------------------- writing headers


@kernel
def put_segment(out, at, marker, length):
    """Start a segment whose payload has `length` bytes, give where that goes."""
    out[at], out[at + 1] = 0xFF, marker
    out[at + 2], out[at + 3] = (length + 2) >> 8, (length + 2) & 255
    return at + 4


@kernel
def write_front(data, info, out):
    """Write what comes before the frame: JFIF without thumbnail, Adobe, quantisation tables.

    libjpeg takes any JFIF version and any Adobe transform above 1 as 1, but warns: so it is 1.
    """
    out[0], out[1] = 0xFF, 0xD8
    at = 2
    if info[JFIF_AT]:
        at = put_segment(out, at, 0xE0, 14)
        at = copy(data, info[JFIF_AT], info[JFIF_AT] + 12, out, at)
        out[at - 7], out[at], out[at + 1] = 1, 0, 0
        at += 2
    if info[ADOBE_AT]:
        at = put_segment(out, at, 0xEE, 12)
        at = copy(data, info[ADOBE_AT], info[ADOBE_AT] + 12, out, at)
        out[at - 1] = min(out[at - 1], 1)
    done = 0
    for c in range(info[NUM_COMPONENTS]):
        slot = info[COMPONENT + 6 * c + 3]
        if not done >> slot & 1:
            table = info[QUANT_AT + slot]
            length = 65 + 64 * (np.int64(data[table]) >> 4)
            at = put_segment(out, at, 0xDB, length)
            at = copy(data, table, table + length, out, at)
        done |= 1 << slot
    return at


@kernel
def write_frame(data, info, height, width, out, at):
    """Write the frame header with another size."""
    at = put_segment(out, at, data[info[SOF_AT] - 3], 6 + 3 * info[NUM_COMPONENTS])
    out[at], out[at + 5] = 8, info[NUM_COMPONENTS]
    out[at + 1], out[at + 2] = height >> 8, height & 255
    out[at + 3], out[at + 4] = width >> 8, width & 255
    at += 6
    for c in range(info[NUM_COMPONENTS]):
        to = COMPONENT + 6 * c
        out[at], out[at + 1], out[at + 2] = info[to], info[to + 1] << 4 | info[to + 2], info[to + 3]
        at += 3
    return at


@kernel
def write_scan_header(info, interval, out, at):
    """Write the restart interval and the scan header, with the table numbers that `info` holds."""
    if interval:
        at = put_segment(out, at, 0xDD, 2)
        out[at], out[at + 1] = interval >> 8, interval & 255
        at += 2
    count = info[NUM_COMPONENTS]
    at = put_segment(out, at, 0xDA, 4 + 2 * count)
    out[at] = count
    for c in range(count):
        to = COMPONENT + 6 * c
        out[at + 1 + 2 * c] = info[to]
        out[at + 2 + 2 * c] = info[to + 4] << 4 | (info[to + 5] - 4)
    at += 1 + 2 * count
    out[at], out[at + 1], out[at + 2] = 0, 63, 0
    return at + 3


@allocating_kernel
def write_recut(data, info, symbols):
    """Write a file that `read_symbols` found sound again, with restart markers."""
    head, codes = np.empty(HEADER_ROOM, np.uint8), np.zeros(1024, np.uint64)
    at = write_frame(data, info, info[HEIGHT], info[WIDTH], head, write_front(data, info, head))
    start, num_bits = at + 4, 0
    at = start
    for slot in range(2 if info[NUM_COMPONENTS] == 1 else 4):
        head[at] = (slot & 1) << 4 | slot >> 1
        at, bits = optimal_table(symbols.counts, 256 * slot, codes, head, at + 1)
        num_bits += bits
    put_segment(head, start - 4, 0xC4, at - start)
    for c in range(info[NUM_COMPONENTS]):
        info[COMPONENT + 6 * c + 4], info[COMPONENT + 6 * c + 5] = min(c, 1), 4 + min(c, 1)
    at = write_scan_header(info, info[EVERY], head, at)
    out = np.empty(at + num_bits // 4 + 4 * (info[MCU] // info[EVERY]) + 64, np.uint8)
    copy(head, 0, at, out, 0)
    return out[: write_scan(symbols, codes, info, out, at)]


# ------------------------------------------------------------------------------ cutting a region


@kernel
def find_marker(data, at):
    """Give where the next 0xFF lies that no 0 follows, or -1; 64 bytes at a time."""
    size = data.size
    while at + 65 <= size:
        hit = False
        for i in range(64):
            hit |= (data[U(at + i)] == 255) & (data[U(at + i + 1)] != 0)
        if hit:
            break
        at += 64
    while at + 1 < size:
        if data[U(at)] == 255 and data[U(at + 1)] != 0:
            return at
        at += 1
    return -1


@kernel
def span(start, stop, margin, unit, size):
    """Give first and last unit under a range of pixels with its margin, and where that stops.

    A right-hand edge inside the picture may lie in mid-unit: what lies beyond is not upsampled.
    """
    low, high = max(0, start - margin), min(size, stop + margin)
    first, last = low // unit, (high - 1) // unit + 1
    while min(size, last * unit) - first * unit <= 2 * margin and (first or last * unit < size):
        first, last = max(0, first - 1), last + (first == 0)
    return first, last, max(high, first * unit + 2 * margin + 1)


@kernel
def copy_segments(data, info, grid, out, at):
    """Copy the wanted restart segments, markers renumbered; give where they end or -1.

    Args:
        grid: First and last row, first and last column, columns, rows; of segments.
    """
    first_row, last_row, first_col, last_col, cols, rows = grid
    start, row, col, num = info[SCAN_AT], 0, 0, 0
    nth = 0
    while row < last_row:
        stop = find_marker(data, start)
        if stop < 0:
            return -1
        marker, after = marker_at(data, stop)
        if row >= first_row and first_col <= col < last_col:
            if num:
                out[at], out[at + 1] = 0xFF, 0xD0 + (num - 1 & 7)
                at += 2
            at = copy(data, start, stop, out, at)
            num += 1
        if marker != (0xD9 if nth == rows * cols - 1 else 0xD0 + (nth & 7)):
            return -1
        start, nth, col = after, nth + 1, col + 1
        if col == cols:
            row, col = row + 1, 0
        elif row == last_row - 1 and col == last_col:
            break
    return at


@kernel
def write_region(data, info, size, grid, out):
    """Write header, segments and end marker of a region, give its length or 0."""
    at = write_frame(data, info, size[0], size[1], out, write_front(data, info, out))
    used = 0
    for c in range(info[NUM_COMPONENTS]):
        used |= 1 << info[COMPONENT + 6 * c + 4] | 1 << info[COMPONENT + 6 * c + 5]
    for slot in range(8):
        if used >> slot & 1:
            table, num_codes = info[HUFFMAN_AT + slot], 0
            for i in range(16):
                num_codes += np.int64(data[table + i])
            at = put_segment(out, at, 0xC4, 17 + num_codes)
            at = copy(data, table - 1, table + 16 + num_codes, out, at)
    at = write_scan_header(info, size[2], out, at)
    at = copy_segments(data, info, grid, out, at)
    if at < 0:
        return 0
    out[at], out[at + 1] = 0xFF, 0xD9
    return at + 2


@allocating_kernel
def cut_region(data, top, left, height, width, reduce, out):
    """Cut a box out of a file; give (length or 0, height, width, top and left of the box in it)."""
    none = (0, 0, 0, 0, 0)
    info = np.zeros(NUM_INFO, np.int64)
    if read_header(data, info) != OK or info[INTERVAL] == 0:
        return none
    every, cols = info[INTERVAL], info[MCU_COLS]
    if cols % every and every % cols:
        return none
    if min(top, left, height - 1, width - 1) < 0:
        return none
    if top > info[HEIGHT] - height or left > info[WIDTH] - width:
        return none
    unit_y, unit_x = max(1, every // cols) * info[MCU_HEIGHT], min(every, cols) * info[MCU_WIDTH]
    margin_y = reduce * info[MAX_V] if info[MAX_V] > 1 else 0
    margin_x = reduce * info[MAX_H] if info[MAX_H] > 1 else 0
    y, y_stop, bottom = span(top, top + height, margin_y, unit_y, info[HEIGHT])
    x, x_stop, right = span(left, left + width, margin_x, unit_x, info[WIDTH])
    rows = (info[HEIGHT] - 1) // unit_y + 1
    grid = y, y_stop, x, x_stop, (info[WIDTH] - 1) // unit_x + 1, rows
    high = min(info[HEIGHT], y_stop * unit_y) - y * unit_y
    wide = min(info[WIDTH], x_stop * unit_x) - x * unit_x
    high = min(
        high, max(bottom - y * unit_y, (high - 1) // info[MCU_HEIGHT] * info[MCU_HEIGHT] + 1)
    )
    wide = min(wide, max(right - x * unit_x, (wide - 1) // info[MCU_WIDTH] * info[MCU_WIDTH] + 1))
    length = write_region(data, info, (high, wide, every), grid, out)
    return (length, high, wide, top - y * unit_y, left - x * unit_x) if length else none


@allocating_kernel
def image_size(data):
    """Give (height, width) from the frame header, zeros where there is none."""
    info = np.zeros(NUM_INFO, np.int64)
    read_header(data, info)
    return info[HEIGHT], info[WIDTH]
