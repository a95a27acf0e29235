"""Wrong and right answers to exercise 8."""

import numpy as np
import torch
from wrong_answers import Mutant

from minillm.ladder import quantized as codes

MUTANTS = [
    Mutant("int8_encode", "largest number without its sign", "x.abs().amax(-1)", "x.amax(-1)",
           caught_by="the largest magnitude gets the last code, be it positive or negative"),
    Mutant("int8_encode", "over 128", "/ 127)", "/ 128)",
           caught_by="the largest magnitude gets the last code, be it positive or negative"),
    Mutant("int8_encode", "range over 255", "x.abs().amax(-1) / 127", "(x.amax(-1) - x.amin(-1)) / 255",
           caught_by="the largest magnitude gets the last code, be it positive or negative"),
    Mutant("int8_encode", "cut off towards zero", ".round()", ".trunc()",
           caught_by="every number gets the nearest code"),
    Mutant("int8_encode", "rounded downwards", ".round()", ".floor()", caught_by="every number gets the nearest code"),
    Mutant("int8_encode", "one scale for the heads of a token",
           "x.abs().amax(-1)", "x.abs().amax((-2, -1), keepdim=True)[..., 0].expand(x.shape[:-1])",
           caught_by="a row with large numbers does not coarsen the others"),
    Mutant("int8_encode", "one scale for all", "x.abs().amax(-1)", "x.abs().amax().expand(x.shape[:-1])",
           caught_by="a row with large numbers does not coarsen the others"),
    Mutant("int8_encode", "scale of zero", ".clamp_min(smallest)", "",
           caught_by="a row of zeros or of tiny numbers has a scale above 0"),
    Mutant("int8_encode", "looks for zero, not for what fp16 makes zero", ".clamp_min(smallest)", ".clamp_min(1e-12)",
           caught_by="a row of zeros or of tiny numbers has a scale above 0"),
    Mutant("int8_encode", "a floor that is far too high", ".clamp_min(smallest)", ".clamp_min(0.01)",
           caught_by="a row with large numbers does not coarsen the others"),
    Mutant("int8_encode", "bytes without a sign", "codes.to(torch.int8)", "codes.to(torch.int8).view(torch.uint8)",
           caught_by="codes are int8, and each row has one scale in fp16"),
    Mutant("int8_encode", "divides in place", "(x / scales[..., None].float()).round()",
           "x.div_(scales[..., None].float()).round()", caught_by="what is encoded stays as it was"),
    Mutant("int4_encode", "subtracts in place", "(x - minima[..., None].float())", "x.sub_(minima[..., None].float())",
           caught_by="what is encoded stays as it was"),
    Mutant("int4_encode", "the range from the minimum before it was rounded", "x.amax(-1) - minima.float()",
           "x.amax(-1) - x.amin(-1)", caught_by="no code spills into the other half of its byte"),
    Mutant("int4_encode", "pairs group by group",
           "codes = codes.round().clamp_min(0).to(torch.uint8).flatten(-2)  # [..., D]\n"
           "    return codes[..., 0::2] | codes[..., 1::2] << 4,",
           "codes = codes.round().clamp_min(0).to(torch.uint8)\n"
           "    return (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(-2),",
           caught_by="a byte may hold the end of one group and the beginning of the next"),
    Mutant("int4_decode", "shifts in place", "codes >> 4", "codes.bitwise_right_shift_(4)",
           caught_by="what is decoded goes on being the cache"),
    Mutant("int4_encode", "16 steps", "/ 15)", "/ 16)",
           caught_by="codes 0 and 15 are the smallest and the largest number of a group"),
    Mutant("int4_encode", "no minimum", "minima = x.amin(-1).half()", "minima = torch.zeros_like(x.amin(-1)).half()",
           caught_by="codes 0 and 15 are the smallest and the largest number of a group"),
    Mutant("int4_encode", "the largest number, not the range", "x.amax(-1) - minima.float()", "x.amax(-1)",
           caught_by="codes 0 and 15 are the smallest and the largest number of a group"),
    Mutant("int4_encode", "cut off downwards", ".round().clamp", ".floor().clamp",
           caught_by="every number gets the nearest of the 16 levels"),
    Mutant("int4_encode", "halves swapped", "codes[..., 0::2] | codes[..., 1::2] << 4",
           "codes[..., 0::2] << 4 | codes[..., 1::2]", caught_by="the first number of a byte is in its low half"),
    Mutant("int4_encode", "first half of the row in the low halves", "codes[..., 0::2] | codes[..., 1::2] << 4",
           "codes[..., : codes.shape[-1] // 2] | codes[..., codes.shape[-1] // 2 :] << 4",
           caught_by="codes 0 and 15 are the smallest and the largest number of a group"),
    Mutant("int4_encode", "one scale for the row", "x.amax(-1) - minima.float()",
           "(x.amax(-1) - minima.float()).amax(-1, keepdim=True).expand(x.shape[:-1])",
           caught_by="each group has a scale and a minimum of its own"),
    Mutant("int4_encode", "scale of zero", ".clamp_min(smallest)", "",
           caught_by="a group of equal numbers has a scale above 0"),
    Mutant("int4_encode", "no clamp", ".clamp_min(0)", "", caught_by="no code spills into the other half of its byte"),
    Mutant("int4_decode", "halves swapped", "(codes & 15, codes >> 4)", "(codes >> 4, codes & 15)",
           caught_by="the low half of a byte comes first"),
    Mutant("int4_decode", "low halves first", "torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)",
           "torch.cat((codes & 15, codes >> 4), dim=-1)",
           caught_by="codes, scales and minima give numbers again, in fp32"),
    Mutant("int4_decode", "groups dealt out in turns", "numbers.unflatten(-1, (scales.shape[-1], -1)).float()",
           "numbers.unflatten(-1, (-1, scales.shape[-1])).transpose(-1, -2).float()",
           caught_by="each group is read with its own scale and minimum"),
    Mutant("int4_decode", "minimum forgotten", " + minima[..., None].float()", "",
           caught_by="codes, scales and minima give numbers again, in fp32"),
    Mutant("int4_decode", "minimum scaled too", "numbers * scales[..., None].float() + minima[..., None].float()",
           "(numbers + minima[..., None].float()) * scales[..., None].float()",
           caught_by="codes, scales and minima give numbers again, in fp32"),
    Mutant("int4_decode", "summed in fp16", "numbers * scales[..., None].float() + minima[..., None].float()",
           "(numbers.half() * scales[..., None] + minima[..., None]).float()", caught_by="the sum is made in fp32"),
    Mutant("int4_decode", "codes taken as signed", "numbers.unflatten", "((numbers ^ 8).to(torch.int8) - 8).unflatten",
           caught_by="codes, scales and minima give numbers again, in fp32"),
]

