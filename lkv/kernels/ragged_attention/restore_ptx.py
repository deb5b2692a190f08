"""PTX that restores codes in the registers that tensor cores multiply, without conversions and without shared memory.

An element holds eight codes of an entry: 4 bytes at 4 bits, 4 bytes of each half at 8 bits, 2 bytes of the lower plane
and 2 halves of bytes of the upper one at 3 bits (`cache.tiers._join`). The code takes two elements at once and returns
eight registers: register p is the pair of code p of both elements, as 16-bit numbers w (w^2 + a), or in FP8 as numbers
of its bits. Times a factor these are the levels. A field of bits becomes a number by setting it into the mantissa of a
power of two, which is then subtracted together with the centre of the codes.
"""

import torch

from lkv.kernels import FP8, QUANTIZED_BITS
from lkv.kernels.ragged_attention.arguments import FP8_UNIT, LEVELS

RESULTS = 8  # registers that come back, which are also the codes of an element
# w = u / _UNITS, so that w^2 fits into float16.
_UNITS = {8: 16, 4: 1, 3: 1}
# a of w (w^2 + a) in float16 and bfloat16: of the numbers near the quotient of the levels' coefficients, the one with
# which the rounded results are nearest to the levels.
_SUMMANDS = {8: (58.875, 58.25), 4: (114.75, 114.5), 3: (40.625, 40.75)}
# Input registers: two of each tensor of words, one of each tensor of 16 bits.
INPUTS = {8: 4, FP8: 4, 4: 2, 3: 3}
_AND_OR = "0xEA"  # the table of (a & b) | c


def _factor(bits: int, is_bf16: bool) -> float:
    """Return what results are multiplied by to be levels: the best factor for a normal variable, after rounding."""
    if bits == FP8:
        return FP8_UNIT * (1 if is_bf16 else 2**8)
    dtype = _dtype(is_bf16)
    codes = torch.arange(2**bits, dtype=torch.float64, device="cpu") - (2**bits - 1) / 2
    slope, cubic = LEVELS[bits]
    levels, w = codes * (slope + cubic * codes.square()), codes / _UNITS[bits]
    results = ((w.square() + _SUMMANDS[bits][is_bf16]).to(dtype).double() * w).to(dtype).double()
    # How often a level is chosen, about.
    frequency = torch.exp(-levels.square() / 2) * torch.gradient(levels)[0]
    return float((frequency * levels * results).sum() / (frequency * results.square()).sum())


def _code(bits: int, is_bf16: bool) -> str:
    """Return the PTX for codes of `bits`, with results in bfloat16 or float16."""
    writer = _Writer(bits, is_bf16)
    {8: _restore_8, FP8: _restore_fp8, 4: _restore_4, 3: _restore_3}[bits](writer)
    return writer.text()


def _restore_8(writer: "_Writer") -> None:
    """Of words of the first half of the channels ($8, $9) and of the second: result 2 b + h is byte b of half h."""
    for part in range(RESULTS):
        byte, half = divmod(part, 2)
        pair = writer.register(f"prmt.b32 {{}}, ${8 + 2 * half}, ${9 + 2 * half}, {byte + 4 << 8 | byte:#x};")
        if not writer.is_bf16:
            number = writer.field([(pair, 0, 0xFF)], 0, 128)
            writer.write(f"fma.rn.f16x2 u, {number}, {writer.number(1 / 16)}, {writer.number(1 / 32)};")
        else:  # whose 7 bits of mantissa hold half a code at a time
            high = writer.field([(pair, 1, 0x78)], 3, 7.5)
            low = writer.field([(pair, -3, 0x78)], 3, 7.5, "s")
            writer.write(f"fma.rn.bf16x2 u, {low}, {writer.number(1 / 16)}, {high};")
        writer.cubic(part)


def _restore_fp8(writer: "_Writer") -> None:
    """As `_restore_8`: the bits of e4m3 as those of a 16-bit number, 2^8 or 2^120 times smaller, which is made up for.

    bfloat16 could not add up numbers that small; float16 can.
    """
    shift, bits = (4, 0x07F0) if writer.is_bf16 else (1, 0x3F80)
    for part in range(RESULTS):
        byte, half = divmod(part, 2)
        # Each code in the upper byte of its number; what is below does not matter.
        pair = writer.register(f"prmt.b32 {{}}, ${8 + 2 * half}, ${9 + 2 * half}, {byte * 0x1111 + 0x4400:#x};")
        sign = writer.register(f"lop3.b32 {{}}, {pair}, 0x80008000, {writer.constant(0)}, {_AND_OR};")
        moved = writer.register(f"shr.u32 {{}}, {pair}, {shift};")
        out = "u" if writer.is_bf16 else f"${part}"
        writer.write(f"lop3.b32 {out}, {moved}, {bits << 16 | bits:#x}, {sign}, {_AND_OR};")
        if writer.is_bf16:
            writer.write(f"fma.rn.bf16x2 ${part}, u, {writer.number(2.0**120)}, {writer.number(-0.0)};")


