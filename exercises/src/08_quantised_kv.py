# %% [markdown]
# # Exercise 8 · Keys and values in 8 and 4 bits
#
# A key of 64 numbers takes 128 bytes in 16 bits. In 8 bits it takes 66, in 4 bits 40. Here you write the two formats
# of rung 5, as the cache stores them.
#
# **To look at**: notebook 5; in the package `minillm/ladder/quantized.py`.

# %%
import torch

from minillm.course.grading import check, hint

# %% [markdown]
# ## 8 bits
#
# `x` [..., D] holds one row of D numbers for each token and head. Each row is stored as D whole numbers from -127 to
# 127, its codes, and one scale. The scale is what one step is worth: code times scale is the number again, nearly.
#
# - `scale` = the row's largest |x| / 127, kept in fp16 (`torch.float16`), one for each row.
# - `code` = the whole number whose product with the scale is nearest to x, kept as `torch.int8`.
#
# Every token and head has a scale of its own: a slot can be written without a look at its neighbours. Leave what you
# are given as it is, here and below.
#
# ## A scale is never 0
#
# A row of zeros would have the scale 0. So would a row of very small numbers, since the smallest number of fp16
# above 0 is 2⁻²⁴. Both must be stored with some scale above 0, and read as numbers within 10⁻³ of what they were.

# %%
def int8_encode(x):
    """x [..., D] in fp32 -> codes [..., D] int8, scales [...] fp16."""
    ### BEGIN SOLUTION
    smallest = torch.finfo(torch.float16).tiny  # that fp16 holds at full precision
    scales = (x.abs().amax(-1) / 127).clamp_min(smallest).half()
    codes = (x / scales[..., None].float()).round()
    return codes.to(torch.int8), scales
    ### END SOLUTION


# %%
check("int8_encode", int8_encode)

# %% [markdown]
# ## 4 bits
#
# With 4 bits there are only 16 codes, 0 to 15. So they are spent more carefully: each group of `group` neighbouring
# numbers has a scale *and* a minimum, and its codes reach from its smallest number to its largest.
#
# - `minimum` = the group's smallest number, `scale` = (largest - smallest) / 15, both in fp16; a scale is never 0.
# - `code` = the whole number from 0 to 15 for which code * scale + minimum is nearest to x.
#
# ## Two to a byte
#
# Two codes share a byte (`torch.uint8`): number 2i of the row is in the low half of byte i, number 2i + 1 in the high
# half. The codes 5 and 3 make the byte 5 + 16 * 3 = 0x35. A code outside of 0 to 15 would spill into the other half.
# D is even; where `group` is odd, a byte holds the end of one group and the beginning of the next.

# %%
def int4_encode(x, group):
    """x [..., D] in fp32 -> codes [..., D / 2] uint8, scales [..., D / group] fp16, minima [..., D / group] fp16."""
    ### BEGIN SOLUTION
    x = x.unflatten(-1, (-1, group))  # [..., D / group, group]
    minima = x.amin(-1).half()
    smallest = torch.finfo(torch.float16).tiny
    scales = ((x.amax(-1) - minima.float()) / 15).clamp_min(smallest).half()
    codes = (x - minima[..., None].float()) / scales[..., None].float()
    codes = codes.round().clamp_min(0).to(torch.uint8).flatten(-2)  # [..., D]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales, minima
    ### END SOLUTION


# %%
check("int4_encode", int4_encode)

# %% [markdown]
# ## And back
#
# Reading makes fp32 of them again: code * scale + minimum, computed in fp32. There are as many groups as scales.

# %%
def int4_decode(codes, scales, minima):
    """codes [..., D / 2] uint8, scales and minima [..., D / group] fp16 -> [..., D] fp32."""
    ### BEGIN SOLUTION
    numbers = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)  # [..., D]
    numbers = numbers.unflatten(-1, (scales.shape[-1], -1)).float()  # [..., D / group, group]
    return (numbers * scales[..., None].float() + minima[..., None].float()).flatten(-2)
    ### END SOLUTION


# %%
check("int4_decode", int4_decode)

# %% [markdown]
# ## What it costs
#
# Keys with two channels that are far larger than the rest, as those of real models have.

# %% tags=["demo"]
keys = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
keys[:, [3, 40]] *= 8
codes, scales = int8_encode(keys)
formats = {"int8": (codes.float() * scales[:, None].float(), codes.nbytes + scales.nbytes)}
for group in (64, 32, 16):
    encoded = int4_encode(keys, group)
    formats[f"int4, groups of {group}"] = int4_decode(*encoded), sum(tensor.nbytes for tensor in encoded)
for name, (read, size) in formats.items():
    print(f"{name}: {size / len(keys):.0f} bytes a key, mean error {(read - keys).abs().mean():.3f}")