SURVIVORS = {}


def int8_of_the_package(x):
    encoded, scales = codes.int8_encode(x)
    return encoded.view(torch.int8), scales


def int8_in_double(x):
    """With numpy, in fp64, and rounded against the scale before fp16 has rounded it."""
    rows = x.double().numpy()
    scales = np.maximum(np.abs(rows).max(-1), 127 * 2.0**-24) / 127
    rounded = np.floor(rows / scales[..., None] + 0.5).astype(np.int8)
    return torch.from_numpy(rounded), torch.from_numpy(np.asarray(scales)).half()


def int4_in_double(x, group):
    """Row by row in fp64, scale and minimum unrounded while codes are chosen; bytes by multiplication."""
    numbers = x.double().reshape(-1, group)
    low, high = numbers.min(1).values, numbers.max(1).values
    scales = torch.where(high > low, (high - low) / 15, torch.ones_like(low))
    quantised = torch.floor((numbers - low[:, None]) / scales[:, None] + 0.5).clamp(0, 15).int()
    pairs = quantised.reshape(*x.shape[:-1], -1, 2)
    shape = (*x.shape[:-1], x.shape[-1] // group)
    packed = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    return packed, scales.half().reshape(shape), low.half().reshape(shape)


def decode_by_arithmetic(packed, scales, minima):
    """Remainder and quotient in fp64, written into every second place."""
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.float64)
    out[..., 0::2], out[..., 1::2] = packed.double() % 16, torch.div(packed.double(), 16, rounding_mode="floor")
    group = out.shape[-1] // scales.shape[-1]
    wide = (tensor.double().repeat_interleave(group, dim=-1) for tensor in (scales, minima))
    return (out * next(wide) + next(wide)).float()


ALTERNATIVES = {
    "int8_encode": [int8_of_the_package, int8_in_double],
    "int4_encode": [codes.int4_encode, int4_in_double],
    "int4_decode": [codes.int4_decode, decode_by_arithmetic],
}