def _restore_4(writer: "_Writer") -> None:
    """Of words ($8, $9): result 2 b + h is half h of byte b."""
    for half, selector in enumerate((0x5410, 0x7632)):
        pair = writer.register(f"prmt.b32 {{}}, $8, $9, {selector:#x};")
        for number in range(4):
            # float16 has room for two fields, so that one shift serves both.
            low = 5 if number % 2 and not writer.is_bf16 else 1
            writer.field([(pair, 4 * number - low, 0xF << low)], low, 7.5)
            writer.cubic(4 * half + number)


def _restore_3(writer: "_Writer") -> None:
    """Of 16 bits of the lower plane ($8) and of the upper one: result 4 g + c is code c of group g.

    The upper bits are in the lower ($9) or in the upper ($10) halves of their bytes; the other register is 0 there.
    """
    upper = writer.register("shr.u32 {0}, $10, 4; lop3.b32 {0}, {0}, 0x0f0f0f0f, $9, " + _AND_OR + ";")
    for group in range(2):
        at = 8 * group
        for part, (pieces, low) in enumerate((
            ([("$8", at - 1, 0xE)], 1),
            ([("$8", at - 1, 0x70)], 4),
            ([("$8", at + 2, 0x30), (upper, at - 6, 0x40)], 4),
            ([(upper, at, 0xE)], 1),
        )):  # fmt: skip
            writer.field(pieces, low, 3.5)
            writer.cubic(4 * group + part)


class _Writer:
    """Writes PTX over pairs of 16-bit numbers; `u` and `s` are scratch registers."""

    def __init__(self, bits: int, is_bf16: bool):
        self.is_bf16 = is_bf16
        self._bits, self._type = bits, "bf16x2" if is_bf16 else "f16x2"
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
        half = int(torch.tensor(value, device="cpu").to(_dtype(self.is_bf16)).view(torch.int16)) & 0xFFFF
        return self.constant(half << 16 | half)

    def field(self, pieces: list[tuple[str, int, int]], low: int, centre: float, out: str = "u") -> str:
        """Set `out` to a field of bits that begins at bit `low`, minus `centre`.

        Args:
            pieces: Where its bits come from: a register, its shift to the right, and the bits to take then.
            low: The first bit of the field.
            centre: What to subtract.
            out: The register to set.
        """
        mantissa = 7 if self.is_bf16 else 10
        power = float(2 ** (mantissa - low))  # whose mantissa counts ones from bit `low`
        word = self.number(power)
        for source, shift, mask in pieces:
            if shift:
                step = f"shr.u32 {{}}, {source}, {shift};" if shift > 0 else f"shl.b32 {{}}, {source}, {-shift};"
                source = self.register(step)
            self.write(f"lop3.b32 {out}, {source}, {mask << 16 | mask:#x}, {word}, {_AND_OR};")
            word = out
        # Before sm_90, fma is the only arithmetic of bfloat16.
        summand = self.number(-(power + centre))
        one = f"fma.rn.bf16x2 {out}, {out}, {self.number(1.0)}" if self.is_bf16 else f"add.rn.f16x2 {out}, {out}"
        self.write(f"{one}, {summand};")
        return out

    def cubic(self, part: int) -> None:
        """Set result `part` to u (u^2 + a)."""
        self.write(f"fma.rn.{self._type} s, u, u, {self.number(_SUMMANDS[self._bits][self.is_bf16])};")
        product = f"fma.rn.bf16x2 ${part}, s, u, {self.number(-0.0)}" if self.is_bf16 else f"mul.rn.f16x2 ${part}, s, u"
        self.write(f"{product};")

    def text(self) -> str:
        names = ", ".join([*self._registers.values(), *self._constants.values(), "u", "s"])
        moves = "".join(f" mov.b32 {name}, {word:#x};" for word, name in self._constants.items())
        return f"{{ .reg .b32 {names};{moves} {' '.join(self._lines)} }}"


def _dtype(is_bf16: bool) -> torch.dtype:
    return torch.bfloat16 if is_bf16 else torch.float16


# The code, and what its results are multiplied by to be levels, by the bits and whether they are in bfloat16.
CODES = {(bits, is_bf16): _code(bits, is_bf16) for bits in QUANTIZED_BITS for is_bf16 in (False, True)}
FACTORS = {(bits, is_bf16): _factor(bits, is_bf16) for bits in QUANTIZED_BITS for is_bf16 in (False, True)}
