"""PTX that restores codes in the registers that tensor cores multiply, without conversions and without shared memory.

An element holds eight codes of an entry: 4 bytes at 4 bits, 4 bytes of each half at 8 bits, 2 bytes of the lower plane
and 2 halves of bytes of the upper one at 3 bits (`cache.tiers._join`). The code takes two elements at once and returns
eight registers: register p is the pair of code p of both elements, as float16 numbers w (w^2 + a), or in FP8 as numbers
of its bits. Times a factor these are the levels. A field of bits becomes a number by setting it into the mantissa of a
power of two. One fma then subtracts this power and the centre of the codes, and scales.
"""

import torch

from lkv.kernels import FP8, QUANTIZED_BITS
from lkv.kernels.ragged_attention.arguments import FP8_UNIT, LEVELS

RESULTS = 8  # registers that come back, which are also the codes of an element
# w = u times this: the scale with which the numbers that are added, in all fields and as a, are nearest to numbers that
# float16 has (a code moves by 3.5e-4).
_SCALES = {8: 0.054656982421875, 4: 0.433349609375, 3: 0.357177734375}
# Input registers: two of each tensor of words, one of each tensor of 16 bits.
INPUTS = {8: 4, FP8: 4, 4: 2, 3: 3}
_AND_OR = "0xEA"  # the table of (a & b) | c


def _summand(bits: int) -> float:
    """Return a of w (w^2 + a), a number that float16 has."""
    slope, cubic = LEVELS[bits]
    return float(torch.tensor(_SCALES[bits] ** 2 * slope / cubic, dtype=torch.float64, device="cpu").half())


def _factor(bits: int) -> float:
    """Return what results are multiplied by to be levels: the best factor for a normal variable, after rounding."""
    if bits == FP8:
        return FP8_UNIT * 2**8
    codes = torch.arange(2**bits, dtype=torch.float64, device="cpu") - (2**bits - 1) / 2
    slope, cubic = LEVELS[bits]
    levels, w = codes * (slope + cubic * codes.square()), (codes * _SCALES[bits]).half().double()
    results = ((w.square() + _summand(bits)).half().double() * w).half().double()
    # How often a level is chosen, about.
    frequency = torch.exp(-levels.square() / 2) * torch.gradient(levels)[0]
    return float((frequency * levels * results).sum() / (frequency * results.square()).sum())


def _code(bits: int) -> str:
    """Return the PTX for codes of `bits`."""
    writer = _Writer(bits)
    {8: _restore_8, FP8: _restore_fp8, 4: _restore_4, 3: _restore_3}[bits](writer)
    return writer.text()


def _restore_8(writer: "_Writer") -> None:
    """Of words of the first half of the channels ($8, $9) and of the second: result 2 b + h is byte b of half h."""
    for part in range(RESULTS):
        byte, half = divmod(part, 2)
        pair = writer.register(f"prmt.b32 {{}}, ${8 + 2 * half}, ${9 + 2 * half}, {byte + 4 << 8 | byte:#x};")
        writer.restore(part, [(pair, 0, 0xFF)], 0)


def _restore_fp8(writer: "_Writer") -> None:
    """As `_restore_8`: the bits of e4m3 as those of a float16 number, 2^8 times smaller, which is made up for."""
    for part in range(RESULTS):
        byte, half = divmod(part, 2)
        # Each code in the upper byte of its number; what is below does not matter.
        pair = writer.register(f"prmt.b32 {{}}, ${8 + 2 * half}, ${9 + 2 * half}, {byte * 0x1111 + 0x4400:#x};")
        sign = writer.register(f"lop3.b32 {{}}, {pair}, 0x80008000, {writer.constant(0)}, {_AND_OR};")
        moved = writer.register(f"shr.u32 {{}}, {pair}, 1;")
        writer.write(f"lop3.b32 ${part}, {moved}, 0x3f803f80, {sign}, {_AND_OR};")


