"""Exercise 8: keys and values in 8 and in 4 bits.

The truth is a search in plain Python: of all values that the codes of a format can stand
for, the nearest one. Inputs are such that exact scales are numbers that fp16 has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.course.grading.tasks import Exercise, Task, close, expect, leaves_alone

TOLERANCE = 1e-4

int8_encode = Task(
    "int8_encode",
    "int8_encode",
    hints=(
        "The largest magnitude of a row becomes code 127. What is one step worth then?",
        "scale = largest |x| / 127, over the last axis only. A row of zeros needs some scale that is not 0, "
        "and so does a row whose scale fp16 would round to 0.",
        "scales = (x.abs().amax(-1) / 127).clamp_min(6e-5).half(); codes = (x / scales[..., None].float()).round(), "
        "as torch.int8.",
    ),
)
int4_encode = Task(
    "int4_encode",
    "int4_encode",
    hints=(
        "Cut the last axis into groups: x.unflatten(-1, (-1, group)). Each group gets a minimum and a scale.",
        "16 codes have 15 steps between them. Two codes go into one byte: the first, plus 16 times the second.",
        "scales = ((x.amax(-1) - minima) / 15).clamp_min(6e-5).half(); codes = ((x - minima) / scales).round(), "
        "clamped to 0 … 15, flattened, as uint8; codes[..., 0::2] | codes[..., 1::2] << 4.",
    ),
)
int4_decode = Task(
    "int4_decode",
    "int4_decode",
    hints=(
        "A byte holds two numbers: its remainder by 16, and how often 16 goes into it.",
        "torch.stack((low, high), dim=-1).flatten(-2) puts the halves back in turns. Then cut into as many groups as "
        "there are scales.",
        "codes.unflatten(-1, (scales.shape[-1], -1)).float() * scales[..., None].float() + minima[..., None].float(), "
        "and flatten(-2).",
    ),
)
EXERCISE = Exercise(
    name="08_quantised_kv",
    title="Keys and values in 8 and 4 bits",
    minutes=40,
    difficulty=2,
    importance=2,
    chapter="05_quantized_kv",
    tasks=(int8_encode, int4_encode, int4_decode),
)


def nearest(x: float, values: list[float]) -> float:
    """The one of `values` that is nearest to x."""
    return min(values, key=lambda value: abs(value - x))


# -- int8 -----------------------------------------------------------------------------------------


def from_int8(encoded: tuple[Tensor, Tensor]) -> Tensor:
    """Codes [..., D] and their scales [...] as the numbers they stand for."""
    codes, scales = encoded
    return codes.double() * scales.double()[..., None]


@int8_encode.check(
    mistake="The result is two tensors: codes [..., D] of torch.int8, and scales [...] of torch.float16.",
    look="'8 bits'",
)
def int8_forms(answer):
    """Codes are int8, and each row has one scale in fp16."""
    codes, scales = answer(torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)))
    expect(codes.dtype == torch.int8 and codes.shape == (3, 2, 8), "codes of x [3, 2, 8]: their dtype and shape")
    expect(scales.dtype == torch.float16 and scales.shape == (3, 2), "scales of x [3, 2, 8]: their dtype and shape")


@int8_encode.check(
    mistake="The scale is the largest |x| over 127: not x's largest without its sign, not over 128 or 255.",
    look="'8 bits'",
)
def int8_range(answer):
    """The largest magnitude gets the last code, be it positive or negative."""
    x = torch.tensor([[7.9375, 1.0, -2.0, 0.5], [2.0, -7.9375, 6.0, 1.0]])
    codes, scales = answer(x.clone())
    ends = [codes[0, 0].item(), codes[1, 1].item()]
    expect(close(ends, [127.0, -127.0], 0.1), "the codes of 7.9375 and of -7.9375, each the largest of its row")
    expect(close(from_int8((codes, scales)), x, TOLERANCE), "two rows with the largest numbers 7.9375 and -7.9375")


@int8_encode.check(
    mistake="Codes were cut off towards zero or downwards: round before the conversion to int8.",
    look="'8 bits'",
)
def int8_nearest(answer):
    """Every number gets the nearest code."""
    step = 2.0**-5
    x = [[step * (k + part) for k, part in zip((127, 3, -40, 99, -7, 0), parts, strict=True)]
         for parts in ((0, 0.4, 0.3, -0.3, -0.4, 0.3), (0, -0.3, -0.4, 0.4, 0.3, -0.4))]
    want = [[nearest(number, [code * step for code in range(-127, 128)]) for number in row] for row in x]
    expect(close(from_int8(answer(torch.tensor(x))), want, TOLERANCE), "2 rows of 6 numbers, none of them halfway")


@int8_encode.check(
    mistake="One scale serves several tokens or heads: take the maximum over the last axis only.",
    look="'8 bits'",
)
def int8_own_scales(answer):
    """A row with large numbers does not coarsen the others."""
    x = torch.tensor([[[254.0, 30.0, -6.0], [0.0127, 0.0, -0.0063]], [[1.27, 0.5, 0.01], [254.0, 254.0, 0.0]]])
    error = (from_int8(answer(x.clone())) - x.double()).abs() / x.abs().amax(-1, keepdim=True)
    expect(close(error, torch.zeros(2, 2, 3), 0.005), "2 tokens of 2 heads with largest numbers from 0.0127 to 254")


@int8_encode.check(
    mistake="The scale is 0, or fp16 rounds it to 0, and dividing by it gives NaN or infinity.",
    look="'A scale is never 0'",
)
def int8_zeros(answer):
    """A row of zeros or of tiny numbers has a scale above 0."""
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-7, -1e-7, 0.0], [7.9375, 0.0, -7.9375]])
    codes, scales = answer(x.clone())
    expect(bool((scales > 0).all()), "the scales of a row of zeros, of 1e-7, and of 7.9375")
    expect(close(from_int8((codes, scales)), x, 1e-3), "a row of zeros, one of 1e-7, and one of 7.9375, encoded")


KEPT = "An operation in place (`*=`, `/=`, `abs_()`, `>>=`) wrote into what was passed in."


@int8_encode.check(mistake=KEPT, look="'8 bits'")
def int8_leaves_x(answer):
    """What is encoded stays as it was."""
    leaves_alone(answer, torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(4)), asked="x [3, 2, 8]")


# -- int4 -----------------------------------------------------------------------------------------


def from_int4(codes: Tensor, scales: Tensor, minima: Tensor) -> list[list[float]]:
    """codes [N, D / 2], scales and minima [N, D / group] -> [N][D], by arithmetic on Python numbers."""
    rows = []
    for bytes_, row_scales, row_minima in zip(codes.tolist(), scales.tolist(), minima.tolist(), strict=True):
        numbers = [half for byte in bytes_ for half in (byte % 16, byte // 16)]
        group = len(numbers) // len(row_scales)
        rows.append([row_scales[i // group] * q + row_minima[i // group] for i, q in enumerate(numbers)])
    return rows


@int4_encode.check(
    mistake="The result is codes [..., D / 2] of torch.uint8, and scales and minima [..., D / group] of torch.float16.",
    look="'4 bits'",
)
def int4_forms(answer):
    """Two codes a byte, and a scale and a minimum per group in fp16."""
    codes, scales, minima = answer(torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)), 8)
    expect(codes.dtype == torch.uint8 and codes.shape == (3, 2, 8), "codes of x [3, 2, 16] in groups of 8")
    for name, tensor in (("scales", scales), ("minima", minima)):
        expect(tensor.dtype == torch.float16 and tensor.shape == (3, 2, 2), f"{name} of x [3, 2, 16] in groups of 8")


# Where the order of two numbers in their byte is not what a check is about, both are the same.


@int4_encode.check(
    mistake="16 codes have 15 steps between them, from the group's minimum to its maximum, whatever their signs.",
    look="'4 bits'",
)
def int4_range(answer):
    """Codes 0 and 15 are the smallest and the largest number of a group."""
    x = torch.tensor([[8.0, 8.0, 3.0, 3.0, 10.5, 10.5], [-3.0, -3.0, 4.5, 4.5, 1.0, 1.0]])  # from 3 and -3, 7.5 wide
    expect(close(from_int4(*answer(x.clone(), 6)), x, TOLERANCE), "one group from 3 to 10.5, one from -3 to 4.5")


@int4_encode.check(
    mistake="Codes were cut off downwards: round before the conversion to uint8.",
    look="'4 bits'",
)
def int4_nearest(answer):
    """Every number gets the nearest of the 16 levels."""
    places = (0, 15, 3.3, 8.7, 11.4, 5.6)  # in steps
    x = [[0.25 * place - 1 for place in places for _ in range(2)]]
    want = [[nearest(number, [0.25 * code - 1 for code in range(16)]) for number in row] for row in x]
    expect(close(from_int4(*answer(torch.tensor(x), 12)), want, TOLERANCE), "12 numbers from -1 to 2.75")


@int4_encode.check(
    mistake="The two halves are swapped, or the codes were paired otherwise: number 2i is in the low half of byte i.",
    look="'Two to a byte'",
)
def int4_packing(answer):
    """The first number of a byte is in its low half."""
    x = torch.tensor([[0.0, 15.0, 7.0, 2.0, 1.0, 12.0]])
    expect(close(from_int4(*answer(x.clone(), 6)), x, TOLERANCE), "the numbers 0, 15, 7, 2, 1, 12 as one group")


@int4_encode.check(
    mistake="Codes were paired group by group: bytes belong to the row, so a pair may lie in two groups.",
    look="'Two to a byte'",
)
def int4_odd_groups(answer):
    """A byte may hold the end of one group and the beginning of the next."""
    x = torch.tensor([[0.0, 15.0, 7.0, 3.0, 18.0, 10.0]])
    expect(close(from_int4(*answer(x.clone(), 3)), x, TOLERANCE), "the numbers 0, 15, 7, 3, 18, 10 in groups of 3")


@int4_encode.check(
    mistake="One large number coarsens the whole row: minimum and maximum belong to a group of neighbours.",
    look="'4 bits'",
)
def int4_groups(answer):
    """Each group has a scale and a minimum of its own."""
    x = torch.tensor([[0.0, 0.0, 1.875, 1.875, -600.0, -600.0, 900.0, 900.0],
                      [7.0, 7.0, 10.75, 10.75, 0.25, 0.25, 4.0, 4.0]])
    got = from_int4(*answer(x.clone(), 4))
    expect(close(got, x, TOLERANCE), "2 rows of 2 groups, of which one reaches from -600 to 900")


@int4_encode.check(
    mistake="Maximum and minimum are equal, so the scale is 0, and dividing by it gives NaN.",
    look="'A scale is never 0'",
)
def int4_constant(answer):
    """A group of equal numbers has a scale above 0."""
    x = torch.tensor([[2.5, 2.5, 2.5, 2.5, 0.0, 0.0, 1.875, 1.875], [0.0] * 8])
    codes, scales, minima = answer(x.clone(), 4)
    expect(bool((scales > 0).all()), "the scales where one group is all 2.5 and others are all 0")
    expect(close(from_int4(codes, scales, minima), x, TOLERANCE), "a group that is all 2.5, encoded")


@int4_encode.check(
    mistake="fp16 rounded the minimum up, and a number fell below it: code -1 is 255 as a byte. Clamp to 0 … 15.",
    look="'Two to a byte'",
)
def int4_spill(answer):
    """No code spills into the other half of its byte."""
    x = torch.tensor([[1000.3, 1000.7, 1003.3, 1002.5], [1000.2, 1000.6, 1003.2, 1002.4]])  # fp16 has 1000.0 and .5
    got = torch.tensor(from_int4(*answer(x.clone(), 4)))  # a step is 0.2
    expect(close(got[:1, 1:], x[:1, 1:], 0.25), "the numbers 1000.3, 1000.7, 1003.3, 1002.5 as one group")
    expect(close(got[1:], x[1:], 0.25), "the numbers 1000.2, 1000.6, 1003.2, 1002.4 as one group",
           "fp16 rounded the minimum down, and a number is 16 steps above it: clamp to 0 … 15.")


@int4_encode.check(mistake=KEPT, look="'4 bits'")
def int4_leaves_x(answer):
    """What is encoded stays as it was."""
    leaves_alone(answer, torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(5)), 4, asked="x [3, 2, 8]")


@int4_decode.check(
    mistake="Each number is code * scale + minimum, and the result is [..., D] of torch.float32.",
    look="'And back'",
)
def decode_forms(answer):
    """Codes, scales and minima give numbers again, in fp32."""
    codes = torch.tensor([[0x33, 0xFF, 0x00]], dtype=torch.uint8)
    scales, minima = torch.tensor([[0.5]]).half(), torch.tensor([[-2.0]]).half()
    got = answer(codes.clone(), scales, minima)
    expect(got.dtype == torch.float32 and got.shape == (1, 6), "3 bytes and 1 scale: dtype and shape")
    expect(close(got, from_int4(codes, scales, minima), TOLERANCE), "bytes 0x33, 0xFF, 0x00, scale 0.5, minimum -2")


@int4_decode.check(
    mistake="The two halves of a byte are swapped, or all low halves come before all high ones.",
    look="'Two to a byte'",
)
def decode_order(answer):
    """The low half of a byte comes first."""
    codes = torch.tensor([[0x21, 0x43], [0x65, 0x87]], dtype=torch.uint8)
    got = answer(codes.clone(), torch.ones(2, 1).half(), torch.zeros(2, 1).half())
    expect(close(got, from_int4(codes, torch.ones(2, 1), torch.zeros(2, 1)), TOLERANCE), "the bytes 0x21, 0x43")


@int4_decode.check(
    mistake="Neighbours form a group: with D numbers and G scales, number i belongs to group i // (D / G).",
    look="'4 bits'",
)
def decode_groups(answer):
    """Each group is read with its own scale and minimum."""
    draw = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (2, 6), generator=draw, dtype=torch.uint8)
    scales, minima = (torch.randint(1, 9, (2, 3), generator=draw).half() for _ in range(2))
    got = answer(codes.clone(), scales, minima)
    expect(close(got, from_int4(codes, scales, minima), TOLERANCE), "2 rows of 3 groups of 4")


@int4_decode.check(
    mistake="code * scale + minimum was computed in fp16, which rounds it once more: convert to fp32 first.",
    look="'And back'",
)
def decode_precision(answer):
    """The sum is made in fp32."""
    codes = torch.tensor([[0x31, 0x57]], dtype=torch.uint8)
    scales, minima = torch.tensor([[2.0**-7]]).half(), torch.tensor([[100.0]]).half()
    got = answer(codes.clone(), scales, minima)
    expect(close(got, from_int4(codes, scales, minima), TOLERANCE), "scale 1/128, minimum 100")


@int4_decode.check(
    mistake="Only the last axis holds codes; all axes before it stay as they are.",
    look="'And back'",
)
def decode_axes(answer):
    """Keys of any number of axes."""
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (2, 3, 4), generator=draw, dtype=torch.uint8)
    scales, minima = (torch.randn(2, 3, 2, generator=draw).half() for _ in range(2))
    want = [from_int4(codes[i], scales[i], minima[i]) for i in range(2)]
    got = answer(codes.clone(), scales, minima)
    expect(close(got, want, TOLERANCE), "2 tokens of 3 heads, 4 bytes and 2 groups each")


@int4_decode.check(mistake=KEPT, look="'And back'")
def decode_leaves_codes(answer):
    """What is decoded goes on being the cache."""
    draw = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 256, (2, 6), generator=draw, dtype=torch.uint8)
    scales, minima = (torch.randn(2, 3, generator=draw).half() for _ in range(2))
    leaves_alone(answer, codes, scales, minima, asked="codes, scales and minima")