def _restore_4(writer: "_Writer") -> None:
    """Of words ($8, $9): result 2 b + h is half h of byte b."""
    for half, selector in enumerate((0x5410, 0x7632)):
        pair = writer.register(f"prmt.b32 {{}}, $8, $9, {selector:#x};")
        for number in range(4):
            # The mantissa has room for two fields, so that one shift serves both.
            low = number % 2 * 4
            writer.restore(4 * half + number, [(pair, number // 2 * 8, 0xF << low)], low)


def _restore_3(writer: "_Writer") -> None:
    """Of 16 bits of the lower plane ($8) and of the upper one: result 4 g + c is code c of group g.

    The upper bits are in the lower ($9) or in the upper ($10) halves of their bytes; the other register is 0 there.
    """
    upper = writer.register("shr.u32 {0}, $10, 4; lop3.b32 {0}, {0}, 0x0f0f0f0f, $9, " + _AND_OR + ";")
    for group in range(2):
        at = 8 * group
        for part, (pieces, low) in enumerate((
            ([("$8", at, 0x7)], 0),
            ([("$8", at, 0x38)], 3),
            ([("$8", at, 0xC0), (upper, at - 8, 0x100)], 6),
            ([(upper, at, 0xE)], 1),
        )):  # fmt: skip
            writer.restore(4 * group + part, pieces, low)


class _Writer:
    """Writes PTX over pairs of float16 numbers; `u` and `s` are scratch registers."""

    def __init__(self, bits: int):
        self._bits = bits
        self._lines: list[str] = []
        self._registers: dict[str, str] = {}  # by the line that sets them
        self._constants: dict[int, str] = {}

    def write(self, line: str) -> None:
        self._lines.append(line)

    def register(self, line: str) -> str:
        """Return the register that `line` sets; it is written once."""
        if line not in self._registers:
            self._registers[line] = f"r{len(self._registers)}"
            self.write(line.format(self._registers[line]))
        return self._registers[line]

    def constant(self, word: int) -> str:
        return self._constants.setdefault(word, f"c{len(self._constants)}")

    def number(self, value: float) -> str:
        """Return a register with `value` twice."""
        half = int(torch.tensor(value, dtype=torch.float64, device="cpu").half().view(torch.int16)) & 0xFFFF
        return self.constant(half << 16 | half)

    def restore(self, part: int, pieces: list[tuple[str, int, int]], low: int) -> None:
        """Set result `part` to the level of a code, a field of bits that begins at bit `low`.

        Args:
            part: The number of the result.
            pieces: Where its bits come from: a register, its shift to the right, and the bits to take then.
            low: The first bit of the field.
        """
        power, scale = float(2 ** (10 - low)), _SCALES[self._bits]  # whose mantissa counts ones from bit `low`
        word = self.number(power)
        for source, shift, mask in pieces:
            if shift:
                step = f"shr.u32 {{}}, {source}, {shift};" if shift > 0 else f"shl.b32 {{}}, {source}, {-shift};"
                source = self.register(step)
            self.write(f"lop3.b32 u, {source}, {mask << 16 | mask:#x}, {word}, {_AND_OR};")
            word = "u"
        centre = power + (2**self._bits - 1) / 2
        self.write(f"fma.rn.f16x2 u, u, {self.number(scale)}, {self.number(-scale * centre)};")
        self.write(f"fma.rn.f16x2 s, u, u, {self.number(_summand(self._bits))};")
        self.write(f"mul.rn.f16x2 ${part}, s, u;")

    def text(self) -> str:
        names = ", ".join([*self._registers.values(), *self._constants.values(), "u", "s"])
        moves = "".join(f" mov.b32 {name}, {word:#x};" for word, name in self._constants.items())
        return f"{{ .reg .b32 {names};{moves} {' '.join(self._lines)} }}"


# The code, and what its results are multiplied by to be levels, by the bits.
CODES = {bits: _code(bits) for bits in QUANTIZED_BITS}
FACTORS = {bits: _factor(bits) for bits in QUANTIZED_BITS}
